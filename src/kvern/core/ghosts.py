"""A bounded memory of what was given up, when and why, so that a miss can say so."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvern.core.hashing import UInt64

LARGEST = 1 << 18


class Ghost(NamedTuple):
    """What is remembered of a span.

    Attributes:
        when: seconds on the scheduler's clock.
        is_cleared: it was dropped by the operator, not replaced.
    """

    when: float
    is_cleared: bool


class Ghosts:
    """Hashes of spans given up, in a table of fixed size; newer ones overwrite older ones.

    17 bytes per entry, at most `LARGEST` entries.
    """

    def __init__(self, num_blocks: int) -> None:
        size = min(LARGEST, max(1024, 1 << (num_blocks - 1).bit_length()))
        self._mask = np.uint64(size - 1)
        self._hash: UInt64 = np.zeros(size, np.uint64)
        self._when: npt.NDArray[np.float64] = np.zeros(size, np.float64)
        self._is_cleared: npt.NDArray[np.bool_] = np.zeros(size, np.bool_)

    def remember(self, hash_low: UInt64, when: float, *, is_cleared: bool) -> None:
        """Note that spans were given up now."""
        places = hash_low & self._mask
        self._hash[places] = hash_low
        self._when[places] = when
        self._is_cleared[places] = is_cleared

    def find(self, hash_low: int) -> Ghost | None:
        """When and why the span with this hash was given up, if that is still known."""
        place = hash_low & int(self._mask)
        if hash_low and self._hash.item(place) == hash_low:
            return Ghost(self._when.item(place), self._is_cleared.item(place))
        return None
