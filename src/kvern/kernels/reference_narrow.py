"""Narrow streams on the reference backend: sealing in append, and what a query reads.

The rule is the protocol's: a block is sealed by the step that completes it, and a query sees its own block as
computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvern.kernels.protocol import F32, I32, U8, AttendBatch, PagedStream
from kvern.store.codecs import seal, unseal
from kvern.store.dtypes import decode, encode
from kvern.store.streams import OPEN_DTYPE


def open_view(stream: PagedStream) -> np.ndarray[Any, Any]:
    """A narrow stream's open blocks, a view ``uint8 [num_seats, num_heads, block_size, dim * 2]``."""
    assert stream.open is not None
    pages, offset = stream.open.pages, stream.open.offset
    row_bytes = stream.open.rows.shape[-1]
    size = stream.num_heads * stream.block_size * row_bytes
    shape = (len(pages), stream.num_heads, stream.block_size, row_bytes)
    strides = (pages.strides[0], stream.block_size * row_bytes, row_bytes, 1)
    return np.lib.stride_tricks.as_strided(pages[:, offset : offset + size], shape, strides)


def gather_sealed(stream: PagedStream, block_ids: I32) -> F32:
    """The values of sealed blocks, float32 ``[num_heads, blocks * block_size, dim]``."""
    shape = (stream.num_heads, stream.block_size, stream.dim)
    size = stream.form.stored_bytes(stream.block_size, stream.num_heads, stream.dim)
    data = stream.pages[block_ids, stream.offset : stream.offset + size]
    values: F32 = unseal(data, stream.form, shape).transpose(1, 0, 2, 3)
    return values.reshape(stream.num_heads, -1, stream.dim)


def gather_own(stream: PagedStream, batch: AttendBatch, seq: int) -> F32:
    """What a step knows of one sequence as computed: from its first row's block to its last row.

    Returns:
        float32 ``[num_heads, n, dim]``: earlier slots of that block from the open page, then the step's rows.
    """
    return decode(_own_bytes(stream, batch, seq), OPEN_DTYPE)


def append_narrow(x: F32, stream: PagedStream, batch: AttendBatch) -> None:
    """See `Backend.append`.

    Raises:
        ValueError: a sequence starts inside a block and has rows in a later one that stays incomplete.
    """
    assert stream.open is not None
    assert batch.seats is not None
    size = stream.block_size
    ends = batch.seq_lens
    starts = ends - np.diff(batch.cu_seqlens_q)
    is_broken = (starts % size != 0) & (ends % size != 0) & (starts // size != ends // size)
    if is_broken.any():
        place = int(np.argmax(is_broken))
        raise ValueError(
            f"positions {starts[place]}..{ends[place] - 1} begin inside a block of {size} tokens and end "
            "inside a later one: the open block would be overwritten while it is read"
        )
    stream.open.rows[: len(x)] = encode(x, OPEN_DTYPE)
    opened = open_view(stream)
    for seq, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        own = _own_bytes(stream, batch, seq)
        first = start - start % size
        for block in range(first // size, end // size):
            part = decode(own[:, block * size - first : (block + 1) * size - first], OPEN_DTYPE)
            stored = seal(part, stream.form)
            page = stream.pages[int(batch.block_tables[seq, block])]
            page[stream.offset : stream.offset + len(stored)] = stored
        kept = max(start, end // size * size)
        if kept < end:
            slots = slice(kept % size, kept % size + end - kept)
            opened[int(batch.seats[seq]), :, slots] = own[:, kept - first :]


def _own_bytes(stream: PagedStream, batch: AttendBatch, seq: int) -> U8:
    """`gather_own` in stored form, ``uint8 [num_heads, n, dim * 2]``."""
    assert stream.open is not None
    assert batch.seats is not None
    rows = stream.open.rows[int(batch.cu_seqlens_q[seq]) : int(batch.cu_seqlens_q[seq + 1])]
    start = int(batch.seq_lens[seq]) - len(rows)
    kept = open_view(stream)[int(batch.seats[seq]), :, : start % stream.block_size]
    own: U8 = np.concatenate((kept, rows.transpose(1, 0, 2)), axis=1)
    return own
