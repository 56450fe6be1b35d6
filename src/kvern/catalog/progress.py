"""How a long fetch shows itself: silent for the library, a bar or single lines for the commands."""

from __future__ import annotations

import sys
from typing import Any, TextIO


class Progress:
    """The silent progress, and the three verbs that every progress has."""

    def start(self, text: str, total_bytes: int) -> None:
        """Begins a phase of `total_bytes` bytes, described by `text`."""

    def advance_to(self, num_bytes: int) -> None:
        """Says that `num_bytes` bytes of the phase are done."""

    def finish(self) -> None:
        """Ends the phase."""

    def note(self, text: str) -> None:
        """Tells one line that is true whether or not a bar is shown."""


class StderrProgress(Progress):
    """A bar on a terminal; one line for each phase when the stream is a file or a pipe."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._bar: Any = None

    def start(self, text: str, total_bytes: int) -> None:
        """Begins a phase of `total_bytes` bytes, described by `text`."""
        self.finish()
        if not self._stream.isatty():
            self.note(f"{text} ({total_bytes / 1e6:,.1f} MB)")
            return
        from tqdm import tqdm  # costs 30 ms, only for who watches

        self._bar = tqdm(
            desc=text,
            total=total_bytes,
            unit="B",
            unit_scale=True,
            file=self._stream,
            leave=False,
            dynamic_ncols=True,
        )

    def advance_to(self, num_bytes: int) -> None:
        """Says that `num_bytes` bytes of the phase are done; never moves backwards."""
        if self._bar is not None:
            self._bar.update(max(0, min(num_bytes, self._bar.total) - self._bar.n))

    def finish(self) -> None:
        """Ends the phase and takes its bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def note(self, text: str) -> None:
        """Prints one line."""
        print(text, file=self._stream, flush=True)
