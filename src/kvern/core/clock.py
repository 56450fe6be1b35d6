"""Where time comes from: always passed in, never read from the machine inside the bookkeeping."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since any fixed moment, never going back."""

monotonic_clock: Clock = time.monotonic


class ManualClock:
    """A clock that moves when told to: for tests and simulations."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The present moment in seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
