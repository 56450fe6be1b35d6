"""Arithmetic of memory: sizes as people write them, and the bytes that requests need."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvern.errors import UsageError
from kvern.spec.layers import ModelSpec

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"([0-9]+)(?:\.([0-9]+))?\s*([a-zA-Z]*)")


def parse_size(text: str | int) -> int:
    """Bytes of a size such as "512MiB", "2GiB", "1.5GB" or "1048576".

    GiB is 2^30 and GB is 10^9. A fraction must give a whole number of bytes after rounding down.

    Raises:
        UsageError: not a size, an unknown unit, or not positive.
    """
    if isinstance(text, int):
        num_bytes = text
    else:
        match = _SIZE.fullmatch(text.strip())
        unit = _UNITS.get(match[3].lower()) if match else None
        if match is None or unit is None:
            raise UsageError(f"{text!r} is not a size: write for example 512MiB, 2GiB or 1.5GB")
        fraction = match[2] or ""
        num_bytes = int(match[1] + fraction) * unit // 10 ** len(fraction)
    if num_bytes <= 0:
        raise UsageError(f"a size must be positive, not {text}: write for example 512MiB")
    return num_bytes


def format_size(num_bytes: int | float) -> str:
    """A size for people, in binary units and at most three decimals: "360 KiB", "2.906 GiB"."""
    value, units = float(num_bytes), ["TiB", "GiB", "MiB", "KiB", "B"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop()
    return f"{value:,.3f}".rstrip("0").rstrip(".") + f" {units[-1]}"


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks of `block_size` slots that `num_tokens` tokens occupy."""
    if num_tokens < 0 or block_size < 1:
        raise ValueError(f"{num_tokens} tokens in blocks of {block_size}: both must make sense")
    return -(-num_tokens // block_size)


def bytes_for_context(model: ModelSpec, num_tokens: int, batch_size: int = 1) -> int:
    """Bytes that `batch_size` sequences of `num_tokens` need at their peak, no block rounding."""
    return batch_size * model.context_bytes(num_tokens)


def kv_matrix(
    model: ModelSpec, context_lens: Sequence[int], batch_sizes: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """`bytes_for_context` for every pair: one row per context length, one column per batch size."""
    per_sequence = [model.context_bytes(num_tokens) for num_tokens in context_lens]
    return tuple(tuple(size * batch for batch in batch_sizes) for size in per_sequence)


def sequences_that_fit(model: ModelSpec, kv_bytes: int, num_tokens: int) -> int:
    """How many sequences of `num_tokens` fit into `kv_bytes`, without block rounding."""
    per_sequence = model.context_bytes(num_tokens)
    if per_sequence == 0:
        raise ValueError(f"a sequence of {num_tokens} tokens leaves nothing in this model's cache")
    return max(kv_bytes, 0) // per_sequence


def kv_heads_per_rank(num_kv_heads: int, tensor_parallel: int) -> int:
    """KV heads that one tensor-parallel rank stores: split while they divide, else replicated.

    With more ranks than heads each rank holds one head, so a head exists
    `tensor_parallel / num_kv_heads` times (an MQA head on 8 ranks: 8 copies).

    Raises:
        UsageError: neither number divides the other.
    """
    if num_kv_heads % tensor_parallel == 0:
        return num_kv_heads // tensor_parallel
    if tensor_parallel % num_kv_heads == 0:
        return 1
    raise UsageError(
        f"{num_kv_heads} KV heads cannot be spread over {tensor_parallel} ranks: "
        f"choose a tensor-parallel degree that divides {num_kv_heads} or is a multiple of it"
    )
