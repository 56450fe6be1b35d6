"""Position regimes: lengths of a sequence at which all its positions turn alike.

Some rotary scalings give every position another angle once the sequence is longer than the context that
the model was first trained on: longrope has a second set of factors there, dynamic NTK another base for
each length. All tokens of a pass then turn by the frequencies of its length, so keys computed in a shorter
pass are no longer those of a longer one, and behind the first layer neither are the values.

    length      1 ....... border | border + 1 ....... border + step | border + step + 1 ....
    regime             0         |               1                  |          2
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PositionRegimes:
    """Which lengths share a regime.

    Attributes:
        border: the longest length in regime 0, in tokens.
        step: lengths that each later regime holds; None: one regime holds them all. longrope has
            None, dynamic NTK 1.
    """

    border: int
    step: int | None = None

    def of(self, length: int) -> int:
        """The regime of a sequence of ``length`` tokens."""
        if length <= self.border:
            return 0
        return 1 if self.step is None else 1 + (length - self.border - 1) // self.step

    def last(self, regime: int) -> int | None:
        """The longest length in a regime; None where it has no end."""
        if regime == 0:
            return self.border
        return None if self.step is None else self.border + regime * self.step

    def first_own(self, regime: int) -> int:
        """The first position whose logits come from this regime: the longest length before it."""
        if regime == 0:
            return 0
        return self.border + (regime - 1) * (self.step or 0)

    @property
    def is_brief(self) -> bool:
        """Whether a growing sequence leaves each regime beyond the border again."""
        return self.step is not None
