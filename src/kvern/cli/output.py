"""What every command prints the same way: one JSON object, or one error sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from kvern.cli.streams import forget_stdout
from kvern.errors import KvernError


def print_json(document: dict[str, Any]) -> None:
    """Prints `document` as the one JSON object on stdout; NaN and infinities become null."""
    try:
        text = json.dumps(document, default=_plain, ensure_ascii=False, allow_nan=False, indent=2)
    except ValueError:
        finite = _finite(json.loads(json.dumps(document, default=_plain)))
        text = json.dumps(finite, ensure_ascii=False, allow_nan=False, indent=2)
    sys.stdout.write(text.encode(errors="replace").decode() + "\n")
    sys.stdout.flush()


def print_error(error: KvernError, *, as_json: bool) -> None:
    """Prints the sentence on stderr and, under --json, the object that stdout owes its reader.

    A stream that takes nothing more (its reader left, its disk is full) changes neither the other
    stream nor the exit code.
    """
    sentence = " ".join(str(error).split())
    with contextlib.suppress(OSError):
        # A lone surrogate can come from an undecodable argument; it has no UTF-8 form.
        line = sentence.encode(errors="replace").decode()
        print(f"error: {line}", file=sys.stderr, flush=True)
    if not as_json:
        return
    document = {"type": type(error).__name__, "message": sentence, "exit_code": error.exit_code}
    try:
        print_json({"error": document})
    except OSError:
        forget_stdout()


def _plain(value: Any) -> Any:
    """Turns dataclasses, numpy numbers, paths and sets into what JSON knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
