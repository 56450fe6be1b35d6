"""Open blocks of free seats and rows of past steps, spoilt so that a late reader meets NaN."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvern.core.state import SchedulerState
from kvern.store.pool import PagedStore

I32 = npt.NDArray[np.int32]


class FreeSeats:
    """Follows one engine's seats; narrow formats keep open blocks there."""

    def __init__(self, store: PagedStore, state: SchedulerState, poison: int) -> None:
        """Args: poison: the byte that fills what nobody may read."""
        self._store = store
        self._state = state
        self._poison = poison
        self._was_free: set[int] = set()

    def spoil(self) -> I32:
        """Fill the open blocks of seats that came free, but for those that a fork has yet to copy.

        Returns:
            The seats.
        """
        tails = [seq.book.tail for seq in self._state.unsettled]
        wanted = {tail.seat for tail in tails if tail is not None}
        free = set(self._state.seats) - wanted
        fresh = sorted(free - self._was_free)
        self._was_free = free
        for pages in self._store.open_pages:
            if len(pages):  # groups of wide formats have none
                pages[fresh] = self._poison
        return np.array(fresh, np.int32)

    def spoil_rows(self) -> None:
        """Fill the row buffers, which hold nothing between two steps."""
        for rows in self._store.rows.values():
            rows[...] = self._poison
