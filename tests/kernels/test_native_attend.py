"""Attention of the native backend against float64, on every kernel path."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.batches import slots_batch

from kvern.kernels.native import NativeBackend
from kvern.kernels.protocol import AttendParams

from .native_cases import (
    PATHS,
    ROUNDING_PATHS,
    STREAM_DTYPES,
    Shape,
    attend,
    attend_reference,
    build_cache,
)

pytestmark = pytest.mark.usefixtures("require_native")


def tolerance(path: str, dtype: str, magnitude: float) -> float:
    """The stated error against float64 for values of order 1 (and keys of the given magnitude).

    With float32 arithmetic only sums round. Beside bf16 keys and values the amx and avx512 paths
    round queries and probabilities to bf16: 2^-9 of a logit (of order `magnitude`) and of a probability.
    """
    if path in ROUNDING_PATHS and dtype == "bf16":
        return 0.012 * max(1.0, magnitude)
    return 1e-5 * max(1.0, magnitude)


def check(path: str, shape: Shape, threads: int = 2) -> None:
    backend = NativeBackend(threads, path)
    out = attend(backend, shape)
    expected = attend_reference(shape, build_cache(backend, shape))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(
        out, expected, rtol=0, atol=tolerance(path, shape.dtype, shape.magnitude)
    )


@st.composite
def shapes(draw: Any) -> Shape:
    border = draw(st.sampled_from([1, 16, 64, 256]))
    lengths, q_lengths = [], []
    for _ in range(draw(st.integers(1, 3))):
        length = max(1, border * draw(st.integers(1, 2)) + draw(st.integers(-2, 2)))
        lengths.append(length)
        q_lengths.append(draw(st.sampled_from([1, min(3, length), min(70, length)])))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    key_dim = draw(st.sampled_from([64, 80, 96, 128, 256, 7]))
    params = AttendParams(
        scale=key_dim**-0.5,
        window=draw(st.sampled_from([None, None, 1, 30, 64, 100])),
        chunk=draw(st.sampled_from([None, None, 48, 64])),
        num_sink_tokens=draw(st.sampled_from([0, 0, 1, 4, 70])),
        softcap=draw(st.sampled_from([None, None, 5.0])),
    )
    heads = kv_heads * draw(st.sampled_from([1, 3, 4, 7]))
    if draw(st.booleans()):
        params = dataclasses.replace(
            params, sink_logits=np.linspace(-2, 3, heads, dtype=np.float32)
        )
    return Shape(
        lengths=tuple(lengths),
        q_lengths=tuple(q_lengths),
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=draw(st.sampled_from([key_dim, 64, 33])),
        dtype=draw(st.sampled_from(list(STREAM_DTYPES))),
        block_size=draw(st.sampled_from([1, 4, 16, 32, 40])),
        magnitude=draw(st.sampled_from([1.0, 1.0, 8.0])),
        seed=draw(st.integers(0, 9)),
        params=params,
    )


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40)
@given(shape=shapes())
def test_random_shapes(path: str, shape: Shape) -> None:
    check(path, shape)


@pytest.mark.full
@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=600)
@given(shape=shapes(), threads=st.sampled_from([1, 2, 3, 8]))
def test_many_random_shapes(path: str, shape: Shape, threads: int) -> None:
    check(path, shape, threads)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("heads", [1, 2, 127, 128, 130])
def test_any_number_of_heads(path: str, heads: int) -> None:
    check(path, Shape(lengths=(70,), q_lengths=(2,), heads=heads, kv_heads=1))
    check(path, Shape(lengths=(70,), q_lengths=(2,), heads=heads, kv_heads=heads, dtype="fp16"))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", list(STREAM_DTYPES))
def test_long_context_split_over_units(path: str, dtype: str) -> None:
    check(path, Shape(lengths=(2100, 5), q_lengths=(1, 1), dtype=dtype))
    check(path, Shape(lengths=(1500,), q_lengths=(9,), dtype=dtype))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", list(STREAM_DTYPES))
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (30, 30, 33), (64, 64, 16)])
def test_heads_that_meet_a_tile_together_get_what_heads_alone_get(
    path: str, dtype: str, heads: int, kv_heads: int, dim: int
) -> None:
    """One thread takes several KV heads of these three units at once, eight take every head apart."""
    for params in (
        AttendParams(scale=0.125),
        AttendParams(scale=0.125, window=300, num_sink_tokens=5),
        AttendParams(scale=0.125, chunk=600, softcap=5.0),
    ):
        shape = Shape((530,), (1,), heads, kv_heads, dim, dim, dtype, params=params)
        check(path, shape, 1)
        together, apart = (attend(NativeBackend(threads, path), shape) for threads in (1, 8))
        assert together.tobytes() == apart.tobytes()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", list(STREAM_DTYPES))
def test_large_logits(path: str, dtype: str) -> None:
    """Logits of some thousands: one key takes nearly all; nothing overflows."""
    backend = NativeBackend(2, path)
    shape = Shape(lengths=(300,), q_lengths=(40,), dtype=dtype, magnitude=1000.0)
    out = attend(backend, shape)
    assert np.isfinite(out).all()
    if path not in ROUNDING_PATHS or dtype != "bf16":
        expected = attend_reference(shape, build_cache(backend, shape))
        np.testing.assert_allclose(out, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", list(STREAM_DTYPES))
def test_a_later_token_of_the_chunk_cannot_spoil_an_earlier_one(path: str, dtype: str) -> None:
    """Infinite keys and NaN values past a query's position change no bit of it."""
    backend = NativeBackend(2, path)
    shape = Shape(lengths=(150,), q_lengths=(150,), dtype=dtype)
    clean = attend(backend, shape)
    cache = build_cache(backend, shape)
    block = cache.batch.block_tables[0][75 // 16]
    slots = np.array([block * 16 + 75 % 16], np.int64)
    backend.append(np.full((1, 3, 64), np.inf, np.float32), cache.keys, slots_batch(slots))
    backend.append(np.full((1, 3, 64), np.nan, np.float32), cache.values, slots_batch(slots))
    out = np.empty_like(clean)
    backend.attend(cache.q, cache.keys, cache.values, cache.batch, shape.params, out)
    assert out[:75].tobytes() == clean[:75].tobytes()
    assert np.isnan(out[75:]).all()


@pytest.mark.parametrize("path", PATHS)
def test_strided_queries_and_results(path: str) -> None:
    """Queries and results may be views into wider rows."""
    backend = NativeBackend(2, path)
    shape = Shape(lengths=(90, 20), q_lengths=(5, 1))
    cache = build_cache(backend, shape)
    plain = attend(backend, shape)
    wide_q = np.zeros((6, 15, 64), np.float32)
    wide_q[:, :9] = cache.q
    wide_out = np.full((6, 12, 64), 7, np.float32)
    backend.attend(
        wide_q[:, :9], cache.keys, cache.values, cache.batch, shape.params, wide_out[:, 3:]
    )
    assert wide_out[:, 3:].tobytes() == plain.tobytes()
    assert (wide_out[:, :3] == 7).all()


@pytest.mark.parametrize("path", PATHS)
def test_a_visible_key_without_a_block_is_refused(path: str) -> None:
    backend = NativeBackend(2, path)
    shape = Shape(lengths=(90,), q_lengths=(1,))
    cache = build_cache(backend, shape)
    out = np.empty((1, 9, 64), np.float32)
    for bad in (0, len(cache.keys.pages), -1):
        cache.batch.block_tables[0, 2] = bad
        with pytest.raises(ValueError, match="names no valid block"):
            backend.attend(cache.q, cache.keys, cache.values, cache.batch, shape.params, out)
