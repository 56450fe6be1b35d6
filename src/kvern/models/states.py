"""Where a layer's recurrent state lies in the pool, and how it comes and goes.

A sequence has one entry per group of states: its pages, filled one after the other with the states
of the group's layers. Byte b of an entry is byte ``b % page_bytes`` of its page number ``b //
page_bytes``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.spec.pages import StateOffset
from kvern.store.dtypes import decode, encode

U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer's part of every entry.

    Attributes:
        pages: the slab, ``uint8 [num_blocks, page_bytes]``.
        parts: the state's tensors, in entry order.
    """

    pages: U8
    parts: tuple[StateOffset, ...]

    def dtype(self, name: str) -> str:
        """The stored dtype of a part."""
        return self._part(name).part.dtype

    def read(self, name: str, page_ids: I32) -> F32:
        """A part of the entry in these pages, decoded, in its own shape."""
        entry = self._part(name)
        touched, start = self._touched(entry)
        data = self.pages[page_ids[touched]].reshape(-1)[start : start + entry.num_bytes]
        return decode(data, entry.part.dtype).reshape(entry.part.shape)

    def write(self, name: str, page_ids: I32, values: F32) -> None:
        """Store a part, rounded to its dtype."""
        entry = self._part(name)
        touched, start = self._touched(entry)
        data = self.pages[page_ids[touched]]
        flat = encode(values, entry.part.dtype).reshape(-1)
        data.reshape(-1)[start : start + entry.num_bytes] = flat
        self.pages[page_ids[touched]] = data

    def _part(self, name: str) -> StateOffset:
        return next(entry for entry in self.parts if entry.part.name == name)

    def _touched(self, entry: StateOffset) -> tuple[slice, int]:
        """Pages of the entry that hold the part, and where in the first of them it starts."""
        page_bytes = self.pages.shape[1]
        first, start = divmod(entry.offset, page_bytes)
        return slice(first, -(-(entry.offset + entry.num_bytes) // page_bytes)), start
