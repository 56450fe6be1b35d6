"""The reference operations against a plain dense calculation in float64, on numpy and on torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.batches import slots_batch

from kvern.kernels.protocol import AttendBatch, AttendParams, Backend, PagedStream
from kvern.kernels.reference import ReferenceBackend
from kvern.kernels.reference_ops import merge_states
from kvern.store.dtypes import STORED_BYTES, decode, encode


def backends() -> list[Backend]:
    found: list[Backend] = [ReferenceBackend()]
    try:
        from kvern.kernels.torch_backend import TorchBackend
    except ImportError:
        return found
    return [*found, TorchBackend()]


BACKENDS = backends()


def dense_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, first_position: int, params: AttendParams
) -> np.ndarray:
    """One query, one head, one visible key at a time; nothing shared with the code under test."""
    group = q.shape[1] // k.shape[1]
    out = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    for row in range(q.shape[0]):
        position = first_position + row
        keys = [
            p
            for p in range(position + 1)
            if (params.window is None or p > position - params.window or p < params.num_sink_tokens)
            and (params.chunk is None or p >= position // params.chunk * params.chunk)
        ]
        for head in range(q.shape[1]):
            logits = np.array([q[row, head] @ k[p, head // group] for p in keys]) * params.scale
            if params.softcap is not None:
                logits = params.softcap * np.tanh(logits / params.softcap)
            if params.sink_logits is not None:
                logits = np.append(logits, params.sink_logits[head])
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            out[row, head] = sum(
                w * v[p, head // group] for w, p in zip(weights[: len(keys)], keys, strict=True)
            )
    return out


def paged_case(
    rng: np.random.Generator,
    lengths: list[tuple[int, int]],
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    dtype: str,
) -> tuple[AttendBatch, PagedStream, PagedStream, list[np.ndarray], list[np.ndarray]]:
    """A slab full of NaN in which only the slots of the sequences (cached, new) hold numbers."""
    num_blocks = 1 + sum(-(-(c + n) // block_size) for c, n in lengths)
    size = STORED_BYTES[dtype]
    k_bytes = kv_heads * block_size * key_dim * size
    v_bytes = kv_heads * block_size * value_dim * size
    pages = np.full((num_blocks, k_bytes + v_bytes + 16), 0xFF, np.uint8)
    keys = PagedStream(pages, 8, dtype, kv_heads, block_size, key_dim)
    values = PagedStream(pages, 8 + k_bytes, dtype, kv_heads, block_size, value_dim)
    free = rng.permutation(np.arange(1, num_blocks)).tolist()
    width = max(-(-(c + n) // block_size) for c, n in lengths)
    tables = np.zeros((len(lengths), width), np.int32)
    backend, ks, vs, slots, positions = ReferenceBackend(), [], [], [], []
    for seq, (cached, new) in enumerate(lengths):
        total = cached + new
        for index in range(-(-total // block_size)):
            tables[seq, index] = free.pop()
        token = np.arange(total)
        slot = tables[seq][token // block_size].astype(np.int64) * block_size + token % block_size
        k = rng.normal(size=(total, kv_heads, key_dim)).astype(np.float32)
        v = rng.normal(size=(total, kv_heads, value_dim)).astype(np.float32)
        backend.append(k, keys, slots_batch(slot))
        backend.append(v, values, slots_batch(slot))
        ks.append(decode(encode(k, dtype), dtype))
        vs.append(decode(encode(v, dtype), dtype))
        slots.append(slot[cached:])
        positions.append(token[cached:])
    batch = AttendBatch(
        cu_seqlens_q=np.cumsum([0, *(n for _, n in lengths)]).astype(np.int32),
        seq_lens=np.array([c + n for c, n in lengths], np.int32),
        block_tables=tables,
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.concatenate(slots),
    )
    return batch, keys, values, ks, vs


PARAMS = [
    AttendParams(0.3),
    AttendParams(0.3, window=5),
    AttendParams(0.3, window=3, num_sink_tokens=2),
    AttendParams(0.3, chunk=4),
    AttendParams(2.0, softcap=3.0),
    AttendParams(0.3, window=1, sink_logits=np.array([0.5, -1, 2, 0, 1, -3], np.float32)),
]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
@given(data=st.data())
@settings(max_examples=12)
def test_attend_equals_dense_attention(backend: Backend, params: AttendParams, data: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    lengths = data.draw(
        st.lists(st.tuples(st.integers(0, 11), st.integers(1, 9)), min_size=1, max_size=4)
    )
    block_size = data.draw(st.sampled_from([1, 2, 4, 16]))
    dtype = data.draw(st.sampled_from(sorted(STORED_BYTES)))
    kv_heads = data.draw(st.sampled_from([1, 2, 3, 6]))
    batch, keys, values, ks, vs = paged_case(rng, lengths, kv_heads, 8, 5, block_size, dtype)
    num_rows = int(batch.cu_seqlens_q[-1])
    q = rng.normal(size=(num_rows, 6, 8)).astype(np.float32)
    out = np.full((num_rows, 6, 5), np.nan, np.float32)
    products = backend.attend(q, keys, values, batch, params, out)
    expected, pairs = [], 0
    for seq, (cached, new) in enumerate(lengths):
        rows = slice(batch.cu_seqlens_q[seq], batch.cu_seqlens_q[seq + 1])
        expected.append(dense_attention(q[rows], ks[seq], vs[seq], cached, params))
        for p in range(cached, cached + new):
            window = range(max(0, p - (params.window or p + 1) + 1), p + 1)
            low = p // params.chunk * params.chunk if params.chunk else 0
            pairs += (
                len(set(window) | set(range(min(params.num_sink_tokens, p + 1))))
                if not low
                else (p + 1 - low)
            )
    np.testing.assert_allclose(out, np.concatenate(expected), rtol=2e-5, atol=2e-6)
    assert products == pairs


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_each_pair_by_its_angle(backend: Backend, interleaved: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 2, 10)).astype(np.float32)
    angles = rng.normal(size=(20, 4))
    positions = np.array([7, 0, 19], np.int32)
    got = x.copy()
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    backend.rotary(got, positions, cos, sin, interleaved)
    for row in range(3):
        for pair in range(4):
            i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 4)
            turn = np.exp(1j * angles[positions[row], pair])
            z = (x[row, :, i] + 1j * x[row, :, j]) * turn
            np.testing.assert_allclose(got[row, :, i], z.real, atol=1e-6)
            np.testing.assert_allclose(got[row, :, j], z.imag, atol=1e-6)
    np.testing.assert_array_equal(got[:, :, 8:], x[:, :, 8:])


def test_merge_states_equals_one_softmax_also_with_an_empty_part() -> None:
    rng = np.random.default_rng(1)
    logits, values = rng.normal(size=(4, 12)) * 20, rng.normal(size=(12, 3))
    parts = [slice(0, 5), slice(5, 5), slice(5, 12)]
    outs, maxima, sums = [], [], []
    for part in parts:
        piece = logits[:, part]
        peak = piece.max(axis=1) if piece.size else np.full(4, -math.inf)
        weights = np.exp(piece - peak[:, None]) if piece.size else np.zeros((4, 0))
        sums.append(weights.sum(axis=1))
        outs.append(weights @ values[part] / np.maximum(sums[-1], 1e-300)[:, None])
        maxima.append(peak)
    merged, lse = merge_states(np, np.array(outs), np.array(maxima), np.array(sums))
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    np.testing.assert_allclose(merged, weights @ values / weights.sum(1, keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(lse, logits.max(1) + np.log(weights.sum(1)), rtol=1e-12)


def test_gelu_kinds_and_silu() -> None:
    x = np.linspace(-6, 6, 41, dtype=np.float32)
    gate_up = np.stack([np.concatenate([x, np.ones_like(x)])])
    exact = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()]
    for backend in BACKENDS:
        out = np.empty((1, 41), np.float32)
        backend.gated_activation(gate_up, "gelu", out)
        np.testing.assert_allclose(out[0], exact, atol=1e-6)
        backend.gated_activation(gate_up, "gelu_tanh", out)
        np.testing.assert_allclose(out[0], exact, atol=1e-3)
        backend.gated_activation(gate_up, "silu", out)
        np.testing.assert_allclose(out[0], x / (1 + np.exp(-x.astype(float))), atol=1e-6)
