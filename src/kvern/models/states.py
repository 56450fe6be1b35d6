"""Where a layer's recurrent state lies in the pool, and how it comes and goes.

A sequence has one entry per group of states: its pages, filled one after the other with the states
of the group's layers. Byte b of an entry is byte ``b % page_bytes`` of its page number ``b //
page_bytes``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.kernels.family_protocol import StatePlace
from kvern.spec.pages import StateOffset

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

    def place(self, name: str) -> StatePlace:
        """Where a part lies in every entry."""
        entry = next(entry for entry in self.parts if entry.part.name == name)
        return StatePlace(
            self.pages, entry.offset, entry.num_bytes, entry.part.dtype, entry.part.shape
        )

    def read(self, name: str, page_ids: I32) -> F32:
        """A part of the entry in these pages, decoded, in its own shape."""
        return self.place(name).read(page_ids)

    def write(self, name: str, page_ids: I32, values: F32) -> None:
        """Store a part, rounded to its dtype."""
        self.place(name).write(page_ids, values)
