"""Medians, spread and pairwise ratios of a few runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle and the ends of some runs' values.

    Attributes:
        values: in the order of the runs.
    """

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @property
    def relative(self) -> float:
        """(high - low) / median; 0 for a median of 0."""
        return (self.high - self.low) / self.median if self.median else 0.0


def spread_of(values: Sequence[float]) -> Spread:
    """Median, least and greatest.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("a spread needs at least one value")
    return Spread(statistics.median(values), min(values), max(values), tuple(values))


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread | None:
    """Ours divided by theirs, run by run, so that what slows the whole machine cancels.

    None when there is no run that both have, or theirs is 0.
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if b]
    return spread_of([a / b for a, b in pairs]) if pairs else None


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; 0 for no values."""
    return statistics.fmean(values) if values else 0.0
