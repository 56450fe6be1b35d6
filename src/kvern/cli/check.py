"""`kvern check [MODEL]`: the doctor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from kvern.catalog import DEFAULT_MODEL
from kvern.cli.engine_options import load_engine
from kvern.cli.output import print_json


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "check",
        help="prove that answers with the cache equal answers without it",
        description="Compares every way in which the cache can be used (token by token, in chunks, in "
        "batches, hits, partial tails, twins, preemption, forks, salts) with one full pass without a cache, "
        "verifies every invariant on the way, and names the probable fault of each failure. Exits with 1 "
        "when a case fails.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"catalogue name, GGUF file or Hugging Face folder (default: {DEFAULT_MODEL})",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cases")
    parser.add_argument(
        "--trace-layers", action="store_true", help="name the first layer that differs as well"
    )
    group = parser.add_argument_group("what is checked")
    group.add_argument(
        "--backend", metavar="NAME", help="auto, native, reference or torch (default: auto)"
    )
    group.add_argument(
        "--kv-format", metavar="NAME", help="stored form of keys and values (default: bf16)"
    )
    group.add_argument(
        "--weights-format", metavar="NAME", help="auto (the file's own form) or fp32"
    )
    group.add_argument(
        "--block-size", type=int, metavar="N", help="tokens in a block (default: 16)"
    )
    group.add_argument("--context", type=int, metavar="N", help="longest sequence, in tokens")
    group.add_argument("--threads", type=int, metavar="N", help="threads of the native backend")
    parser.set_defaults(kv_memory=None, no_cache=None)


def run(args: argparse.Namespace) -> int:
    """Checks one model; 0 when every case passes."""
    from kvern.check.doctor import check  # numpy and the kernels: only for who runs a model
    from kvern.check.lab import CheckOptions
    from kvern.check.report import report_lines

    options = CheckOptions(is_quick=args.quick, trace_layers=args.trace_layers)
    with load_engine(args) as llm:
        report = check(llm, options, progress=_progress_bar())
    if args.json:
        print_json(report.document())
    else:
        print("\n".join(report_lines(report)))
    return 0 if report.is_healthy else 1


def _progress_bar() -> Callable[[int, int, str], None] | None:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        return None
    from tqdm import tqdm  # only where somebody looks at it

    bar = tqdm(unit="case", leave=False, file=sys.stderr)

    def show(done: int, total: int, title: str) -> None:
        bar.total = total
        bar.set_description_str(title)
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show
