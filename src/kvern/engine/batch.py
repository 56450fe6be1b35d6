"""From a plan's chunks to the arrays that the kernels read: built once per step and KV group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvern.core.plan import Chunk
from kvern.kernels.protocol import AttendBatch

I32 = npt.NDArray[np.int32]


def token_ids(chunks: Sequence[Chunk]) -> I32:
    """Token ids of all chunks, one after the other, int32 ``[T]``."""
    return np.concatenate([c.seq.token_ids(c.start, c.start + c.length) for c in chunks])


def attend_batch(chunks: Sequence[Chunk], group: int, block_size: int) -> AttendBatch:
    """The step as one KV group sees it.

    Args:
        chunks: what to compute, in row order.
        group: index of the KV group, whose tables are read.
        block_size: token slots per block of that group.
    """
    starts = np.array([c.start for c in chunks], np.int32)
    lengths = np.array([c.length for c in chunks], np.int32)
    cu_seqlens_q = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens_q[1:])
    seq_lens = starts + lengths
    width = -(-int(seq_lens.max()) // block_size)
    block_tables = np.zeros((len(chunks), width), np.int32)
    for row, chunk in enumerate(chunks):
        blocks = chunk.seq.tables[group].blocks[:width]
        block_tables[row, : len(blocks)] = blocks
    sequence_of_row = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(cu_seqlens_q[-1], dtype=np.int32)
    positions += (starts - cu_seqlens_q[:-1])[sequence_of_row]
    blocks_of_row = block_tables[sequence_of_row, positions // block_size].astype(np.int64)
    return AttendBatch(
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        block_tables=block_tables,
        positions=positions,
        slot_mapping=blocks_of_row * block_size + positions % block_size,
    )
