"""Where a configuration lies: a config.json, a model folder, a GGUF file, or already read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvern.errors import FileFormatError, ModelError
from kvern.spec.configs.describe import describe
from kvern.spec.configs.gguf_keys import config_from_gguf
from kvern.spec.gguf import GGUFHeader, is_gguf, read_header
from kvern.spec.layers import ModelSpec

Source = str | os.PathLike[str] | GGUFHeader | Mapping[str, Any]
"""A path (config.json, model folder, GGUF file), a header already read, or the configuration."""


def load_model_spec(source: Source, name: str | None = None) -> ModelSpec:
    """Describe a model's layers and their caches.

    Args:
        source: where the configuration lies. Catalogue names are resolved by the caller.
        name: what to call the model; the file's or folder's name where not given.

    Raises:
        ModelError: the file cannot be read, or the configuration lacks a field (named).
        FileFormatError: the file is damaged.
        UnsupportedModelError: the family or a layer kind is unknown (named, with the known ones),
            or the model's computed positions do not stay as they are (with the reason).
    """
    return describe(read_config(source), name or _name_of(source))


def read_config(source: Source) -> dict[str, Any]:
    """The configuration in `config.json` form, wherever it lies.

    GGUF metadata is translated into the same fields; a field that the file lacks is absent.

    Raises:
        ModelError: the file cannot be read.
        FileFormatError: the file is damaged.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, GGUFHeader):
        return config_from_gguf(source)
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ModelError(f"{path} does not exist: give a config.json, a folder or a GGUF file")
    if is_gguf(path):
        return config_from_gguf(read_header(path))
    return _read_json(path)


def _name_of(source: Source) -> str:
    if isinstance(source, Mapping):
        return "config"
    path = source.path if isinstance(source, GGUFHeader) else Path(source)
    if path.is_dir():
        return path.resolve().name
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is neither GGUF nor valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise FileFormatError(f"{path} holds a {type(values).__name__}, not a configuration")
    return values
