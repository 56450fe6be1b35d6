"""Native recurrences: right, and the same bits for every chunking, batch, number of threads and page size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from kvern.kernels.family_protocol import DeltaShape, ScanShape, ScanVectors, StatePlace
from kvern.kernels.native import NativeBackend
from kvern.kernels.protocol import AttendBatch, Backend
from kvern.kernels.reference import ReferenceBackend
from kvern.store.dtypes import STORED_BYTES

from .native_cases import PATHS

pytestmark = pytest.mark.usefixtures("require_native")

F32 = np.ndarray
LENGTHS = (13, 1, 6)
"""Tokens of the sequences."""


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(0, 1, shape).astype(np.float32)


@dataclass(frozen=True)
class Mixer:
    """One recurrence with random weights: ``run(backend, inputs of rows, state, batch, out)``."""

    shape: tuple[int, ...]
    width: int
    inputs: int
    run: Callable[[Backend, np.ndarray, StatePlace, AttendBatch, np.ndarray], None]


def delta(key_heads: int, heads: int, key_dim: int, value_dim: int) -> Mixer:
    rng = np.random.default_rng(1)
    shape = DeltaShape(key_heads, heads, key_dim, value_dim)
    decay, bias = -np.exp(numbers(rng, heads)), numbers(rng, heads)
    channels = 2 * key_heads * key_dim + heads * value_dim

    def run(backend: Backend, x: F32, state: StatePlace, batch: AttendBatch, out: F32) -> None:
        gates = x[:, channels:]
        backend.gated_delta_rule(x[:, :channels], gates, decay, bias, shape, state, batch, out)

    size = (heads, key_dim, value_dim)
    return Mixer(size, heads * value_dim, channels + 2 * heads, run)


def scan(heads: int, groups: int, head_dim: int, state_dim: int) -> Mixer:
    rng = np.random.default_rng(2)
    shape = ScanShape(heads, groups, head_dim, state_dim, (0.01, 0.9))
    vectors = ScanVectors(-np.exp(numbers(rng, heads)), numbers(rng, heads), numbers(rng, heads))
    channels = heads * head_dim + 2 * groups * state_dim

    def run(backend: Backend, x: F32, state: StatePlace, batch: AttendBatch, out: F32) -> None:
        steps = x[:, channels:]
        backend.selective_scan(x[:, :channels], steps, vectors, shape, state, batch, out)

    return Mixer((heads, head_dim, state_dim), heads * head_dim, channels + heads, run)


def convolution(channels: int, taps: int, has_bias: bool) -> Mixer:
    rng = np.random.default_rng(3)
    weight, bias = numbers(rng, taps, channels), numbers(rng, channels) if has_bias else None

    def run(backend: Backend, x: F32, state: StatePlace, batch: AttendBatch, out: F32) -> None:
        backend.convolve(x, weight, bias, has_bias, state, batch, out)

    return Mixer((channels, taps - 1), channels, channels, run)


MIXERS = {
    "delta": delta(2, 4, 32, 48),
    "delta-odd": delta(1, 3, 17, 40),
    "delta-wide": delta(2, 2, 128, 128),
    "scan": scan(4, 2, 40, 32),
    "scan-odd": scan(3, 1, 24, 21),
    "convolution": convolution(200, 4, True),
    "convolution-odd": convolution(37, 3, False),
}


class Entries:
    """States of all sequences in pages that hold NaN elsewhere, at scattered places."""

    def __init__(self, mixer: Mixer, dtype: str, page_bytes: int) -> None:
        offset = 12
        size = int(np.prod(mixer.shape)) * STORED_BYTES[dtype]
        count = -(-(offset + size) // page_bytes)
        total = len(LENGTHS) * count
        pages = np.full((1 + total, page_bytes), 0xFF, np.uint8)
        ids = 1 + np.random.default_rng(0).permutation(total).astype(np.int32)
        self.tables = ids.reshape(len(LENGTHS), count)
        self.place = StatePlace(pages, offset, size, dtype, mixer.shape)
        for seq, table in enumerate(self.tables):
            start = numbers(np.random.default_rng(seq), *mixer.shape)
            self.place.write(table, start)
        self.kept = pages.copy()

    def batch(self, rows: Sequence[tuple[int, int]]) -> AttendBatch:
        """Of (sequence, number of tokens)."""
        counts = [n for _, n in rows]
        cu = np.cumsum([0, *counts]).astype(np.int32)
        tables = self.tables[[seq for seq, _ in rows]]
        positions = np.zeros(cu[-1], np.int32)
        return AttendBatch(cu, np.array(counts, np.int32), tables, positions, positions.astype(int))


Result = tuple[list[np.ndarray], list[np.ndarray]]


def run_steps(
    backend: Backend,
    mixer: Mixer,
    dtype: str,
    steps: Sequence[Sequence[tuple[int, int]]],
    page_bytes: int = 1000,
) -> Result:
    """Every sequence's outputs and last state, computed step by step."""
    entries = Entries(mixer, dtype, page_bytes)
    inputs = [
        numbers(np.random.default_rng((9, seq)), n, mixer.inputs) for seq, n in enumerate(LENGTHS)
    ]
    done, outs = [0] * len(LENGTHS), [[] for _ in LENGTHS]  # type: ignore[var-annotated]
    for rows in steps:
        x = np.concatenate([inputs[seq][done[seq] : done[seq] + n] for seq, n in rows])
        out = np.full((len(x), mixer.width + 3), np.nan, np.float32)[:, 3:]
        mixer.run(backend, x, entries.place, entries.batch(rows), out)
        first = 0
        for seq, n in rows:
            outs[seq].append(out[first : first + n].copy())
            done[seq] += n
            first += n
    assert done == list(LENGTHS)
    pages = entries.place.pages
    assert (pages[0] == entries.kept[0]).all()  # the null page, and what lies beside the states
    assert (pages[entries.tables[:, 0], :12] == 0xFF).all()
    states = [entries.place.read(table) for table in entries.tables]
    return [np.concatenate(rows) for rows in outs], states


TOGETHER = [[(0, 13), (1, 1), (2, 6)]]
SCHEDULES = [
    [[(0, 13)], [(1, 1)], [(2, 6)]],
    [[(2, 1), (0, 5)], [(0, 1), (1, 1), (2, 2)], [(2, 3)], [(0, 7)]],
    [[(0, 1)] for _ in range(13)] + [[(1, 1), (2, 1)]] + [[(2, 1)] for _ in range(5)],
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", sorted(MIXERS))
def test_bits_do_not_depend_on_chunks_batch_threads_or_pages(
    name: str, dtype: str, path: str
) -> None:
    mixer = MIXERS[name]
    expected = run_steps(NativeBackend(1, path), mixer, dtype, TOGETHER)
    others = [
        run_steps(NativeBackend(threads, path), mixer, dtype, steps, page_bytes)
        for threads, steps, page_bytes in [
            (2, TOGETHER, 1000),
            (3, SCHEDULES[0], 64),
            (8, SCHEDULES[1], 1 << 20),
            (2, SCHEDULES[2], 1004),
            (1, SCHEDULES[1], 4098),
        ]
    ]
    for other in others:
        for ours, theirs in zip(expected[0] + expected[1], other[0] + other[1], strict=True):
            assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", sorted(MIXERS))
def test_agrees_with_the_reference(name: str, path: str) -> None:
    mixer = MIXERS[name]
    ours = run_steps(NativeBackend(2, path), mixer, "fp32", TOGETHER)
    theirs = run_steps(ReferenceBackend(), mixer, "fp32", TOGETHER)
    for mine, other in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        assert np.abs(mine - other).max() <= 2e-6 * max(1.0, np.abs(other).max())


def test_the_delta_rule_agrees_with_float64() -> None:
    rng = np.random.default_rng(4)
    tokens, heads, dim = 40, 3, 64
    shape = DeltaShape(heads, heads, dim, dim)
    qkv, gates = numbers(rng, tokens, 3 * heads * dim), numbers(rng, tokens, 2 * heads)
    decay, bias = -np.exp(numbers(rng, heads)), numbers(rng, heads)
    pages = np.zeros((2, heads * dim * dim * 4), np.uint8)
    place = StatePlace(pages, 0, pages.shape[1], "fp32", (heads, dim, dim))
    table, zeros = np.array([[1]], np.int32), np.zeros(tokens, np.int32)
    cu, length = np.array([0, tokens], np.int32), np.array([tokens], np.int32)
    out = np.empty((tokens, heads * dim), np.float32)
    batch = AttendBatch(cu, length, table, zeros, zeros.astype(np.int64))
    NativeBackend(2).gated_delta_rule(qkv, gates, decay, bias, shape, place, batch, out)

    q, k, v = np.split(qkv.astype(np.float64).reshape(tokens, 3 * heads, dim), 3, axis=1)
    q /= np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6) * np.sqrt(dim)
    k /= np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
    beta = 1 / (1 + np.exp(-gates[:, :heads].astype(np.float64)))
    kept = np.exp(np.log1p(np.exp(gates[:, heads:].astype(np.float64) + bias)) * decay)
    state = np.zeros((heads, dim, dim))
    for t in range(tokens):
        state *= kept[t, :, None, None]
        update = (v[t] - np.einsum("hkv,hk->hv", state, k[t])) * beta[t, :, None]
        state += k[t, :, :, None] * update[:, None, :]
        expected = np.einsum("hkv,hk->hv", state, q[t]).reshape(-1)
        assert np.abs(out[t] - expected).max() <= 2e-6


def test_what_does_not_fit_is_refused() -> None:
    mixer = MIXERS["convolution-odd"]
    entries, backend = Entries(mixer, "fp32", 1000), NativeBackend(1)
    x, out = np.ones((2, 37), np.float32), np.ones((2, 37), np.float32)
    batch = entries.batch([(0, 2)])
    batch.block_tables[0, 0] = 0
    with pytest.raises(ValueError, match="page 0 of a state lies outside pages 1 to"):
        mixer.run(backend, x, entries.place, batch, out)
    batch = entries.batch([(0, 1)])
    with pytest.raises(ValueError, match="cu_seqlens_q runs from 0 to 1, expected 0 to 2"):
        mixer.run(backend, x, entries.place, batch, out)
    wrong = StatePlace(entries.place.pages, 0, 40, "fp32", (10,))
    with pytest.raises(ValueError, match="a state of 40 bytes at 0, expected 296 bytes"):
        mixer.run(backend, x, wrong, entries.batch([(0, 2)]), out)
