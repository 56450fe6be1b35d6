"""`kvern check [MODEL]`: the doctor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvern.catalog import DEFAULT_MODEL
from kvern.cli.engine_options import load_engine
from kvern.cli.output import print_json

if TYPE_CHECKING:
    from kvern.check.lab import CheckOptions
    from kvern.check.results import CheckReport


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
    parser.add_argument(
        "--max-border-tokens",
        type=_positive,
        metavar="N",
        help="follow windows, chunks and position regimes of up to N tokens past their end, whatever it takes "
        "(default: those that take a few minutes)",
    )
    parser.add_argument(
        "--against",
        choices=("transformers",),
        help="compare with this library's float32 passes as well (needs torch, transformers, and gguf for a "
        "GGUF file)",
    )
    group = parser.add_argument_group("what is checked")
    group.add_argument(
        "--backend", metavar="NAME", help="auto, native, reference or torch (default: auto)"
    )
    group.add_argument(
        "--kv-format", metavar="NAME", help="stored form of keys and values (default: bf16)"
    )
    group.add_argument(
        "--weights-format", metavar="NAME", help="auto (the file's own form), fp32 or bf16"
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

    options = CheckOptions(
        is_quick=args.quick, trace_layers=args.trace_layers, max_border=args.max_border_tokens
    )
    if args.against:
        _require_packages()
    with load_engine(args) as llm:
        reports = [check(llm, options, progress=_progress_bar())]
    if args.against:
        reports.append(_against_transformers(args, options))
    if args.json:
        document = reports[0].document()
        for other in reports[1:]:
            document["against"] = other.document()
        print_json(document)
    else:
        print("\n\n".join("\n".join(report_lines(report)) for report in reports))
    return 0 if all(report.is_healthy for report in reports) else 1


def _require_packages() -> None:
    """Say what is missing before minutes are spent."""
    from kvern.check.against import require

    require("torch")
    require("transformers")


def _against_transformers(args: argparse.Namespace, options: CheckOptions) -> CheckReport:
    """The engine with float32 weights, keys and values, compared with transformers."""
    from kvern.check.against import Transformers
    from kvern.check.doctor import check_against

    exact = argparse.Namespace(**{**vars(args), "kv_format": "fp32", "weights_format": "fp32"})
    with load_engine(exact) as llm:
        config = llm.model.decoder.config
        oracle = Transformers(
            llm.model.path, config.vocab_size, depends_on_length=config.regimes is not None
        )
        return check_against(llm, oracle, options, progress=_progress_bar())


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


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
