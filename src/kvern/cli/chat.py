"""`kvern chat`: a conversation whose every turn finds the earlier ones in the cache."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvern.cli.conversation import Conversation
from kvern.cli.engine_options import (
    add_engine_flags,
    add_sampling_flags,
    load_engine,
    sampling_params,
    start_stream,
)
from kvern.cli.output import print_json
from kvern.cli.report import kv_document, turn_lines, usage_document
from kvern.cli.streams import check_text, decode_input
from kvern.errors import CapacityError, InputError, IntegrityError, KvernError, ModelError

if TYPE_CHECKING:
    from kvern import LLM, SamplingParams
    from kvern.engine.outputs import RequestOutput

HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
PROMPT = "> "
EXIT_INTERRUPTED = 130


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "chat",
        help="hold a conversation that keeps its cache",
        description=f"An interactive conversation; {HELP}. Reads one turn a line when piped to.",
    )
    add_engine_flags(parser)
    add_sampling_flags(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument(
        "--stats", action="store_true", help="tell after each answer what the cache did"
    )


def run(args: argparse.Namespace) -> int:
    """Holds the conversation until /exit or the end of the input."""
    params = sampling_params(args)
    with load_engine(args) as llm:
        if llm.tokenizer.chat_template is None:
            raise ModelError(
                f"{args.model} has no chat template, so it cannot hold a conversation: "
                f"complete text with `kvern run --raw --model {args.model}`"
            )
        if args.system is not None:
            check_text(args.system, "the system message")
        session = ChatSession(llm, params, system=args.system, quiet=args.json, stats=args.stats)
        code = session.run()
        if args.json:
            print_json({"model": args.model, "turns": session.turns, "kv": kv_document(llm)})
    return code


class ChatSession:
    """The loop of turns: read, answer, remember."""

    def __init__(
        self, llm: LLM, params: SamplingParams, *, system: str | None, quiet: bool, stats: bool
    ) -> None:
        self._llm = llm
        self._params = params
        self._conversation = Conversation(llm.tokenizer, system)
        self._quiet = quiet
        self._stats = stats
        self._input = _Lines()
        self.turns: list[dict[str, Any]] = []

    def run(self) -> int:
        """Runs turns until the user leaves; returns the exit code.

        Somebody who watches has seen which turns failed; a script learns it from the exit code.
        """
        interactive = self._input.is_interactive
        if interactive:
            _enable_line_editing()
            print(HELP, file=sys.stderr)
        was_interrupted = False
        while True:
            try:
                line = self._input.read()
            except InputError as error:
                self._fail(self._input.last, error)
                if interactive:
                    continue
                return error.exit_code
            except KeyboardInterrupt:
                if was_interrupted or not interactive:
                    print(file=sys.stderr)
                    return EXIT_INTERRUPTED
                print(f"\n{HELP}; Ctrl-C again leaves", file=sys.stderr)
                was_interrupted = True
                continue
            was_interrupted = False
            if line is None or line in ("/exit", "/quit"):
                failed = any("error" in turn for turn in self.turns)
                return 1 if failed and not interactive else 0
            self._handle(line)

    def _handle(self, line: str) -> None:
        if line == "/reset":
            self._conversation.reset()
            print("the conversation starts over", file=sys.stderr)
        elif line.startswith("/"):
            print(f"{line.split()[0]} is unknown: {HELP}", file=sys.stderr)
        elif line:
            try:
                self._answer(line)
            except CapacityError as error:  # the history fills the context or the pool
                self._fail(line, error, " (/reset starts over)")
            except KvernError as error:
                self._fail(line, error)

    def _fail(self, question: str, error: KvernError, way_out: str = "") -> None:
        """Tells that a turn failed and keeps it for --json; the conversation goes on without it."""
        sentence = " ".join(f"{error}{way_out}".split())
        self.turns.append({"user": question, "error": sentence})
        print(f"error: {sentence}", file=sys.stderr, flush=True)

    def _answer(self, question: str) -> None:
        prompt_ids = self._conversation.ask(question)
        answer_ids: list[int] = []
        pieces: list[str] = []
        output: RequestOutput | None = None
        with (
            _deferred_interrupt() as interrupted,
            contextlib.closing(start_stream(self._llm, prompt_ids, self._params)) as deltas,
        ):
            for delta in deltas:
                answer_ids.extend(delta.token_ids)
                pieces.append(delta.text)
                if not self._quiet:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
                output = delta.output or output
                if interrupted:
                    break
        if not self._quiet:
            print(flush=True)
        if output is not None and output.error is not None:
            raise IntegrityError(f"the request failed: {output.error}")
        text = "".join(pieces)
        self._conversation.keep(question, prompt_ids, answer_ids, text)
        self._remember(question, text, output)

    def _remember(self, question: str, text: str, output: RequestOutput | None) -> None:
        turn: dict[str, Any] = {"user": question, "text": text, "finish_reason": "abort"}
        if output is not None:
            turn["finish_reason"] = output.finish_reason
            turn["usage"] = usage_document(output)
        self.turns.append(turn)
        if self._stats:
            lines = ["[stopped]"] if output is None else turn_lines(self._llm, output)
            print("\n".join(lines), file=sys.stderr)


def _enable_line_editing() -> None:
    with contextlib.suppress(ImportError):  # absent from some builds of Python
        import readline  # noqa: F401


class _Lines:
    """The lines of standard input; piped ones are decoded here, whatever the locale says.

    Attributes:
        is_interactive: whether somebody types them.
        last: the latest piped line as far as it can be shown, for the record of a failure.
    """

    def __init__(self) -> None:
        self.is_interactive = sys.stdin is not None and sys.stdin.isatty()
        self.last = ""
        self._offset = 0

    def read(self) -> str | None:
        """The next line without its end, or None at the end of the input.

        Raises:
            InputError: it is not text.
        """
        if self.is_interactive:
            try:
                return check_text(input(PROMPT).strip(), "the line")
            except EOFError:
                print(file=sys.stderr)
                return None
            except UnicodeDecodeError as error:
                raise InputError("the line is not UTF-8 text: check the terminal") from error
        if sys.stdin is None:
            return None
        data = sys.stdin.buffer.readline()
        self.last = data.decode(errors="replace").strip()
        line = decode_input(data, self._offset).strip()
        self._offset += len(data)
        return line if data else None


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[list[bool]]:
    """Collects Ctrl-C instead of raising it, so that a step of the engine is never cut in half.

    Yields a list that is empty until the first Ctrl-C. The second one raises at once.
    """
    received: list[bool] = []

    def note(_signal: int, _frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(True)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)
