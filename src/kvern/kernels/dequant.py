"""Decode stored weights to float32 with numpy: the reference for every element type.

Block layouts are ggml's (ggml-common.h); a block holds 32 elements, a "K" super-block 256. Integers are
combined exactly and multiplied in float32 in the order the format defines, so the result is the same
float32 number that other implementations of the format give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ElementType:
    """How many elements and bytes one block of a stored type has, and how to decode blocks.

    `decode` maps ``uint8 [num_blocks, block_bytes]`` to float32 ``[num_blocks, block_elements]``.
    """

    block_elements: int
    block_bytes: int
    decode: Callable[[U8], F32]


def _half(blocks: U8, start: int) -> F32:
    """The fp16 numbers at byte ``start`` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: U8) -> U8:
    """Low nibbles of a run of bytes, then its high nibbles."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _fifth_bits(blocks: U8, start: int) -> U8:
    """Bit 4 of each of 32 elements, from four little-endian bytes."""
    return np.unpackbits(blocks[:, start : start + 4], axis=-1, bitorder="little")


def _f32(blocks: U8) -> F32:
    return blocks.view(np.float32)


def _f16(blocks: U8) -> F32:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: U8) -> F32:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: U8) -> F32:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: U8) -> F32:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: U8) -> F32:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: U8) -> F32:
    quants = _nibbles(blocks[:, 6:]) | (_fifth_bits(blocks, 2) << 4)
    return _half(blocks, 0) * (quants.astype(np.float32) - 16)


def _q5_1(blocks: U8) -> F32:
    quants = _nibbles(blocks[:, 8:]) | (_fifth_bits(blocks, 4) << 4)
    return _half(blocks, 0) * quants.astype(np.float32) + _half(blocks, 2)


def _scales_and_mins(packed: U8) -> tuple[F32, F32]:
    """Eight 6-bit scales and eight 6-bit mins from 12 bytes per super-block, ``[num_blocks, 8]`` each."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 0x0F) | ((low >> 6) << 4)], axis=-1)
    mins = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    return scales.astype(np.float32), mins.astype(np.float32)


def _k_quants(blocks: U8, quants: U8) -> F32:
    """``d * scale * q - dmin * min`` for ``quants [num_blocks, 8, 32]`` (Q4_K and Q5_K)."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales)[:, :, None]
    offset = (_half(blocks, 2) * mins)[:, :, None]
    return (scale * quants.astype(np.float32) - offset).reshape(len(blocks), 256)


def _q4_k(blocks: U8) -> F32:
    quants = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _k_quants(blocks, quants)


def _q5_k(blocks: U8) -> F32:
    quants = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = (blocks[:, None, 16:48] >> shifts) & 1
    return _k_quants(blocks, quants | (fifth << 4).astype(np.uint8))


def _q6_k(blocks: U8) -> F32:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    low = np.concatenate([low & 0x0F, low >> 4], axis=2)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    quants = ((low | (high << 4)).astype(np.int8) - 32).reshape(-1, 16, 16)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scale[:, :, None] * quants.astype(np.float32)).reshape(len(blocks), 256)


ELEMENT_TYPES: dict[str, ElementType] = {
    "F32": ElementType(1, 4, _f32),
    "F16": ElementType(1, 2, _f16),
    "BF16": ElementType(1, 2, _bf16),
    "Q8_0": ElementType(32, 34, _q8_0),
    "Q4_0": ElementType(32, 18, _q4_0),
    "Q4_1": ElementType(32, 20, _q4_1),
    "Q5_0": ElementType(32, 22, _q5_0),
    "Q5_1": ElementType(32, 24, _q5_1),
    "Q4_K": ElementType(256, 144, _q4_k),
    "Q5_K": ElementType(256, 176, _q5_k),
    "Q6_K": ElementType(256, 210, _q6_k),
}


def dequantize(data: U8, element_type: str, rows: int, cols: int) -> F32:
    """Decode a stored matrix.

    Args:
        data: the raw bytes, ``uint8 [nbytes]``.
        element_type: a key of `ELEMENT_TYPES`.
        rows: number of rows.
        cols: elements per row, a whole number of blocks.

    Returns:
        float32 ``[rows, cols]``, a new array.

    Raises:
        ValueError: the type is unknown, or the byte count does not match the shape.
    """
    kind = ELEMENT_TYPES.get(element_type)
    if kind is None:
        known = ", ".join(ELEMENT_TYPES)
        raise ValueError(f"element type {element_type} is not one of {known}")
    num_blocks, rest = divmod(rows * cols, kind.block_elements)
    if rest or cols % kind.block_elements or data.size != num_blocks * kind.block_bytes:
        raise ValueError(
            f"{data.size} bytes are not a {rows} x {cols} matrix of {element_type} "
            f"({kind.block_elements} elements in {kind.block_bytes} bytes a block)"
        )
    blocks = np.ascontiguousarray(data).reshape(-1, kind.block_bytes)
    if kind.block_elements == 1:
        blocks = blocks.reshape(rows, cols * kind.block_bytes)
    return np.array(kind.decode(blocks), dtype=np.float32).reshape(rows, cols)
