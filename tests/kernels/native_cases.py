"""Random weights, caches and float64 references that the tests of the native kernels share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from tests.kernels.batches import slots_batch

from kvern.kernels.native import ELEMENT_TYPES, available_kernel_paths
from kvern.kernels.protocol import AttendBatch, AttendParams, Backend, HostTensor, PagedStream

PATHS = available_kernel_paths()
ROUNDING_PATHS = ("amx", "avx512")
"""Paths that round queries and probabilities to bf16 beside bf16 keys and values."""
QUANTISED = ELEMENT_TYPES[3:]
STREAM_DTYPES: dict[str, Any] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}

# name: features per block, bytes per block, byte positions of the block's fp16 numbers
BLOCKS = {
    "Q8_0": (32, 34, (0,)),
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}


def random_tensor(element_type: str, rows: int, cols: int, seed: int = 0) -> HostTensor:
    """Weights whose codes are random bits and whose scales are sane."""
    rng = np.random.default_rng(seed)
    if element_type in BLOCKS:
        features, size, scales = BLOCKS[element_type]
        raw = rng.integers(0, 256, (rows, cols // features, size), dtype=np.uint8)
        for at in scales:
            numbers = (rng.uniform(-1, 1, raw.shape[:2]) * 0.02).astype(np.float16)
            raw[:, :, at : at + 2] = numbers[..., None].view(np.uint8)
    else:
        dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[element_type]
        raw = rng.standard_normal((rows, cols)).astype(dtype).view(np.uint8)
    return HostTensor("w", element_type, rows, cols, np.ascontiguousarray(raw).reshape(-1))


@dataclass
class Cache:
    """Sequences' keys and values: as numbers, and appended to pages that hold NaN elsewhere."""

    keys: PagedStream
    values: PagedStream
    batch: AttendBatch
    q: np.ndarray
    k_rows: list[np.ndarray]
    v_rows: list[np.ndarray]


@dataclass(frozen=True)
class Shape:
    """What a batch of attention looks like; lengths count the step's own tokens."""

    lengths: tuple[int, ...]
    q_lengths: tuple[int, ...]
    heads: int = 9
    kv_heads: int = 3
    key_dim: int = 64
    value_dim: int = 64
    dtype: str = "bf16"
    block_size: int = 16
    magnitude: float = 1.0
    seed: int = 0
    placement: int = 0
    params: AttendParams = field(default_factory=lambda: AttendParams(scale=0.125))


def build_cache(backend: Backend, shape: Shape) -> Cache:
    """Appends every sequence's rows at scattered blocks, then frees what no query can see."""
    size = shape.block_size
    counts = [-(-n // size) for n in shape.lengths]
    width = STREAM_DTYPES[shape.dtype].itemsize
    key_bytes = shape.kv_heads * size * shape.key_dim * width
    value_bytes = shape.kv_heads * size * shape.value_dim * width
    pages = np.full((sum(counts) + 1, 64 + key_bytes + value_bytes), 0xFF, np.uint8)
    keys = PagedStream(pages, 64, shape.dtype, shape.kv_heads, size, shape.key_dim)
    values = PagedStream(pages, 64 + key_bytes, shape.dtype, shape.kv_heads, size, shape.value_dim)
    ids = iter(np.random.default_rng(shape.placement).permutation(sum(counts)) + 1)
    tables = np.zeros((len(counts), max(counts)), np.int32)
    k_rows, v_rows, q_rows = [], [], []
    for s, length in enumerate(shape.lengths):
        tables[s, : counts[s]] = [next(ids) for _ in range(counts[s])]
        per_sequence = np.random.default_rng((shape.seed, length))  # not touched by the neighbours
        k_rows.append(
            _normal(per_sequence, (length, shape.kv_heads, shape.key_dim)) * shape.magnitude
        )
        v_rows.append(_normal(per_sequence, (length, shape.kv_heads, shape.value_dim)))
        q_rows.append(
            _normal(per_sequence, (length, shape.heads, shape.key_dim))[
                length - shape.q_lengths[s] :
            ]
        )
        at = np.arange(length)
        slots = tables[s][at // size].astype(np.int64) * size + at % size
        backend.append(k_rows[s], keys, slots_batch(slots))
        backend.append(v_rows[s], values, slots_batch(slots))
        first = first_visible(shape.params, length - shape.q_lengths[s])
        for block in range(counts[s]):
            if shape.params.num_sink_tokens <= block * size and (block + 1) * size <= first:
                tables[s, block] = 0
    cu = np.concatenate([[0], np.cumsum(shape.q_lengths)]).astype(np.int32)
    positions = [np.arange(n - m, n) for n, m in zip(shape.lengths, shape.q_lengths, strict=True)]
    batch = AttendBatch(
        cu_seqlens_q=cu,
        seq_lens=np.array(shape.lengths, np.int32),
        block_tables=tables,
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.zeros(int(cu[-1]), np.int64),
    )
    return Cache(keys, values, batch, np.concatenate(q_rows), k_rows, v_rows)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def attend(backend: Backend, shape: Shape) -> np.ndarray:
    """The batch's attention on a backend; also checks the count of query-key products."""
    cache = build_cache(backend, shape)
    out = np.full((len(cache.q), shape.heads, shape.value_dim), np.nan, np.float32)
    pairs = backend.attend(cache.q, cache.keys, cache.values, cache.batch, shape.params, out)
    assert pairs == sum(int(visible(shape.params, p).sum()) for p in cache.batch.positions)
    return out


def first_visible(params: AttendParams, position: int) -> int:
    """First position that a query sees, the sink tokens aside."""
    first = 0
    if params.window:
        first = max(first, position - params.window + 1)
    if params.chunk:
        first = max(first, position // params.chunk * params.chunk)
    return first


def visible(params: AttendParams, position: int) -> np.ndarray:
    """Which of the positions up to its own a query sees."""
    sees = np.arange(position + 1) >= first_visible(params, position)
    sees[: params.num_sink_tokens] = True
    return sees


def attend_reference(shape: Shape, cache: Cache) -> np.ndarray:
    """The same in float64, from keys and values rounded to the stream's dtype."""
    dtype = STREAM_DTYPES[shape.dtype]
    params = shape.params
    group = shape.heads // shape.kv_heads
    out = np.zeros((len(cache.q), shape.heads, shape.value_dim))
    row = 0
    for s, q_length in enumerate(shape.q_lengths):
        k = cache.k_rows[s].astype(dtype).astype(np.float64)
        v = cache.v_rows[s].astype(dtype).astype(np.float64)
        for i in range(q_length):
            sees = visible(params, shape.lengths[s] - q_length + i)
            kk = np.repeat(k[: len(sees)][sees], group, axis=1)
            vv = np.repeat(v[: len(sees)][sees], group, axis=1)
            logits = np.einsum("nhd,hd->hn", kk, cache.q[row].astype(np.float64)) * params.scale
            if params.softcap:
                logits = params.softcap * np.tanh(logits / params.softcap)
            if params.sink_logits is not None:
                logits = np.concatenate([logits, params.sink_logits[:, None]], axis=1)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[row] = np.einsum("hn,nhd->hd", weights[:, : len(kk)], vv)
            row += 1
    return out
