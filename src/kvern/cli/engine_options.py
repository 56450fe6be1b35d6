"""The flags that build an engine, the same for every command that runs a model."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, cast

from kvern.catalog import DEFAULT_MODEL, StderrProgress, resolve
from kvern.cli.streams import check_text
from kvern.errors import CapacityError

if TYPE_CHECKING:
    from kvern import LLM, SamplingParams
    from kvern.engine.outputs import StreamDelta

# flag's name in the parsed arguments -> keyword of LLM; what was not given keeps LLM's default
_ENGINE_KEYWORDS = {
    "kv_format": "kv_format",
    "kv_memory": "kv_memory",
    "context": "max_model_len",
    "block_size": "block_size",
    "weights_format": "weights_format",
    "backend": "backend",
    "threads": "threads",
    "no_cache": "no_cache",
}
DEFAULT_MAX_TOKENS = 512
_SAMPLING_KEYWORDS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the model, the cache and the backend."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"catalogue name, GGUF file, Hugging Face folder or hub id (default: {DEFAULT_MODEL})",
    )
    group = parser.add_argument_group("cache and backend")
    group.add_argument(
        "--kv-format", metavar="NAME", help="stored form of keys and values (default: bf16)"
    )
    group.add_argument("--kv-memory", metavar="SIZE", help="bytes of the block pool, as in 512MiB")
    group.add_argument(
        "--context", type=int, metavar="N", help="longest prompt plus answer, in tokens"
    )
    group.add_argument(
        "--block-size", type=int, metavar="N", help="tokens in a block (default: 16)"
    )
    group.add_argument(
        "--weights-format",
        metavar="NAME",
        help="auto reads the file's own form; fp32 decodes it; bf16 rounds it",
    )
    group.add_argument(
        "--backend", metavar="NAME", help="auto, native, reference or torch (default: auto)"
    )
    group.add_argument("--threads", type=int, metavar="N", help="threads of the native backend")
    group.add_argument(
        "--no-cache",
        action="store_true",
        default=None,
        help="recompute everything at every step: slow, for comparison",
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds how tokens are chosen and when to stop."""
    group = parser.add_argument_group("answer")
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"new tokens at most (default: {DEFAULT_MAX_TOKENS}, or as many as fit)",
    )
    group.add_argument(
        "--temperature", type=float, metavar="T", help="0 takes the likeliest token (default: 0)"
    )
    group.add_argument(
        "--top-p", type=float, metavar="P", help="keep the likeliest tokens that make up P"
    )
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    group.add_argument(
        "--min-p", type=float, metavar="P", help="drop tokens below P times the likeliest one"
    )
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before TEXT (may be repeated)"
    )


def load_engine(args: argparse.Namespace) -> LLM:
    """Fetches the model if it must, and loads it with the flags that were given."""
    path = resolve(args.model, progress=StderrProgress())
    from kvern import LLM  # numpy and the kernels: only for who runs a model

    with warnings.catch_warnings(record=True) as caught:
        llm = LLM(str(path), **_given(args, _ENGINE_KEYWORDS))
    for warning in caught:
        print(f"warning: {' '.join(str(warning.message).split())}", file=sys.stderr)
    return llm


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that were asked for; their values are checked here.

    Raises:
        InputError: a value is out of range.
    """
    from kvern import SamplingParams

    for text in args.stop or ():
        check_text(text, "the stop string")
    return SamplingParams(**_given(args, {name: name for name in _SAMPLING_KEYWORDS}))


def start_stream(
    llm: LLM, request: str | list[int], params: SamplingParams
) -> Generator[StreamDelta, None, None]:
    """Submits a request; without a given limit, `DEFAULT_MAX_TOKENS` or as many tokens as fit.

    Raises:
        InputError: the engine cannot serve it.
    """
    stream = None
    if params.max_tokens is None:
        limited = dataclasses.replace(params, max_tokens=DEFAULT_MAX_TOKENS)
        with contextlib.suppress(CapacityError):
            stream = llm.stream(request, limited)
    if stream is None:
        stream = llm.stream(request, params)
    return cast("Generator[StreamDelta, None, None]", stream)


def _given(args: argparse.Namespace, keywords: dict[str, str]) -> dict[str, Any]:
    values = {keyword: getattr(args, name) for name, keyword in keywords.items()}
    return {keyword: value for keyword, value in values.items() if value is not None}
