"""Narrow streams on the reference backend: pages, open blocks and attention against the rule written out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.kernels.protocol import AttendBatch, AttendParams, PagedStream
from kvern.kernels.reference import ReferenceBackend
from kvern.kernels.reference_narrow import open_view
from kvern.kernels.reference_ops import visible
from kvern.spec.codec import BF16, INT8, Codec
from kvern.store.codecs import seal, unseal
from kvern.store.dtypes import decode, encode
from kvern.store.streams import OpenForm

F32 = npt.NDArray[np.float32]
HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 16, 8
MAX_ROWS, NUM_SEATS, NUM_BLOCKS = 96, 5, 120


def narrow_stream(dim: int, block_size: int, codec: Codec = INT8) -> PagedStream:
    """A stream of its own pages, all of them NaN; open pages and rows too."""
    size = codec.stored_bytes(block_size, KV_HEADS, dim)
    pages = np.full((NUM_BLOCKS, 12 + size), 0xFF, np.uint8)
    if codec.is_wide:
        return PagedStream(pages, 4, codec.dtype, KV_HEADS, block_size, dim)
    opened = np.full((NUM_SEATS, 6 + KV_HEADS * block_size * dim * 2), 0xFF, np.uint8)
    rows = np.full((MAX_ROWS, KV_HEADS, dim * 2), 0xFF, np.uint8)
    return PagedStream(
        pages, 4, codec.dtype, KV_HEADS, block_size, dim, codec, OpenForm(opened, 6, rows)
    )


@dataclass
class Cache:
    """Sequences that grow step by step, as an engine would plan them."""

    block_size: int
    keys: PagedStream
    values: PagedStream
    backend: ReferenceBackend = field(default_factory=ReferenceBackend)
    seats: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    k: list[F32] = field(default_factory=list)
    v: list[F32] = field(default_factory=list)
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS - 1, 0, -1)))

    def add(self, rng: np.random.Generator, total: int) -> None:
        """Another sequence of which `total` tokens will be computed."""
        self.seats.append((3 * len(self.seats) + 1) % NUM_SEATS)
        self.tables.append([])
        self.lengths.append(0)
        for rows, dim in ((self.k, KEY_DIM), (self.v, VALUE_DIM)):
            x = rng.normal(size=(total, KV_HEADS, dim)).astype(np.float32)
            rows.append(x * np.exp(rng.normal(size=(total, 1, 1)) * 2).astype(np.float32))

    def allowed(self, seq: int, wanted: int) -> int:
        """A chunk's length by the rule for open blocks."""
        start, size = self.lengths[seq], self.block_size
        border = (start + wanted) // size * size
        return border - start if start % size and border > start else wanted

    def step(self, chunks: list[tuple[int, int]], times: int = 1) -> AttendBatch:
        """Append (sequence, tokens) rows; the batch is ready to attend."""
        tables = np.zeros((len(chunks), 80), np.int32)
        positions = []
        for row, (seq, count) in enumerate(chunks):
            start, end = self.lengths[seq], self.lengths[seq] + count
            while len(self.tables[seq]) * self.block_size < end:
                self.tables[seq].append(self.free.pop())
            tables[row, : len(self.tables[seq])] = self.tables[seq]
            positions.append(np.arange(start, end))
            self.lengths[seq] = end
        position = np.concatenate(positions).astype(np.int32)
        row_of = np.repeat(np.arange(len(chunks)), [n for _, n in chunks])
        blocks = tables[row_of, position // self.block_size].astype(np.int64)
        batch = AttendBatch(
            np.cumsum([0, *(n for _, n in chunks)]).astype(np.int32),
            np.array([self.lengths[seq] for seq, _ in chunks], np.int32),
            tables,
            position,
            blocks * self.block_size + position % self.block_size,
            seats=np.array([self.seats[seq] for seq, _ in chunks], np.int32),
        )
        for rows, stream in ((self.k, self.keys), (self.v, self.values)):
            x = np.concatenate(
                [rows[s][p[0] : p[-1] + 1] for (s, _), p in zip(chunks, positions, strict=True)]
            )
            for _ in range(times):
                self.backend.append(x, stream, batch)
        return batch

    def stored(self, rows: F32, stream: PagedStream) -> F32:
        """What whole blocks of a sequence's rows become; the rest as computed."""
        found = decode(encode(rows, "bf16"), "bf16")
        size = self.block_size
        for start in range(0, len(rows) - size + 1, size):
            block = np.ascontiguousarray(found[start : start + size].transpose(1, 0, 2))
            form = stream.form if stream.open is not None else BF16
            found[start : start + size] = unseal(seal(block, form), form, block.shape).transpose(
                1, 0, 2
            )
        return found

    def expected(self, q: F32, seq: int, first: int, params: AttendParams) -> F32:
        """Attention of rows from position `first` on, one by one, in float64."""
        out = np.zeros((len(q), HEADS, VALUE_DIM))
        pairs = ((self.k[seq], self.keys), (self.v[seq], self.values))
        for row, position in enumerate(range(first, first + len(q))):
            own = position // self.block_size * self.block_size
            k, v = (
                np.concatenate(
                    (
                        self.stored(rows[:own], stream),
                        decode(encode(rows[own : position + 1], "bf16"), "bf16"),
                    )
                ).astype(np.float64)
                for rows, stream in pairs
            )
            seen = visible(np, np.array([position]), np.arange(position + 1), params)[0]
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                logits = (k[:, kv] @ q[row, head].astype(np.float64)) * params.scale
                if params.softcap is not None:
                    logits = params.softcap * np.tanh(logits / params.softcap)
                logits = np.where(seen, logits, -np.inf)
                sinks = [] if params.sink_logits is None else [params.sink_logits[head]]
                peak = max(logits.max(), *sinks) if sinks else logits.max()
                weights = np.exp(logits - peak)
                total = weights.sum() + sum(np.exp(sink - peak) for sink in sinks)
                out[row, head] = weights @ v[:, kv] / total
        return out.astype(np.float32)


def make(block_size: int, k_codec: Codec = INT8, v_codec: Codec = INT8) -> Cache:
    return Cache(
        block_size,
        narrow_stream(KEY_DIM, block_size, k_codec),
        narrow_stream(VALUE_DIM, block_size, v_codec),
    )


PARAMS = [
    AttendParams(0.2),
    AttendParams(0.2, window=5),
    AttendParams(0.2, window=20, num_sink_tokens=3),
    AttendParams(0.2, chunk=8),
    AttendParams(0.5, softcap=3.0),
    AttendParams(0.2, window=1, sink_logits=np.array([0.5, -1, 2, 0], np.float32)),
]


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
@pytest.mark.parametrize("codecs", [(INT8, INT8), (BF16, INT8), (INT8, BF16)], ids=["kv", "v", "k"])
@given(data=st.data())
@settings(max_examples=8)
def test_attention_is_the_rule_written_out(
    params: AttendParams, codecs: tuple[Codec, Codec], data: Any
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    cache = make(data.draw(st.sampled_from([1, 4, 16])), *codecs)
    totals = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    for total in totals:
        cache.add(rng, total)
    while any(done < total for done, total in zip(cache.lengths, totals, strict=True)):
        chunks = []
        for seq, total in enumerate(totals):
            left = total - cache.lengths[seq]
            if left:
                chunks.append((seq, cache.allowed(seq, data.draw(st.integers(1, min(left, 24))))))
        starts = {seq: cache.lengths[seq] for seq, _ in chunks}
        batch = cache.step(chunks)
        num_rows = int(batch.cu_seqlens_q[-1])
        q = rng.normal(size=(num_rows, HEADS, KEY_DIM)).astype(np.float32)
        out = np.full((num_rows, HEADS, VALUE_DIM), np.nan, np.float32)
        products = cache.backend.attend(q, cache.keys, cache.values, batch, params, out)
        count = 0
        for row, (seq, _) in enumerate(chunks):
            rows = slice(batch.cu_seqlens_q[row], batch.cu_seqlens_q[row + 1])
            wanted = cache.expected(q[rows], seq, starts[seq], params)
            np.testing.assert_allclose(out[rows], wanted, rtol=2e-4, atol=2e-4)
            position = batch.positions[rows]
            count += int(visible(np, position, np.arange(cache.lengths[seq]), params).sum())
        assert products == count


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_pages_are_the_same_for_every_chunking(block_size: int) -> None:
    found = []
    for sizes in ([80], [1] * 80, [7, 30, 43], [16] * 5, [15, 1, 33, 31]):
        cache = make(block_size)
        cache.add(np.random.default_rng(3), 80)
        left = 0
        for size in sizes:
            left += size
            while left:
                count = cache.allowed(0, left)
                cache.step([(0, count)], times=2)  # a step can be repeated
                left -= count
        whole = 80 // block_size
        found.append(
            [stream.pages[cache.tables[0][:whole]] for stream in (cache.keys, cache.values)]
        )
        rest = 80 % block_size
        opened = [open_view(s)[cache.seats[0], :, :rest] for s in (cache.keys, cache.values)]
        for x, rows in zip(opened, (cache.k[0], cache.v[0]), strict=True):
            np.testing.assert_array_equal(
                decode(x, "bf16"),
                decode(encode(rows[80 - rest :], "bf16"), "bf16").transpose(1, 0, 2),
            )
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_nothing_else_is_written() -> None:
    cache = make(16)
    rng = np.random.default_rng(0)
    cache.add(rng, 40)
    cache.add(rng, 40)
    cache.step([(0, 20), (1, 3)])
    keys = cache.keys
    assert keys.open is not None
    pages, opened = keys.pages.copy(), keys.open.pages.copy()
    cache.step([(0, 1), (1, 2)])
    np.testing.assert_array_equal(keys.pages, pages)  # no block is complete
    view = open_view(keys)
    old = np.lib.stride_tricks.as_strided(opened[:, 6:], view.shape, view.strides)
    changed = {(int(s), int(slot)) for s, _, slot, _ in np.argwhere(view != old)}
    assert changed == {(cache.seats[0], 4), (cache.seats[1], 3), (cache.seats[1], 4)}
    assert (keys.open.pages[:, :6] == 0xFF).all()
    cache.step([(0, 11), (1, 11)])
    written = np.flatnonzero((keys.pages != pages).any(axis=1)).tolist()
    assert written == sorted([cache.tables[0][1], cache.tables[1][0]])
    assert (keys.pages[:, :4] == 0xFF).all()


def test_a_chunk_that_would_overwrite_what_it_reads_is_refused() -> None:
    cache = make(16)
    cache.add(np.random.default_rng(0), 60)
    cache.step([(0, 8)])
    with pytest.raises(ValueError, match=r"positions 8\.\.19 begin inside a block of 16 tokens"):
        cache.step([(0, 12)])


def test_a_vector_that_is_not_finite_shows_once_it_is_sealed() -> None:
    cache = make(4)
    cache.add(np.random.default_rng(0), 9)
    cache.k[0][1, 0, 3] = np.nan
    batch = cache.step([(0, 8)])
    q = np.ones((8, HEADS, KEY_DIM), np.float32)
    out = np.zeros((8, HEADS, VALUE_DIM), np.float32)
    cache.backend.attend(q, cache.keys, cache.values, batch, AttendParams(0.2), out)
    assert np.isnan(out[1:, :2]).all()  # heads 0 and 1 read KV head 0
    assert np.isfinite(out[:, 2:]).all()
