"""Sealing a block and reading it back: the definition that every kernel's bytes are compared with."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.spec.codec import BF16, FP32, INT8, KV_FORMATS, STORED_CODECS, Codec, stored_formats
from kvern.store.codecs import SEALED_FORMS, seal, unseal

F32 = npt.NDArray[np.float32]


def in_bf16(x: npt.NDArray[np.generic]) -> F32:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def scales_of(data: npt.NDArray[np.uint8], heads: int, tokens: int, dim: int) -> F32:
    _, region = INT8.regions(tokens, heads, dim)
    part = data[region.offset : region.offset + region.num_bytes]
    return part.view(np.float32).reshape(heads, tokens)


@given(
    heads=st.integers(1, 4),
    tokens=st.integers(1, 9),
    dim=st.sampled_from([1, 3, 16, 64]),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-30, 30),
)
@settings(max_examples=60)
def test_int8_is_off_by_half_a_step_at_most(heads, tokens, dim, seed, exponent) -> None:
    rng = np.random.default_rng(seed)
    x = in_bf16(np.ldexp(rng.normal(size=(heads, tokens, dim)), exponent))
    data = seal(x, INT8)
    assert len(data) == INT8.stored_bytes(tokens, heads, dim)
    got = unseal(data, INT8, x.shape)
    largest = np.abs(x).max(axis=-1)
    scale = scales_of(data, heads, tokens, dim)
    np.testing.assert_array_equal(scale, largest / np.float32(127))
    assert (np.abs(got - x) <= 0.5001 * scale[..., None]).all()
    codes = data[: x.size].view(np.int8).reshape(x.shape)
    assert (np.abs(codes).max(axis=-1)[largest > 0] == 127).all()
    # every vector on its own: blocks of one token have the same codes
    for token in range(tokens):
        alone = unseal(seal(x[:, token : token + 1], INT8), INT8, (heads, 1, dim))
        np.testing.assert_array_equal(alone, got[:, token : token + 1])


def test_ties_round_to_the_even_code() -> None:
    x = np.array([[[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 0.0]]], np.float32)
    codes = seal(in_bf16(x), INT8)[:8].view(np.int8)
    assert codes.tolist() == [127, 0, 2, 2, 0, -2, 126, 0]


@pytest.mark.parametrize("value", [0.0, 2.0**-101, 1e-38, 1e-40])
def test_what_is_too_small_is_zero(value: float) -> None:
    x = np.full((1, 2, 4), value, np.float32)
    x[0, 1] = 1.0
    data = seal(x, INT8)
    assert scales_of(data, 1, 2, 4)[0, 0] == 0
    assert not unseal(data, INT8, (1, 2, 4))[0, 0].any()
    smallest = np.full((1, 1, 4), 2.0**-100, np.float32)
    np.testing.assert_allclose(unseal(seal(smallest, INT8), INT8, (1, 1, 4)), smallest, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_by_whoever_reads_it(value: float) -> None:
    x = np.ones((2, 3, 4), np.float32)
    x[1, 2, 0] = value
    got = unseal(seal(x, INT8), INT8, (2, 3, 4))
    assert np.isnan(got[1, 2]).all()
    assert (np.delete(got.reshape(6, 4), 5, axis=0) == 1).all()


@pytest.mark.parametrize("codec", [FP32, BF16])
def test_wide_blocks_are_stored_as_they_are(codec: Codec) -> None:
    x = in_bf16(np.random.default_rng(0).normal(size=(2, 4, 8)))
    data = seal(x, codec)
    assert len(data) == codec.stored_bytes(4, 2, 8)
    np.testing.assert_array_equal(unseal(np.stack([data, data]), codec, (2, 4, 8))[1], x)


def test_every_stored_codec_has_its_functions() -> None:
    assert {codec for codec in STORED_CODECS if not codec.is_wide} == set(SEALED_FORMS)
    assert stored_formats() == ("fp32", "fp16", "bf16", "int8")
    assert set(KV_FORMATS) > set(stored_formats())
