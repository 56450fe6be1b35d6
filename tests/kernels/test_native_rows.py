"""Norms, rotary embedding, append, activations and sums of the native backend."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.batches import slots_batch

from kvern.kernels.native import NativeBackend
from kvern.kernels.protocol import PagedStream

from .native_cases import PATHS, STREAM_DTYPES

pytestmark = [pytest.mark.usefixtures("require_native"), pytest.mark.parametrize("path", PATHS)]


@settings(max_examples=30)
@given(rows=st.integers(1, 40), cols=st.integers(1, 700), seed=st.integers(0, 9))
def test_rms_norm(path: str, rows: int, cols: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, cols)) * 10.0 ** rng.uniform(-3, 3, (rows, 1))).astype(
        np.float32
    )
    weight = rng.standard_normal(cols).astype(np.float32)
    out = np.full_like(x, np.nan)
    NativeBackend(2, path).rms_norm(x, weight, 1e-6, out)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=0)


@settings(max_examples=30)
@given(
    tokens=st.integers(1, 9),
    heads=st.integers(1, 5),
    half=st.sampled_from([1, 4, 16, 20, 32]),
    extra=st.sampled_from([0, 6]),
    interleaved=st.booleans(),
)
def test_rotary(
    path: str, tokens: int, heads: int, half: int, extra: int, interleaved: bool
) -> None:
    rng = np.random.default_rng(heads)
    angles = rng.uniform(-3, 3, (30, half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    dim = 2 * half + extra
    row = rng.standard_normal((tokens, heads * dim + 11)).astype(np.float32)
    positions = rng.integers(0, 30, tokens).astype(np.int32)
    before = row.copy()
    x = row[:, : heads * dim].reshape(tokens, heads, dim) if tokens == 1 else None
    view = (
        np.lib.stride_tricks.as_strided(row, (tokens, heads, dim), (row.strides[0], dim * 4, 4))
        if x is None
        else x
    )
    NativeBackend(2, path).rotary(view, positions, cos, sin, interleaved)
    expected = before[:, : heads * dim].reshape(tokens, heads, dim).astype(np.float64)
    low = np.arange(half) * (2 if interleaved else 1)
    high = low + (1 if interleaved else half)
    a, b = expected[..., low].copy(), expected[..., high].copy()
    c, s = cos[positions][:, None].astype(np.float64), sin[positions][:, None].astype(np.float64)
    expected[..., low], expected[..., high] = a * c - b * s, b * c + a * s
    np.testing.assert_allclose(view, expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(row[:, heads * dim :], before[:, heads * dim :])


@pytest.mark.parametrize("dtype", list(STREAM_DTYPES))
@pytest.mark.parametrize("dim", [3, 16, 64, 70])
def test_append_rounds_to_nearest_even_at_the_right_place(path: str, dtype: str, dim: int) -> None:
    rng = np.random.default_rng(dim)
    x = (rng.standard_normal((200, 2, dim)) * 10.0 ** rng.uniform(-9, 6, (200, 1, 1))).astype(
        np.float32
    )
    x[0, 0, :3] = [np.nan, np.inf, -np.inf]
    x[1, 0, :3] = [0.0, -0.0, 1e-42]
    x[2, 0, :3] = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 65520.0]  # ties, and fp16's first infinity
    block_size = 16
    width = STREAM_DTYPES[dtype].itemsize
    pages = np.full((40, 8 + 2 * block_size * dim * width), 0xAB, np.uint8)
    stream = PagedStream(pages, 8, dtype, 2, block_size, dim)
    slots = (rng.permutation(39 * block_size)[:200] + block_size).astype(np.int64)
    NativeBackend(2, path).append(x, stream, slots_batch(slots))
    body = pages[:, 8:].reshape(40, 2, block_size, dim * width)
    stored = body[slots // block_size, :, slots % block_size]
    with np.errstate(over="ignore"):
        expected = x.astype(STREAM_DTYPES[dtype])
    same = stored == expected.view(np.uint8).reshape(stored.shape)
    same[0, 0, :width] = True  # a NaN's payload is free
    assert same.all()
    assert np.isnan(stored[0, 0, :width].copy().view(STREAM_DTYPES[dtype]).astype(np.float32)).all()
    untouched = np.ones((40, block_size), bool)
    untouched[slots // block_size, slots % block_size] = False
    assert (body.transpose(0, 2, 1, 3)[untouched] == 0xAB).all()
    assert (pages[:, :8] == 0xAB).all()


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_gated_activation(path: str, kind: str) -> None:
    rng = np.random.default_rng(0)
    gate = np.concatenate(
        [rng.standard_normal(500) * 3, np.linspace(-90, 90, 101), [0.0, 1e-20, -1e-20]]
    )
    gate_up = np.stack([gate, rng.standard_normal(len(gate))]).astype(np.float32).reshape(1, -1)
    out = np.empty((1, len(gate)), np.float32)
    NativeBackend(1, path).gated_activation(gate_up, kind, out)
    g, u = gate_up[0, : len(gate)].astype(np.float64), gate_up[0, len(gate) :].astype(np.float64)
    if kind == "silu":
        expected = g / (1 + np.exp(-g)) * u
    elif kind == "gelu":
        expected = np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in g]) * u
    else:
        expected = 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u
    np.testing.assert_allclose(
        out[0], expected, rtol=2e-5 if kind == "gelu_tanh" else 3e-6, atol=1e-7
    )


def test_add(path: str) -> None:
    rng = np.random.default_rng(0)
    for rows, cols in ((1, 1), (3, 17), (70, 576)):
        x, y = rng.standard_normal((2, rows, cols)).astype(np.float32)
        expected = x + y
        NativeBackend(2, path).add(x, y)
        np.testing.assert_array_equal(x, expected)
