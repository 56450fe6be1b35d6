"""The shadow of one KV group's slots: arrays beside the pool, one entry per token slot.

A narrow group has two memories: its open blocks, one per seat, and its pages, which are written when a block is
complete. Where some of its layers are wide, these write every row into the page at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvern.check.contexts import UNWRITTEN
from kvern.core.plan import Copy, CopyOpen
from kvern.spec.groups import KVGroup

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class ShadowSlots:
    """One KV group's slots: content, the content before that, writer, and whether it was copied."""

    def __init__(self, group: KVGroup, num_blocks: int) -> None:
        """Args: num_blocks: pages of the pool, or open blocks."""
        self.block_size = group.block_size
        self.reach = group.spec.reach
        num_slots = num_blocks * group.block_size
        self.content: I64 = np.full(num_slots, UNWRITTEN, np.int64)
        self.before: I64 = np.full(num_slots, UNWRITTEN, np.int64)
        self.writer: I32 = np.full(num_slots, -1, np.int32)
        self.copied_from: I32 = np.zeros(num_slots, np.int32)

    def live_positions(self, num_tokens: int) -> I64:
        """Positions below ``num_tokens`` that a query at ``num_tokens`` may read."""
        spans = self.reach.live(num_tokens)
        return (
            np.concatenate([np.arange(a, b) for a, b in spans]) if spans else np.zeros(0, np.int64)
        )

    def slots(self, table: I32, positions: I64) -> I64:
        """Where a table says that positions lie; slots of block 0 where it names none."""
        index = positions // self.block_size
        blocks = np.zeros(len(positions), np.int64)
        inside = index < len(table)
        blocks[inside] = table[index[inside]]
        return blocks * self.block_size + positions % self.block_size

    def write(self, slots: I64, content: I64, writer: int) -> None:
        """Note rows that were appended."""
        self.before[slots] = self.content[slots]
        self.content[slots] = content
        self.writer[slots] = writer
        self.copied_from[slots] = 0

    def copy(self, op: Copy | CopyOpen) -> None:
        """Note a copied beginning of a block, or of an open block."""
        src, dst = (op.src, op.dst) if isinstance(op, Copy) else (op.src_seat, op.dst_seat)
        source = np.arange(op.num_tokens) + src * self.block_size
        target = np.arange(op.num_tokens) + dst * self.block_size
        self.before[target] = self.content[target]
        self.content[target] = self.content[source]
        self.writer[target] = self.writer[source]
        self.copied_from[target] = src

    def forget(self, blocks: I32) -> None:
        """Note blocks whose bytes were overwritten with a pattern that nobody may read."""
        slots = (
            blocks[:, None].astype(np.int64) * self.block_size + np.arange(self.block_size)
        ).ravel()
        self.before[slots] = self.content[slots]
        self.content[slots] = UNWRITTEN
