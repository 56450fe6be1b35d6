"""Model names: what kvern knows by name, where it lies on this machine, how it gets here.

A model is named in one of four ways, tried in this order:

1. a name in the catalogue (``smollm2``); write ``./smollm2`` for a folder of that name;
2. a path of a GGUF file, a Hugging Face folder or a ``config.json``;
3. a hub id, ``org/name`` or ``org/name:FILE.gguf``.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvern.catalog.entries import CATALOG, DEFAULT_MODEL, CatalogEntry, WheelPart
from kvern.catalog.fetch import fetch_entry
from kvern.catalog.folder import cache_home, damage_of, model_path
from kvern.catalog.given import check_file, check_weights, path_of
from kvern.catalog.hub import hub_path, is_hub_id
from kvern.catalog.progress import Progress, StderrProgress
from kvern.errors import ModelError

__all__ = [
    "CATALOG",
    "DEFAULT_MODEL",
    "CatalogEntry",
    "Progress",
    "StderrProgress",
    "WheelPart",
    "cache_home",
    "fetch",
    "fetch_entry",
    "is_on_disk",
    "locate",
    "model_path",
    "resolve",
]


def is_on_disk(entry: CatalogEntry) -> bool:
    """Whether the entry's file lies in the cache folder with its right size and hash."""
    path = model_path(entry)
    return path.is_file() and damage_of(entry, path) is None


def locate(model: str | os.PathLike[str]) -> Path:
    """The path of a model that is on this machine; never touches the network.

    Raises:
        ModelError: the name is unknown, the path does not exist, the model has not been fetched
            yet, or its file in the cache folder is damaged; the sentence says what to run.
    """
    return resolve(model, allow_fetch=False)


def fetch(model: str, progress: Progress | None = None) -> Path:
    """Brings a catalogue name or hub id onto this machine and returns its path.

    A file that is already there is hashed and, if it is damaged, fetched again. A path that exists
    is returned as it is.

    Raises:
        FetchError: no network, wrong checksum, no disk, no permission.
        ModelError: the name is unknown.
    """
    entry = CATALOG.get(model)
    if entry is not None:
        return fetch_entry(entry, progress=progress)
    if is_hub_id(model) and path_of(model) is None:
        return hub_path(model, allow_fetch=True, look_here_first=False)
    return locate(model)


def resolve(
    model: str | os.PathLike[str],
    *,
    allow_fetch: bool = True,
    progress: Progress | None = None,
) -> Path:
    """The path of a model that is about to run, fetched first if it is not here.

    A damaged file is never replaced on the way to running it: the error names it and the command.
    With `allow_fetch` off the model is only looked at, and a configuration is enough.

    Raises:
        ModelError: see `locate`; or there are no weights behind the path.
        FetchError: see `fetch`.
    """
    text = os.fspath(model)
    entry = CATALOG.get(text)
    if entry is not None:
        return _resolve_entry(entry, allow_fetch=allow_fetch, progress=progress)
    if not text.strip():
        raise ModelError(
            f"the model's name is empty: give a path, or one of {', '.join(CATALOG)} "
            "(see `kvern models`)"
        )
    path = path_of(text)
    if path is not None:
        check_file(path)
        if allow_fetch:
            check_weights(path)
        return path
    if is_hub_id(text) and not isinstance(model, Path):
        return hub_path(text, allow_fetch=allow_fetch)
    if _looks_like_path(text):
        raise ModelError(f"there is no file or folder {text}")
    raise ModelError(
        f"unknown model {text!r}: give a path, or one of {', '.join(CATALOG)} (see `kvern models`)"
    )


def _resolve_entry(entry: CatalogEntry, *, allow_fetch: bool, progress: Progress | None) -> Path:
    path = model_path(entry)
    if not path.is_file():
        if allow_fetch:
            return fetch_entry(entry, progress=progress)
        raise ModelError(
            f"{entry.name} is not on this machine yet: run `kvern pull {entry.name}` first"
        )
    damage = damage_of(entry, path)
    if damage is not None:
        raise ModelError(
            f"{path} is damaged ({damage}): run `kvern pull {entry.name}` to fetch it again"
        )
    return path


def _looks_like_path(text: str) -> bool:
    return (
        os.sep in text or text.startswith((".", "~")) or text.endswith((".gguf", ".json", os.sep))
    )
