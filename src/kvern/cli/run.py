"""`kvern run [PROMPT]`: one completion, streamed."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from kvern.cli.engine_options import (
    add_engine_flags,
    add_sampling_flags,
    load_engine,
    sampling_params,
    start_stream,
)
from kvern.cli.output import print_json
from kvern.cli.report import completion_document, stats_lines
from kvern.cli.streams import check_text, decode_input
from kvern.errors import CapacityError, InputError, IntegrityError, UsageError

if TYPE_CHECKING:
    from kvern import LLM, SamplingParams
    from kvern.engine.outputs import RequestOutput


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "run",
        help="answer one prompt",
        description="Answers one prompt, streaming the text to stdout.",
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the prompt; read from stdin when left out"
    )
    add_engine_flags(parser)
    add_sampling_flags(parser)
    parser.add_argument(
        "--raw", action="store_true", help="complete the prompt as it is, without a chat template"
    )
    parser.add_argument(
        "--stats", action="store_true", help="tell on stderr what the cache did and what it cost"
    )


def run(args: argparse.Namespace) -> int:
    """Generates one answer."""
    params = sampling_params(args)
    prompt = _prompt_of(args)
    started = time.perf_counter()
    with load_engine(args) as llm:
        load_s = time.perf_counter() - started
        request = _request_of(llm, prompt, raw=args.raw)
        try:
            output = _stream(llm, request, params, show=not args.json)
        except CapacityError as error:
            raise CapacityError(f"{error}{_template_note(llm, prompt, request)}") from error
        if args.json:
            print_json(completion_document(llm, output, load_s))
        if args.stats:
            print("\n".join(stats_lines(llm, output, load_s)), file=sys.stderr)
    return 0


def _prompt_of(args: argparse.Namespace) -> str:
    """The prompt from the command line or stdin, one line end at its close taken away.

    Raises:
        UsageError: there is neither.
        InputError: it is empty or not text.
    """
    prompt = args.prompt
    if prompt is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("kvern run: give a PROMPT, or pipe it to standard input")
        prompt = decode_input(sys.stdin.buffer.read()).removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise InputError("the prompt is empty: give at least one character")
    return check_text(prompt, "the prompt")


def _request_of(llm: LLM, prompt: str, *, raw: bool) -> str | list[int]:
    """What the engine is given: the bare text, or the ids of the chat template around it."""
    if raw:
        return prompt
    if llm.tokenizer.chat_template is None:
        print("note: the model has no chat template; completing the bare text", file=sys.stderr)
        return prompt
    return list(llm.tokenizer.apply_chat_template([{"role": "user", "content": prompt}]))


def _template_note(llm: LLM, prompt: str, request: str | list[int]) -> str:
    """What the chat template adds to a prompt that is too long; nothing where there is none."""
    if isinstance(request, str):
        return ""
    added = len(request) - len(llm.tokenizer.encode(prompt))
    return f" (the chat template adds {added:,} tokens; `--raw` leaves it out)" if added > 0 else ""


def _stream(
    llm: LLM, request: str | list[int], params: SamplingParams, *, show: bool
) -> RequestOutput:
    """Generates, writing the text as it comes, and returns the finished request."""
    output = None
    last_char = "\n"
    for delta in start_stream(llm, request, params):
        output = delta.output or output
        if show and delta.text:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            last_char = delta.text[-1]
    if show and last_char != "\n":
        print(flush=True)
    if output is None:
        raise IntegrityError("the engine's stream ended without a result")
    if output.error is not None:
        raise IntegrityError(f"the request failed: {output.error}")
    return output
