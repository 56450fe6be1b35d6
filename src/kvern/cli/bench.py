"""`kvern bench`: this engine, the machine's limits and other engines, measured on the same work."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvern.catalog import DEFAULT_MODEL, StderrProgress, resolve
from kvern.cli.output import print_json
from kvern.errors import UsageError

ALL_CASES = "a,b,c,d,e,e2,sweep,attend,start"
CASES_HELP = """\
cases:
  a      decode, one request: 64 tokens, 128 new
  b      prefill of 2,048 and of 7,500 tokens
  c      decode after 7,500 tokens
  d      32 requests at once, 256 tokens and 128 new each
  e      16 requests that share 1,500 tokens, with 50 of their own, 32 new; the shared ones computed before
  e2     the same, all at once on an empty cache
  sweep  decode at 64 to 8,192 tokens of context
  start  kvern run of a short answer, from the start of its process to the first text
  attend attention alone: contexts of 512 to 8,192, 1 and 8 sequences, beside torch's (where it is installed)
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "bench",
        help="measure speed and memory, beside the machine's limits and other engines",
        description="Measures TTFT, TPOT, throughput, queue time and KV use, each on its own; what "
        "bounds each case; and the share of the machine's limits that is reached. Each engine runs in a "
        "process of its own, and runs are interleaved.",
        epilog=CASES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"catalogue name, GGUF file or Hugging Face folder (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--cases", default=ALL_CASES, metavar="LIST", help=f"which ones (default: {ALL_CASES})"
    )
    parser.add_argument(
        "--kv-format",
        default="bf16",
        metavar="LIST",
        help="stored forms of keys and values, each measured (default: bf16)",
    )
    parser.add_argument(
        "--threads", type=int, default=2, metavar="N", help="of every engine (default: 2)"
    )
    parser.add_argument(
        "--runs", type=int, metavar="N", help="of each item; medians are told (default: 3)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, one run: shows that everything works, measures nothing",
    )
    _add_engine_flags(parser)
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--against",
        default="",
        metavar="LIST",
        help="llama.cpp, transformers, vllm, openvino: those that are installed take part",
    )
    group.add_argument(
        "--peers-dir",
        type=Path,
        metavar="FOLDER",
        help="where benchmarks/peers/setup.sh put them (default: $KVERN_PEERS, or the cache folder)",
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the JSON document here, anew after each item: a run that is cut short loses nothing",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="keep what --out FILE holds of an earlier run, and measure what it lacks",
    )
    group.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts")
    group.add_argument(
        "--png", type=Path, metavar="FILE", help="write a picture (needs matplotlib)"
    )


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--backend", metavar="NAME", help="auto, native, reference or torch")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens in a block")
    group.add_argument(
        "--weights-format",
        metavar="NAME",
        help="auto, fp32 to decode the weights, or bf16 to round them",
    )
    group.add_argument(
        "--max-batched-tokens", type=int, metavar="N", help="tokens of one step at most"
    )


def run(args: argparse.Namespace) -> int:
    """Measures, and writes what was asked for."""
    from kvern.bench.html import html_report
    from kvern.bench.peers import default_peers_dir
    from kvern.bench.png import write_png
    from kvern.bench.session import LEAST_RUNS, BenchOptions, run_bench
    from kvern.bench.text import text_report

    resolve(args.model, progress=StderrProgress())
    options = BenchOptions(
        model=args.model,
        cases=_names(args.cases),
        kv_formats=_names(args.kv_format),
        threads=args.threads,
        runs=args.runs or (1 if args.quick else LEAST_RUNS),
        quick=args.quick,
        against=_names(args.against),
        peers_dir=args.peers_dir or default_peers_dir(),
        engine=_engine_options(args),
        done=_earlier(args),
    )
    document = run_bench(options, _progress, lambda document: _keep(args.out, document))
    _keep(args.out, document)
    if args.html:
        args.html.write_text(html_report(document), encoding="utf-8")
    if args.png:
        write_png(document, args.png)
    if args.json:
        print_json(document)
    else:
        print(text_report(document))
    return 0


def _earlier(args: argparse.Namespace) -> dict[str, Any] | None:
    """The document to go on with; None when there is none yet."""
    if not args.resume:
        return None
    if args.out is None:
        raise UsageError("--resume goes on with a file: name it with --out FILE")
    try:
        document: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UsageError(f"{args.out} is no document of kvern bench: {error}") from error
    return document


def _keep(path: Path | None, document: dict[str, Any]) -> None:
    """Replaces the file in one piece."""
    if path is None:
        return
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    given = {
        "backend": args.backend,
        "block_size": args.block_size,
        "weights_format": args.weights_format,
        "max_num_batched_tokens": args.max_batched_tokens,
    }
    return {name: value for name, value in given.items() if value is not None}


def _progress(sentence: str) -> None:
    """What is measured now, on stderr; one line that is written over on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{sentence}", end="", file=sys.stderr, flush=True)
    else:
        print(sentence, file=sys.stderr, flush=True)
