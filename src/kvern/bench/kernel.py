"""Attention alone: the paged kernel beside torch's and the bandwidth limit, one query per sequence.

All layers of the model are walked in turn, as a decode step does, so that the keys come from memory
and not from a cache that a single layer would fit. Blocks lie in the pool in random order; torch gets
each sequence's keys and values contiguous, which is the best case for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvern.bench.limits import Limits
from kvern.bench.stats import spread_of
from kvern.errors import KvernError
from kvern.kernels.protocol import AttendBatch, AttendParams, Backend, PagedStream
from kvern.spec.budget import blocks_for
from kvern.spec.codec import KV_FORMATS
from kvern.spec.content import Heads
from kvern.spec.groups import make_kv_plan
from kvern.spec.layers import ModelSpec
from kvern.store.pool import PagedStore

SIZES = tuple((context, batch) for context in (512, 2048, 8192) for batch in (1, 8))
QUICK_SIZES = ((64, 1), (64, 2))
BLOCK_SIZE = 16
MOST_BYTES = 4 * 2**30
"""Sizes whose keys and values need more are left out."""
TORCH_FORMATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Geometry:
    """What attention of one layer looks like."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def geometry_of(model: ModelSpec) -> Geometry | None:
    """Of a model whose layers all keep equal heads; None for others."""
    heads = {layer.caches[0].content if layer.caches else None for layer in model.layers}
    if len(heads) != 1 or model.num_attention_heads is None:
        return None
    (content,) = heads
    if not isinstance(content, Heads) or content.key_dim != content.value_dim:
        return None
    return Geometry(
        len(model.layers), model.num_attention_heads, content.num_kv_heads, content.key_dim
    )


def attend_benchmark(
    backend: Backend,
    model: ModelSpec,
    kv_formats: Sequence[str],
    limits: Limits,
    runs: int,
    quick: bool,
) -> list[dict[str, Any]]:
    """Every context, batch and format: ours, torch's where torch is installed, and the limit.

    Returns:
        Objects with ``context``, ``batch``, ``kv_format``, ``kv_bytes`` (of one layer), ``limit_s``, and
        ``kvern`` and ``torch``: a spread of seconds per layer with ``share_of_limit``, or a sentence that
        says why there is none.
    """
    geometry = geometry_of(model)
    if geometry is None:
        return []
    results = []
    for context, batch in QUICK_SIZES if quick else SIZES:
        for kv_format in kv_formats:
            k_codec, v_codec = KV_FORMATS[kv_format]
            shape = (batch * context, geometry.num_kv_heads, geometry.head_dim)
            num_bytes = k_codec.stored_bytes(*shape) + v_codec.stored_bytes(*shape)
            limit_s = num_bytes / limits.read_bytes_per_s
            size = (geometry, kv_format, context, batch)
            if num_bytes * geometry.num_layers > MOST_BYTES:
                continue
            ours = partial(_own_step, backend, model, *size)
            torchs = partial(_torch_step, backend.num_threads, *size)
            results.append(
                {
                    "context": context,
                    "batch": batch,
                    "kv_format": kv_format,
                    "kv_bytes": num_bytes,
                    "limit_s": limit_s,
                    "kvern": _measure(ours, geometry, limit_s, runs),
                    "torch": _measure(torchs, geometry, limit_s, runs),
                }
            )
    return results


def _measure(
    prepare: Callable[[], Callable[[], object]], geometry: Geometry, limit_s: float, runs: int
) -> dict[str, Any] | str:
    """Seconds per layer of what ``prepare`` returns, after one unmeasured step."""
    try:
        step = prepare()
        step()
    except (KvernError, ImportError, KeyError, ValueError) as error:
        return f"not measured: {' '.join(str(error).split())}"
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        step()
        seconds.append((time.perf_counter() - started) / geometry.num_layers)
    spread = spread_of(seconds)
    return {
        "seconds": {"median": spread.median, "low": spread.low, "high": spread.high},
        "share_of_limit": limit_s / spread.median,
    }


def _own_step(
    backend: Backend, model: ModelSpec, geometry: Geometry, kv_format: str, context: int, batch: int
) -> Callable[[], object]:
    """One decode step's attention over a filled pool."""
    rng = np.random.default_rng(0)
    per_sequence = blocks_for(context, BLOCK_SIZE)
    plan = make_kv_plan(
        model, kv_format, BLOCK_SIZE, num_blocks=1 + batch * per_sequence, max_num_seqs=batch
    )
    store = PagedStore(plan, max_num_batched_tokens=max(context, batch))
    order = rng.permutation(batch * per_sequence).astype(np.int32) + 1
    tables = order.reshape(batch, per_sequence)
    streams = [_streams(store, layer) for layer in range(geometry.num_layers)]
    _fill(backend, streams, tables, context, rng)
    lengths = np.full(batch, context, np.int32)
    step = AttendBatch(
        cu_seqlens_q=np.arange(batch + 1, dtype=np.int32),
        seq_lens=lengths,
        block_tables=tables,
        positions=lengths - 1,
        slot_mapping=np.zeros(batch, np.int64),
        seats=np.arange(batch, dtype=np.int32),
    )
    q = rng.standard_normal((batch, geometry.num_heads, geometry.head_dim), np.float32)
    out = np.empty_like(q)
    params = AttendParams(scale=geometry.head_dim**-0.5)

    def run() -> None:
        for keys, values in streams:
            backend.attend(q, keys, values, step, params, out)

    return run


def _streams(store: PagedStore, layer: int) -> tuple[PagedStream, PagedStream]:
    found = store.streams(layer)
    assert found is not None
    keys, values = found[1]
    return keys, values


def _fill(
    backend: Backend,
    streams: Sequence[tuple[PagedStream, PagedStream]],
    tables: np.ndarray[Any, np.dtype[np.int32]],
    context: int,
    rng: np.random.Generator,
) -> None:
    """Random keys and values in every slot of every layer."""
    slots = (tables[:, :, None].astype(np.int64) * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(
        len(tables), -1
    )[:, :context]
    for seat, sequence in enumerate(slots):
        rows = AttendBatch(
            cu_seqlens_q=np.array([0, context], np.int32),
            seq_lens=np.array([context], np.int32),
            block_tables=tables[seat : seat + 1],
            positions=np.arange(context, dtype=np.int32),
            slot_mapping=np.ascontiguousarray(sequence),
            seats=np.array([seat], np.int32),
        )
        x = rng.standard_normal((context, streams[0][0].num_heads, streams[0][0].dim), np.float32)
        for keys, values in streams:
            backend.append(x, keys, rows)
            backend.append(x, values, rows)


def _torch_step(
    threads: int, geometry: Geometry, kv_format: str, context: int, batch: int
) -> Callable[[], object]:
    """The same with torch's scaled_dot_product_attention."""
    import torch

    if kv_format not in TORCH_FORMATS:
        raise ValueError(f"torch has no attention over {kv_format}")
    torch.set_num_threads(threads)
    dtype = getattr(torch, TORCH_FORMATS[kv_format])
    shape = (batch, geometry.num_kv_heads, context, geometry.head_dim)
    layers = [
        (torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
        for _ in range(geometry.num_layers)
    ]
    q = torch.randn(batch, geometry.num_heads, 1, geometry.head_dim).to(dtype)
    attend = torch.nn.functional.scaled_dot_product_attention

    def run() -> None:
        with torch.inference_mode():
            for keys, values in layers:
                attend(q, keys, values, enable_gqa=True)

    return run
