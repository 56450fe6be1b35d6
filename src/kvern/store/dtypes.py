"""The stored element types of open and 16-bit blocks: how many bytes, and to and from float32.

Nothing calculates on stored numbers: a reader decodes to float32 first. Rounding is to nearest, ties to
even; fp16 overflows to infinity as IEEE 754 says.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

STORED_BYTES: dict[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes per element of every dtype that `encode` and `decode` know."""

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


def encode(x: F32, dtype: str) -> U8:
    """Round float32 ``[..., n]`` to a stored dtype; returns its bytes, ``uint8 [..., n * size]``."""
    with np.errstate(over="ignore"):  # fp16: past 65,504 is infinity, by design
        rounded = np.ascontiguousarray(x).astype(_NUMPY_DTYPES[dtype])
    return rounded.view(np.uint8)


def decode(data: U8, dtype: str) -> F32:
    """The float32 values of stored bytes: ``uint8 [..., n * size]`` to ``float32 [..., n]``, exact."""
    return np.ascontiguousarray(data).view(_NUMPY_DTYPES[dtype]).astype(np.float32)
