"""The three standard streams when they are not what a command expects: closed, full, not text."""

from __future__ import annotations

import contextlib
import os
import sys

from kvern.errors import InputError, KvernError

_STANDARD_FDS = (0, 1, 2)


def check_streams() -> None:
    """Makes sure that there is a stderr, and refuses to work for a stdout that is closed.

    Python sets a closed stream to None. Then ``print(..., file=sys.stderr)`` would write to stdout,
    and the next file that is opened would take the stream's number and everything written to it.

    Raises:
        KvernError: stdout is closed.
    """
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    for fd in _STANDARD_FDS:
        _occupy(fd)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  open for the rest of the process
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise KvernError("standard output is closed: send it to a file, a pipe or /dev/null")


def forget_stdout() -> None:
    """Points stdout at nothing, so that flushing it at exit does not complain a second time."""
    with contextlib.suppress(OSError, ValueError):  # a stdout without a number cannot complain
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


def decode_input(data: bytes, offset: int = 0) -> str:
    """The text of bytes from standard input, `offset` bytes after its beginning.

    Raises:
        InputError: it is not UTF-8; names the byte.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input is not UTF-8 text (byte {offset + error.start} is "
            f"0x{data[error.start]:02x}): convert it first"
        ) from error


def check_text(text: str, what: str) -> str:
    """`text` itself, if it came through the terminal or the command line whole.

    Raises:
        InputError: it holds bytes that the terminal's encoding could not decode; `what` names it.
    """
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise InputError(f"{what} is not UTF-8 text: check the terminal's encoding")
    return text


def _occupy(fd: int) -> None:
    """Opens nothing under the number of a closed standard stream; the lowest free one is given."""
    try:
        os.fstat(fd)
    except OSError:
        os.open(os.devnull, os.O_RDWR)
