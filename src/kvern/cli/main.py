"""The dispatcher: finds the command, imports its file alone, turns errors into one sentence.

A command is a file with two functions: ``add_parser(subparsers)`` adds its parser, with flags and
help; ``run(args) -> int`` carries it out and returns the exit code. Adding a command is writing
such a file and naming it in `COMMANDS`.

Exit codes: 0 success, 2 wrong usage, 1 any other failure, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from kvern.cli.output import print_error
from kvern.cli.streams import check_streams, forget_stdout
from kvern.errors import KvernError, UsageError

COMMANDS: dict[str, str] = {
    "run": "answer one prompt",
    "chat": "hold a conversation that keeps its cache",
    "inspect": "show what each layer of a model leaves in the cache",
    "plan": "work out what fits in memory, before anything is allocated",
    "check": "prove that answers with the cache equal answers without it",
    "bench": "measure speed and memory, beside the machine's limits and other engines",
    "pull": "fetch a model",
    "models": "list the models known by name",
}

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose complaint is one sentence, raised instead of printed."""

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would print.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{self.prog}: {message} (see `{self.prog} --help`)")


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser for `command`; the other commands are listed in its help, not imported."""
    parser = CommandParser(
        prog="kvern",
        description="An LLM inference engine with an exact, durable, explainable KV cache.",
        epilog="`kvern COMMAND --help` describes a command.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="store_true", help="show version, backend and kernel path"
    )
    _add_common_flags(parser, default=False)
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=CommandParser
    )
    for name, summary in COMMANDS.items():
        if name == command:
            importlib.import_module(f"kvern.cli.{name}").add_parser(subparsers)
            _add_common_flags(subparsers.choices[name], default=argparse.SUPPRESS)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def _add_common_flags(parser: argparse.ArgumentParser, default: Any) -> None:
    """Adds the flags that every command has, unless the command has its own of that name."""
    taken = {flag for action in parser._actions for flag in action.option_strings}
    if "--json" not in taken:
        parser.add_argument(
            "--json", action="store_true", default=default, help="print one JSON object on stdout"
        )
    if "--debug" not in taken:
        parser.add_argument(
            "--debug", action="store_true", default=default, help="show the traceback of an error"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's own) and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    as_json, debug = "--json" in flags, "--debug" in flags
    try:
        check_streams()
        return _dispatch(arguments, as_json=as_json, debug=debug)
    except KvernError as error:
        if debug:
            traceback.print_exc()
        print_error(error, as_json=as_json)
        return error.exit_code
    except BrokenPipeError:
        forget_stdout()
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        print_error(_unexpected(error), as_json=as_json)
        _flush_or_forget_stdout()
        return 1


def _dispatch(arguments: list[str], *, as_json: bool, debug: bool) -> int:
    command = next((word for word in arguments if word in COMMANDS), None)
    parser = build_parser(command)
    args = parser.parse_args(arguments)
    args.json, args.debug = as_json, debug  # wherever on the line they stand
    if args.version:
        from kvern.cli.version import print_version  # looks for the native module: not for --help

        print_version(as_json=as_json)
        return 0
    if args.command is None:
        if not as_json:
            parser.print_help(sys.stderr)
        raise UsageError("kvern: a command is missing: try `kvern run 'Hello'`")
    code: int = importlib.import_module(f"kvern.cli.{args.command}").run(args)
    sys.stdout.flush()
    return code


def _unexpected(error: Exception) -> KvernError:
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return KvernError("out of memory: give a smaller --kv-memory or --context")
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return KvernError(f"{where}{error.strerror}")
    text = " ".join(str(error).split()) or "no message"
    return KvernError(f"unexpected {type(error).__name__}: {text} (--debug shows where)")


def _flush_or_forget_stdout() -> None:
    """Writes what is left; on a full disk, gives it up instead of failing again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        forget_stdout()


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Leaves through the ``finally`` blocks, so that a terminated fetch cleans up."""
    raise SystemExit(EXIT_TERMINATED)


def entry_point() -> NoReturn:
    """What the installed command ``kvern`` calls."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(main())
