"""Where one layer's keys or values lie: raw bytes with a codec, in the pool and, while open, beside it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.spec.codec import Codec

U8 = npt.NDArray[np.uint8]

OPEN_DTYPE = "bf16"
"""What narrow streams are computed in: the dtype of open pages and row buffers."""


@dataclass(frozen=True, slots=True)
class OpenForm:
    """Where a narrow stream's tokens lie while their block is open, and while their step runs.

    Attributes:
        pages: the open pages, ``uint8 [num_seats, open_page_bytes]``: one per running sequence.
        offset: bytes from an open page's start to this stream, bf16 ``[num_heads, block_size, dim]``.
        rows: what the step has computed, row by row: ``uint8 [max_num_batched_tokens, num_heads, dim * 2]``.
            Valid from a layer's append until the next append to a stream that shares it.
    """

    pages: U8
    offset: int
    rows: U8


@dataclass(frozen=True, slots=True)
class PagedStream:
    """One stream (the keys or the values) of one layer inside the pool's slab.

    A page is one contiguous run of bytes for all layers of a KV group; this stream's part of it starts
    at ``offset`` and is laid out ``[num_heads, block_size, dim]``, C order; scales follow, as
    `kvern.spec.codec` has it.

    Attributes:
        pages: the slab, ``uint8 [num_blocks, page_bytes]``.
        offset: bytes from a page's start to this stream.
        dtype: type of the stored elements: ``fp32``, ``fp16``, ``bf16``; ``int8``.
        codec: the stored form of a narrow stream; None: elements of ``dtype`` alone.
        open: where a narrow stream's open blocks lie; None for a wide stream, whose pages hold them.
    """

    pages: U8
    offset: int
    dtype: str
    num_heads: int
    block_size: int
    dim: int
    codec: Codec | None = None
    open: OpenForm | None = None

    @property
    def form(self) -> Codec:
        """The stored form, whatever it is."""
        return self.codec or Codec(self.dtype)

    @property
    def scale_offset(self) -> int:
        """Bytes from a page's start to the scales, ``[num_heads, block_size]``; of codecs that have them."""
        return self.offset + self.form.regions(self.block_size, self.num_heads, self.dim)[1].offset
