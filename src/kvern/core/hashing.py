"""Names of cached content: a keyed 128-bit chain hash over tagged fields.

    root    = H(key; tagged fields of the CacheKey)
    node i  = H(node i - 1 || the span's token ids as int32 little-endian)
    a span with media, or shorter than a whole one: H' with tagged fields, another domain

Fields carry their name and length, so no two kinds of key can meet. The result is the same in every
process and on every machine. The secret, if any, enters by the root and thereby every node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from struct import iter_unpack

import numpy as np
import numpy.typing as npt

from kvern.core.sequence import Int32, Media

UInt64 = npt.NDArray[np.uint64]
HASH_BYTES = 16
_SPECIAL = b"kvern.special"


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Everything outside the tokens that decides what a cached block holds.

    Attributes:
        model: fingerprint of weights and configuration.
        numerics: backend, kernel path, recipe version and weights format.
        kv_format: stored form and block sizes.
        position_regime: how positions become rotations.
        adapter: name and version of the adapter.
        cache_salt: the tenant's own part.
    """

    model: str = ""
    numerics: str = ""
    kv_format: str = ""
    position_regime: str = "default"
    adapter: str | None = None
    cache_salt: str | None = None

    def root_hash(self, secret: bytes) -> bytes:
        """The hash of the empty prefix."""
        return tagged_hash(
            [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)],
            secret,
        )

    def differences(self, other: CacheKey) -> tuple[str, ...]:
        """Names of the fields in which two keys differ."""
        return tuple(
            name
            for name in (
                "model",
                "numerics",
                "kv_format",
                "position_regime",
                "adapter",
                "cache_salt",
            )
            if getattr(self, name) != getattr(other, name)
        )


def tagged_hash(fields: Iterable[tuple[str, str | bytes | None]], secret: bytes = b"") -> bytes:
    """Hash named fields such that no other list of fields gives the same bytes.

    None differs from an empty string.
    """
    state = blake2b(digest_size=HASH_BYTES, key=secret, person=_SPECIAL)
    for name, value in fields:
        data = value.encode() if isinstance(value, str) else value
        kind = b"n" if data is None else b"v"
        data = data or b""
        state.update(b"%s%d:%s%d:" % (kind, len(name), name.encode(), len(data)))
        state.update(data)
    return state.digest()


def hash_spans(
    parent: bytes, tokens: Int32, span: int, media: tuple[Media, ...], start: int
) -> bytes:
    """Chain hashes of whole spans, `HASH_BYTES` each, one behind the other.

    Args:
        parent: hash of the span before.
        tokens: int32 `[num_spans * span]`.
        span: tokens per span.
        media: the sequence's media; those that start inside a span are part of its hash.
        start: position of the first token.
    """
    data = tokens.astype("<i4", copy=False).tobytes()
    step = 4 * span
    hashes: list[bytes] = []
    append = hashes.append
    special = {(item.start - start) // span for item in media if item.start >= start}
    if not special:
        for (piece,) in iter_unpack(f"{step}s", data):
            parent = blake2b(parent + piece, digest_size=16).digest()
            append(parent)
        return b"".join(hashes)
    for offset in range(0, len(data), step):
        piece = data[offset : offset + step]
        if offset // step in special:
            parent = hash_special(parent, piece, media, start + offset // 4, span)
        else:
            parent = blake2b(parent + piece, digest_size=16).digest()
        append(parent)
    return b"".join(hashes)


def hash_special(
    parent: bytes, data: bytes, media: tuple[Media, ...], start: int, num_tokens: int
) -> bytes:
    """Hash of a span that has media or is not whole."""
    fields: list[tuple[str, str | bytes | None]] = [("parent", parent), ("tokens", data)]
    for item in media_within(media, start, num_tokens):
        place = b"%d:%d:" % (item.start - start, item.length)
        fields.append(("media", place + item.digest))
    return tagged_hash(fields)


def media_within(media: tuple[Media, ...], start: int, num_tokens: int) -> tuple[Media, ...]:
    """The media that begin in the given run of positions."""
    return tuple(item for item in media if start <= item.start < start + num_tokens)


def as_columns(hashes: bytes, hash_bits: int) -> tuple[UInt64, UInt64]:
    """Hashes as two uint64 columns, cut to `hash_bits` (under 128 only to provoke collisions)."""
    pairs = np.frombuffer(hashes, "<u8").reshape(-1, 2)
    low, high = pairs[:, 0].astype(np.uint64), pairs[:, 1].astype(np.uint64)
    if hash_bits < 128:
        low &= np.uint64((1 << min(hash_bits, 64)) - 1)
        high &= np.uint64((1 << max(hash_bits - 64, 0)) - 1)
    return low, high
