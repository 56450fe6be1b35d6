"""Recurrent states: the same bits wherever a chunk ends, and pages that give back what they took."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvern.kernels.reference_state import (
    causal_convolution,
    gated_delta_rule,
    rounded,
    selective_scan,
)
from kvern.models.states import LayerState
from kvern.spec.content import StatePart
from kvern.spec.pages import StateOffset

Recurrence = Callable[..., tuple[np.ndarray, np.ndarray]]
TOKENS = 9


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def moved(x: np.ndarray) -> np.ndarray:
    """A copy at another place relative to a cache line."""
    place = np.empty(x.size + 5, np.float32)[5:].reshape(x.shape)
    place[...] = x
    return place


def recurrences() -> Iterator[tuple[str, Recurrence, list[np.ndarray], np.ndarray]]:
    gates = [1 / (1 + np.exp(-numbers(TOKENS, 4, seed=seed))) for seed in (1, 2)]
    qkv = [numbers(TOKENS, 4, dim, seed=dim) for dim in (16, 16, 24)]
    yield "delta", gated_delta_rule, [*qkv, *gates], numbers(4, 16, 24)
    xbc = [numbers(TOKENS, 4, dim, seed=dim) for dim in (24, 129, 129)]
    yield "mamba", selective_scan, [xbc[0], *gates, *xbc[1:]], numbers(4, 24, 129)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["delta", "mamba"])
def test_a_recurrence_has_the_same_bits_in_every_chunking(name: str, dtype: str) -> None:
    run, inputs, start = next(r[1:] for r in recurrences() if r[0] == name)
    start = rounded(start, dtype)
    whole, last = run(*inputs, start, dtype)
    assert np.array_equal(rounded(last, dtype), last)
    for chunks in ([1] * TOKENS, [4, 5], [2, 1, 6]):
        state, begin = start, 0
        for size in chunks:
            part = [moved(x[begin : begin + size]) for x in inputs]
            out, state = run(*part, moved(state), dtype)
            assert np.array_equal(out, whole[begin : begin + size])
            begin += size
        assert np.array_equal(state, last)


def test_the_delta_rule_is_its_formula() -> None:
    _, run, (q, k, v, decay, beta), state = next(recurrences())
    out, last = run(q, k, v, decay, beta, state, "fp32")
    wide = state.astype(np.float64)
    for t in range(TOKENS):
        for head in range(4):
            s = wide[head] * decay[t, head]
            s = s + np.outer(k[t, head], (v[t, head] - k[t, head] @ s) * beta[t, head])
            wide[head] = s
            assert np.allclose(out[t, head], q[t, head] @ s, rtol=1e-3, atol=1e-2)
    assert np.allclose(last, wide, rtol=1e-3, atol=1e-2)


def test_a_convolution_is_its_formula_in_every_chunking() -> None:
    x, weight, bias = numbers(TOKENS, 6), numbers(6, 4, seed=3), numbers(6, seed=4)
    padded = np.concatenate([np.zeros((3, 6), np.float32), x])
    expected = np.stack([(padded[t : t + 4] * weight.T).sum(0) + bias for t in range(TOKENS)])
    tail, rows = np.zeros((6, 3), np.float32), []
    for part in np.split(x, [1, 2, 6]):
        out, tail = causal_convolution(part, tail, weight, bias)
        rows.append(out)
    whole, last = causal_convolution(x, np.zeros((6, 3), np.float32), weight, bias)
    assert np.array_equal(np.concatenate(rows), whole)
    assert np.array_equal(tail, last)
    assert np.allclose(whole, expected, atol=1e-5)


def test_pages_give_back_what_they_took() -> None:
    parts = (StatePart("conv", (6, 3), "bf16"), StatePart("recurrent", (2, 5, 7), "fp32"))
    offsets = (StateOffset(0, parts[0], 11, 36), StateOffset(0, parts[1], 47, 280))
    pages = np.full((9, 100), 0xAA, np.uint8)
    state = LayerState(pages, offsets)
    ids = np.array([7, 2, 8, 4], np.int32)
    conv, matrix = rounded(numbers(6, 3), "bf16"), numbers(2, 5, 7)
    state.write("recurrent", ids, matrix)
    state.write("conv", ids, conv)
    assert np.array_equal(state.read("conv", ids), conv)
    assert np.array_equal(state.read("recurrent", ids), matrix)
    entry = pages[ids].reshape(-1)
    assert (entry[:11] == 0xAA).all()
    assert (entry[327:] == 0xAA).all()
    assert (pages[[0, 1, 3, 5, 6]] == 0xAA).all()
