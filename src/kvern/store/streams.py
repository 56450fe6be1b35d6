"""Where one layer's keys or values lie inside the pool: raw bytes with a dtype tag."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PagedStream:
    """One stream (the keys or the values) of one layer inside the pool's slab.

    A page is one contiguous run of bytes for all layers of a KV group; this stream's part of it starts
    at ``offset`` and is laid out ``[num_heads, block_size, dim]``, C order.

    Attributes:
        pages: the slab, ``uint8 [num_blocks, page_bytes]``.
        offset: bytes from a page's start to this stream.
        dtype: ``fp32``, ``fp16`` or ``bf16``.
    """

    pages: npt.NDArray[np.uint8]
    offset: int
    dtype: str
    num_heads: int
    block_size: int
    dim: int
