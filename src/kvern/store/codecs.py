"""The reference encoder and decoder of sealed streams: whole blocks to stored bytes and back.

    x [heads, tokens, dim] --rounded to bf16--> open block --seal--> bytes of one stored stream
    bytes [..., stored_bytes] --unseal--> float32 [..., heads, tokens, dim]

The layout is `Codec.regions`; a narrow codec finds its functions in `SEALED_FORMS`. What is not in
`STORED_CODECS` cannot be stored yet, and `require_stored` says so by name.

int8 per token and head: scale = max|x| / 127 in float32, code = x * (127 / max|x|), rounded half to
even. A vector smaller than `SMALLEST` becomes zeros with scale 0. One that is not finite gets the scale
NaN, so that whoever reads it sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from kvern.errors import UsageError
from kvern.spec.codec import INT8, STORED_CODECS, Codec, format_name, stored_formats
from kvern.store.dtypes import F32, U8, decode, encode

LARGEST_CODE = np.float32(127)
SMALLEST = np.float32(2.0**-100)
"""Vectors whose largest element is smaller are stored as zeros: their scale's inverse would overflow."""


@dataclass(frozen=True, slots=True)
class SealedForm:
    """How a codec's blocks are written and read.

    Attributes:
        seal: float32 ``[heads, tokens, dim]`` (bf16 values) to the bytes of each region, in order.
        unseal: the regions' bytes, ``uint8 [..., region bytes]`` each, and (heads, tokens, dim), to float32
            ``[..., heads, tokens, dim]``.
    """

    seal: Callable[[F32], tuple[U8, ...]]
    unseal: Callable[[tuple[U8, ...], tuple[int, int, int]], F32]


def _seal_int8(x: F32) -> tuple[U8, ...]:
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.abs(x).max(axis=-1)
        is_finite = np.isfinite(x).all(axis=-1)
        is_coded = is_finite & (largest >= SMALLEST)
        safe = np.where(is_coded, largest, LARGEST_CODE)
        scale = np.where(is_coded, safe / LARGEST_CODE, np.float32(0))
        scale = np.where(is_finite, scale, np.float32(np.nan)).astype(np.float32)
        codes = np.rint(np.where(is_coded[..., None], x, 0) * (LARGEST_CODE / safe)[..., None])
    codes = np.clip(codes, -LARGEST_CODE, LARGEST_CODE).astype(np.int8)
    return codes.view(np.uint8).reshape(-1), np.ascontiguousarray(scale).view(np.uint8).reshape(-1)


def _unseal_int8(regions: tuple[U8, ...], shape: tuple[int, int, int]) -> F32:
    data, scales = regions
    heads, tokens, _ = shape
    codes = data.view(np.int8).reshape(*data.shape[:-1], *shape).astype(np.float32)
    scale = decode(scales, "fp32").reshape(*scales.shape[:-1], heads, tokens, 1)
    product: F32 = codes * scale
    return product


SEALED_FORMS: dict[Codec, SealedForm] = {INT8: SealedForm(_seal_int8, _unseal_int8)}
"""The narrow ones of `STORED_CODECS`."""


def require_stored(codecs: Iterable[Codec]) -> None:
    """Refuse what the engine cannot store.

    Raises:
        UsageError: names the format and those that are stored.
    """
    for codec in codecs:
        if codec not in STORED_CODECS:
            raise UsageError(
                f"KV format {format_name(codec)} can be planned but not yet stored by the engine: "
                f"choose {', '.join(stored_formats())}"
            )


def seal(x: F32, codec: Codec) -> U8:
    """A whole block's stored bytes.

    Args:
        x: float32 ``[heads, tokens, dim]``, rounded to bf16 for narrow codecs.
        codec: one of `STORED_CODECS`.

    Returns:
        ``uint8 [stored_bytes]``, the codec's regions without gaps.
    """
    form = SEALED_FORMS.get(codec)
    return encode(x, codec.dtype).reshape(-1) if form is None else np.concatenate(form.seal(x))


def unseal(data: U8, codec: Codec, shape: tuple[int, int, int]) -> F32:
    """The values of stored blocks.

    Args:
        data: ``uint8 [..., stored_bytes]``.
        codec: one of `STORED_CODECS`.
        shape: (heads, tokens of a block, dim).

    Returns:
        float32 ``[..., heads, tokens, dim]``.
    """
    form = SEALED_FORMS.get(codec)
    heads, tokens, dim = shape
    if form is None:
        return decode(data, codec.dtype).reshape(*data.shape[:-1], *shape)
    parts = tuple(
        np.ascontiguousarray(data[..., region.offset : region.offset + region.num_bytes])
        for region in codec.regions(tokens, heads, dim)
    )
    return form.unseal(parts, shape)
