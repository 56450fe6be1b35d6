"""The pool's memory: one slab of uniform pages, allocated once, and the block operations on it.

What lies where in a page is `kvern.spec.pages`' business; this module turns offsets into typed streams. Beside
the slab lie the open pages and row buffers of narrow formats.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvern.core.plan import BlockOp, Copy, CopyOpen, Zero
from kvern.spec.groups import KVPlan, StreamOffset, layer_offsets
from kvern.spec.pages import row_key
from kvern.store.codecs import require_stored
from kvern.store.streams import OpenForm, PagedStream

U8 = npt.NDArray[np.uint8]
_HUGE_PAGE = 2 << 20  # bytes, of x86 and of ARM with 4 KiB pages


class PagedStore:
    """The slab, ``uint8 [num_blocks, page_bytes]``: exactly `KVPlan.pool_bytes`, never resized.

    Pages are zero until written. The operating system backs a page when it is first written, so an
    unused pool costs address space, not memory.

    Attributes:
        pages: the slab.
        open_pages: per group ``uint8 [num_open_blocks, open_page_bytes]``: `KVPlan.open_bytes` in all.
        rows: the row buffers of narrow streams: `KVPlan.row_bytes` in all.
    """

    def __init__(self, plan: KVPlan, max_num_batched_tokens: int = 512) -> None:
        """Allocate the pool.

        Args:
            plan: groups, pages and open blocks.
            max_num_batched_tokens: rows that narrow streams keep of a step.

        Raises:
            UsageError: a group's format is one that the engine does not store.
        """
        self.plan = plan
        self._offsets = [{} if group.is_state else layer_offsets(group) for group in plan.groups]
        self._open_offsets = [
            {
                (entry.layer, entry.stream.name): entry
                for entries in layer_offsets(group, open_form=True).values()
                for entry in entries
            }
            if group.open_page_bytes
            else {}
            for group in plan.groups
        ]
        require_stored(
            entry.codec
            for offsets in self._offsets
            for streams in offsets.values()
            for entry in streams
        )
        self.pages: U8 = _zeros(plan.num_blocks, plan.page_bytes)
        self.open_pages: list[U8] = [
            _zeros(plan.num_open_blocks, group.open_page_bytes) for group in plan.groups
        ]
        self.rows: dict[object, U8] = {
            key: _zeros(max_num_batched_tokens, num_bytes)
            for key, num_bytes in plan.row_buffers.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the slab."""
        return self.pages.nbytes

    @property
    def open_bytes(self) -> int:
        """Bytes of the open pages."""
        return sum(pages.nbytes for pages in self.open_pages)

    @property
    def row_bytes(self) -> int:
        """Bytes of the row buffers."""
        return sum(rows.nbytes for rows in self.rows.values())

    def streams(self, layer: int) -> tuple[int, tuple[PagedStream, ...]] | None:
        """The group that holds a layer's keys and values, and its streams in page order.

        None for a layer that leaves nothing per token in the cache.
        """
        for index, offsets in enumerate(self._offsets):
            if layer in offsets:
                return index, tuple(self._stream(index, entry) for entry in offsets[layer])
        return None

    def _stream(self, group: int, entry: StreamOffset) -> PagedStream:
        codec, stream = entry.codec, entry.stream
        return PagedStream(
            self.pages,
            entry.offset,
            codec.dtype,
            stream.num_heads,
            entry.num_entries,
            stream.dim,
            None if codec.is_wide else codec,
            self._open_form(group, entry),
        )

    def _open_form(self, group: int, entry: StreamOffset) -> OpenForm | None:
        place = self._open_offsets[group].get((entry.layer, entry.stream.name))
        if place is None:
            return None
        rows = self.rows[row_key(place, self.plan.lenders)]
        shape = (len(rows), entry.stream.num_heads, -1)
        return OpenForm(self.open_pages[group], place.offset, rows.reshape(shape))

    def execute(self, ops: Iterable[BlockOp]) -> None:
        """Carry out a step's block operations, in order."""
        for op in ops:
            if isinstance(op, Copy):
                self._copy(op)
            elif isinstance(op, CopyOpen):
                self._copy_open(op)
            elif isinstance(op, Zero):
                self.pages[op.block] = 0

    def _copy(self, op: Copy) -> None:
        group = self.plan.groups[op.group]
        if group.is_state or op.num_tokens == group.block_size:
            self.pages[op.dst] = self.pages[op.src]
            return
        for streams in self._offsets[op.group].values():
            for entry in streams:
                if entry.codec.is_wide:
                    _copy_tokens(self.pages, op.src, op.dst, entry, op.num_tokens, group.block_size)

    def _copy_open(self, op: CopyOpen) -> None:
        pages, block_size = self.open_pages[op.group], self.plan.groups[op.group].block_size
        for entry in self._open_offsets[op.group].values():
            _copy_tokens(pages, op.src_seat, op.dst_seat, entry, op.num_tokens, block_size)


def _zeros(count: int, num_bytes: int) -> U8:
    """``uint8 [count, num_bytes]`` that takes memory only where it is written.

    The mapping is private: shared anonymous memory is a file of tmpfs, to which most systems give no huge
    pages. From the size of one on it begins where a huge page does.
    """
    size = count * num_bytes
    if not size or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.zeros((count, num_bytes), np.uint8)
    spare = _HUGE_PAGE if size >= _HUGE_PAGE else 0  # address space only
    memory = mmap.mmap(-1, size + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, np.uint8)
    first = -data.ctypes.data % _HUGE_PAGE if spare else 0
    return data[first : first + size].reshape(count, num_bytes)


def _copy_tokens(
    pages: U8, src: int, dst: int, entry: StreamOffset, num_tokens: int, block_size: int
) -> None:
    """Copy a stream's first slots from one page to another."""
    num_entries = -(-num_tokens * entry.num_entries // block_size)
    part = slice(entry.offset, entry.offset + entry.num_bytes)
    shape = (entry.stream.num_heads, entry.num_entries, -1)
    target, source = pages[dst, part].reshape(shape), pages[src, part].reshape(shape)
    target[:, :num_entries] = source[:, :num_entries]
