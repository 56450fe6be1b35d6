"""From a plan's chunks to the arrays that the kernels read: built once per step and KV group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvern.core.plan import Chunk
from kvern.kernels.protocol import AttendBatch
from kvern.spec.groups import KVGroup

I32 = npt.NDArray[np.int32]


def token_ids(chunks: Sequence[Chunk]) -> I32:
    """Token ids of all chunks, one after the other, int32 ``[T]``."""
    return np.concatenate([c.seq.token_ids(c.start, c.start + c.length) for c in chunks])


def attend_batch(chunks: Sequence[Chunk], index: int, group: KVGroup) -> AttendBatch:
    """The step as one KV group sees it.

    Args:
        chunks: what to compute, in row order.
        index: the group's place in the plan: which of a sequence's tables is read.
        group: the group. One of states has its pages as block tables, and no slots.
    """
    starts = np.array([c.start for c in chunks], np.int32)
    lengths = np.array([c.length for c in chunks], np.int32)
    cu_seqlens_q = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens_q[1:])
    seq_lens = starts + lengths
    block_size = group.block_size
    width = group.pages_per_entry if group.is_state else -(-int(seq_lens.max()) // block_size)
    block_tables = np.zeros((len(chunks), width), np.int32)
    for row, chunk in enumerate(chunks):
        blocks = chunk.seq.tables[index].blocks[:width]
        block_tables[row, : len(blocks)] = blocks
    sequence_of_row = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(cu_seqlens_q[-1], dtype=np.int32)
    positions += (starts - cu_seqlens_q[:-1])[sequence_of_row]
    if group.is_state:
        slot_mapping = np.zeros(len(positions), np.int64)
    else:
        blocks_of_row = block_tables[sequence_of_row, positions // block_size].astype(np.int64)
        slot_mapping = blocks_of_row * block_size + positions % block_size
    regimes = None
    if any(chunk.seq.regime for chunk in chunks):
        regimes = np.repeat(np.array([c.seq.regime for c in chunks], np.int32), lengths)
    seats = np.array([c.seq.seat for c in chunks], np.int32) if group.is_narrow else None
    return AttendBatch(
        cu_seqlens_q, seq_lens, block_tables, positions, slot_mapping, regimes=regimes, seats=seats
    )
