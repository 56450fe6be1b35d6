"""Batches for appending to wide streams, where only the slots matter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import AttendBatch


def slots_batch(slots: npt.ArrayLike) -> AttendBatch:
    """Rows that go to the given slots, as one sequence of its own."""
    mapping = np.asarray(slots, np.int64)
    count = len(mapping)
    return AttendBatch(
        cu_seqlens_q=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        block_tables=np.zeros((1, 1), np.int32),
        positions=np.arange(count, dtype=np.int32),
        slot_mapping=mapping,
    )
