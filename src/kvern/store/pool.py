"""The pool's memory: one slab of uniform pages, allocated once, and the block operations on it.

What lies where in a page is `kvern.spec.groups`' business; this module turns offsets into typed streams.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvern.core.plan import BlockOp, Copy, Zero
from kvern.errors import UsageError
from kvern.spec.groups import KVPlan, StreamOffset, layer_offsets
from kvern.store.dtypes import STORED_BYTES
from kvern.store.streams import PagedStream

U8 = npt.NDArray[np.uint8]


class PagedStore:
    """The slab, ``uint8 [num_blocks, page_bytes]``: exactly `KVPlan.pool_bytes`, never resized.

    Pages are zero until written. The operating system backs a page when it is first written, so an
    unused pool costs address space, not memory.
    """

    def __init__(self, plan: KVPlan) -> None:
        """Allocate the pool.

        Raises:
            UsageError: a group's format is one that the engine does not store.
        """
        self.plan = plan
        self._offsets = [{} if group.is_state else layer_offsets(group) for group in plan.groups]
        for offsets in self._offsets:
            _refuse_narrow(offsets.values())
        memory = mmap.mmap(-1, plan.pool_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memory
        self.pages: U8 = np.frombuffer(memory, np.uint8).reshape(plan.num_blocks, plan.page_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the slab."""
        return self.pages.nbytes

    def streams(self, layer: int) -> tuple[int, tuple[PagedStream, ...]] | None:
        """The group that holds a layer's keys and values, and its streams in page order.

        None for a layer that leaves nothing per token in the cache.
        """
        for index, offsets in enumerate(self._offsets):
            if layer in offsets:
                return index, tuple(self._stream(entry) for entry in offsets[layer])
        return None

    def _stream(self, entry: StreamOffset) -> PagedStream:
        return PagedStream(
            self.pages,
            entry.offset,
            entry.codec.dtype,
            entry.stream.num_heads,
            entry.num_entries,
            entry.stream.dim,
        )

    def execute(self, ops: Iterable[BlockOp]) -> None:
        """Carry out a step's block operations, in order."""
        for op in ops:
            if isinstance(op, Copy):
                self._copy(op)
            elif isinstance(op, Zero):
                self.pages[op.block] = 0

    def _copy(self, op: Copy) -> None:
        group = self.plan.groups[op.group]
        if group.is_state or op.num_tokens == group.block_size:
            self.pages[op.dst] = self.pages[op.src]
            return
        source, target = self.pages[op.src], self.pages[op.dst]
        for streams in self._offsets[op.group].values():
            for entry in streams:
                num_entries = -(-op.num_tokens * entry.num_entries // group.block_size)
                part = slice(entry.offset, entry.offset + entry.num_bytes)
                shape = (entry.stream.num_heads, entry.num_entries, -1)
                target[part].reshape(shape)[:, :num_entries] = source[part].reshape(shape)[
                    :, :num_entries
                ]


def _refuse_narrow(layers: Iterable[tuple[StreamOffset, ...]]) -> None:
    for streams in layers:
        for entry in streams:
            if entry.codec.dtype not in STORED_BYTES or entry.codec.scale is not None:
                raise UsageError(
                    f"KV format {entry.codec.dtype} can be planned but not yet stored by the engine: "
                    f"choose {', '.join(STORED_BYTES)}"
                )
