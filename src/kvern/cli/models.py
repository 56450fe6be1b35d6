"""`kvern models`: the names of the catalogue, and which of them are on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from kvern.catalog import CATALOG, DEFAULT_MODEL, is_on_disk, model_path
from kvern.cli.output import print_json


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    subparsers.add_parser(
        "models",
        help="list the models known by name",
        description="Lists the catalogue. Any GGUF file or Hugging Face folder works by its path.",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the catalogue."""
    if args.json:
        print_json({"default": DEFAULT_MODEL, "models": [_row(name) for name in CATALOG]})
        return 0
    width = max(map(len, CATALOG))
    for name, entry in CATALOG.items():
        state = "here" if is_on_disk(entry) else f"{entry.download_bytes / 1e6:,.0f} MB to fetch"
        print(f"{name:<{width}}  {entry.description}")
        print(f"{'':<{width}}  {state}; context {entry.context:,}; {entry.licence}")
    return 0


def _row(name: str) -> dict[str, Any]:
    entry = CATALOG[name]
    here = is_on_disk(entry)
    return {
        "name": name,
        "description": entry.description,
        "licence": entry.licence,
        "context": entry.context,
        "has_chat_template": entry.has_chat_template,
        "file_bytes": entry.file_bytes,
        "download_bytes": entry.download_bytes,
        "sha256": entry.file_sha256,
        "on_disk": here,
        "path": model_path(entry) if here else None,
    }
