"""A bounded memory of what was replaced and when, so that a miss can say so."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvern.core.hashing import UInt64

LARGEST = 1 << 18


class Ghosts:
    """Hashes of replaced spans in a table of fixed size; newer ones overwrite older ones.

    12 to 16 bytes per entry, at most `LARGEST` entries.
    """

    def __init__(self, num_blocks: int) -> None:
        size = min(LARGEST, max(1024, 1 << (num_blocks - 1).bit_length()))
        self._mask = np.uint64(size - 1)
        self._hash: UInt64 = np.zeros(size, np.uint64)
        self._when: npt.NDArray[np.float64] = np.zeros(size, np.float64)

    def remember(self, hash_low: UInt64, when: float) -> None:
        """Note that spans were replaced now."""
        places = hash_low & self._mask
        self._hash[places] = hash_low
        self._when[places] = when

    def replaced_at(self, hash_low: int) -> float | None:
        """When the span with this hash was replaced, if that is still known."""
        place = hash_low & int(self._mask)
        if hash_low and self._hash.item(place) == hash_low:
            return self._when.item(place)
        return None
