"""The reference operations, written against the Array API standard: numpy and torch run the same code.

Each takes ``xp``, an array namespace, first. They decode stored numbers to float32 before any arithmetic,
derive masks from positions alone, and read a grouped head's keys once without repeating them. They are
the definition that every faster kernel is compared with, so they are plain, not fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvern.kernels.protocol import AttendParams

Array = Any
"""An array of whichever namespace ``xp`` is."""

MASKED = -math.inf
QUERY_TILE = 64
"""Rows of queries per score matrix, so that a long prompt does not need a quadratic one."""


def rms_norm(xp: Any, x: Array, weight: Array, eps: float) -> Array:
    """``x / sqrt(mean(x^2) + eps) * weight`` along the last axis."""
    variance = xp.mean(x * x, axis=-1, keepdims=True)
    return x / xp.sqrt(variance + eps) * weight


def rotate(xp: Any, x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rotary position embedding of ``x [T, heads, dim]`` by per-row ``cos, sin [T, rotary_dim / 2]``."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    new_first, new_second = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        turned = xp.reshape(xp.stack([new_first, new_second], axis=-1), turned.shape)
    else:
        turned = xp.concat([new_first, new_second], axis=-1)
    return xp.concat([turned, rest], axis=-1)


@dataclass(frozen=True, slots=True)
class Forms:
    """Keys of a narrow cache that come in two forms: the first ``num_sealed`` stored, the rest as computed.

    A position may be there in both; a query sees its own block as computed and all earlier ones stored.
    """

    num_sealed: int
    block_size: int


def visible(
    xp: Any,
    query_positions: Array,
    key_positions: Array,
    params: AttendParams,
    forms: Forms | None = None,
) -> Array:
    """Boolean ``[num_queries, num_keys]``: which key each query sees, from absolute positions alone."""
    query, key = query_positions[:, None], key_positions[None, :]
    seen = key <= query
    if forms is not None:
        own = query // forms.block_size * forms.block_size
        sealed = seen[:, : forms.num_sealed] & (key[:, : forms.num_sealed] < own)
        computed = seen[:, forms.num_sealed :] & (key[:, forms.num_sealed :] >= own)
        seen = xp.concat([sealed, computed], axis=1)
    if params.window is not None:
        seen = seen & ((key > query - params.window) | (key < params.num_sink_tokens))
    if params.chunk is not None:
        seen = seen & (key >= query // params.chunk * params.chunk)
    return seen


def first_visible(position: int, params: AttendParams) -> int:
    """The smallest position outside the sink tokens that a query at ``position`` sees."""
    start = 0
    if params.window is not None:
        start = max(start, position - params.window + 1)
    if params.chunk is not None:
        start = max(start, position // params.chunk * params.chunk)
    return start


def attend_sequence(
    xp: Any,
    q: Array,
    keys: Array,
    values: Array,
    query_positions: Array,
    key_positions: Array,
    params: AttendParams,
    forms: Forms | None = None,
) -> tuple[Array, int]:
    """Attention of one sequence's queries over its own keys.

    Args:
        xp: the array namespace.
        q: ``[t, heads, key_dim]``.
        keys: ``[num_kv_heads, n, key_dim]``.
        values: ``[num_kv_heads, n, value_dim]``.
        query_positions: ``[t]``.
        key_positions: ``[n]``.
        params: scale, window and so on.
        forms: of keys in two forms; None when all are as computed.

    Returns:
        ``[t, heads, value_dim]`` and the number of (query, visible key) pairs.
    """
    outs, products = [], 0
    for start in range(0, q.shape[0], QUERY_TILE):
        tile = slice(start, start + QUERY_TILE)
        seen = visible(xp, query_positions[tile], key_positions, params, forms)
        outs.append(_attend_tile(xp, q[tile, ...], keys, values, seen, params))
        products += int(xp.sum(xp.astype(seen, xp.int64)))
    return xp.concat(outs, axis=0), products


def _attend_tile(
    xp: Any, q: Array, keys: Array, values: Array, seen: Array, params: AttendParams
) -> Array:
    num_queries, num_heads, key_dim = q.shape
    num_kv_heads, num_keys, value_dim = values.shape
    group = num_heads // num_kv_heads
    grouped = xp.permute_dims(
        xp.reshape(q, (num_queries, num_kv_heads, group, key_dim)), (1, 2, 0, 3)
    )
    rows = xp.reshape(grouped, (num_kv_heads, group * num_queries, key_dim))
    scores = xp.matmul(rows, xp.permute_dims(keys, (0, 2, 1))) * params.scale
    if params.softcap is not None:
        scores = params.softcap * xp.tanh(scores / params.softcap)
    scores = xp.reshape(scores, (num_kv_heads, group, num_queries, num_keys))
    scores = xp.where(seen[None, None, :, :], scores, xp.full_like(scores, MASKED))
    peak = xp.max(scores, axis=-1, keepdims=True)
    if params.sink_logits is not None:
        sink = xp.reshape(xp.asarray(params.sink_logits), (num_kv_heads, group, 1, 1))
        peak = xp.maximum(peak, sink)
    weights = xp.exp(scores - peak)
    total = xp.sum(weights, axis=-1, keepdims=True)
    if params.sink_logits is not None:
        total = total + xp.exp(sink - peak)
    weights = xp.reshape(weights / total, (num_kv_heads, group * num_queries, num_keys))
    out = xp.reshape(xp.matmul(weights, values), (num_kv_heads, group, num_queries, value_dim))
    return xp.reshape(xp.permute_dims(out, (2, 0, 1, 3)), (num_queries, num_heads, value_dim))


def merge_states(xp: Any, outs: Array, maxima: Array, sums: Array) -> tuple[Array, Array]:
    """Merge partial attention results over disjoint sets of keys, in the order given.

    Args:
        xp: the array namespace.
        outs: ``[parts, rows, value_dim]``, each already divided by its own sum.
        maxima: ``[parts, rows]``, the largest logit of each part (-inf for a part without keys).
        sums: ``[parts, rows]``, sum of exp(logit - maximum).

    Returns:
        The merged ``[rows, value_dim]`` and the log-sum-exp ``[rows]``.

    Source: Dao et al., FlashAttention (2022), section 3.1.
    """
    peak = xp.max(maxima, axis=0)
    safe_peak = xp.where(xp.isinf(peak), xp.zeros_like(peak), peak)
    factors = sums * xp.exp(maxima - safe_peak[None, :])
    total = xp.sum(factors, axis=0)
    safe_total = xp.where(total > 0, total, xp.ones_like(total))
    merged = xp.sum(outs * factors[..., None], axis=0) / safe_total[:, None]
    return merged, safe_peak + xp.log(total)


def activation(xp: Any, x: Array, kind: str) -> Array:
    """``silu``, ``gelu`` (exact) or ``gelu_tanh`` of every element."""
    if kind == "silu":
        return x / (1 + xp.exp(-x))
    if kind == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + xp.tanh(inner))
    if kind == "gelu":
        return 0.5 * x * (1 + _erf(xp, x * math.sqrt(0.5)))
    raise ValueError(f"activation {kind} is not one of silu, gelu, gelu_tanh")


def _erf(xp: Any, x: Array) -> Array:
    """The error function, which the Array API standard leaves out."""
    if hasattr(xp, "erf"):
        return xp.erf(x)
    values = np.frompyfunc(math.erf, 1, 1)(np.asarray(x, np.float64))
    return np.asarray(values, np.float32)
