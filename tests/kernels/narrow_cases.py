"""Steps over int8 keys and values on a backend, and the same in float64 from what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from kvern.kernels.protocol import AttendBatch, AttendParams, Backend, PagedStream
from kvern.spec.codec import INT8
from kvern.store.codecs import seal, unseal
from kvern.store.streams import OpenForm

from .native_cases import visible


@dataclass(frozen=True)
class Geometry:
    """Heads and dims; `latent`: one stream serves as keys and values."""

    heads: int = 9
    kv_heads: int = 3
    key_dim: int = 64
    value_dim: int = 64
    block_size: int = 16
    latent: bool = False
    params: AttendParams = field(default_factory=lambda: AttendParams(scale=0.125))


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a sequence with a block table and a seat."""

    sequence: int
    start: int
    stop: int
    seat: int
    table: np.ndarray


class Tokens:
    """A sequence's queries, keys and values, the same whatever else there is."""

    def __init__(self, geometry: Geometry, seed: int, length: int, magnitude: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        g = geometry
        self.k = rng.standard_normal((length, g.kv_heads, g.key_dim)).astype(
            np.float32
        ) * np.float32(magnitude)
        self.v = rng.standard_normal((length, g.kv_heads, g.value_dim)).astype(np.float32)
        self.q = rng.standard_normal((length, g.heads, g.key_dim)).astype(np.float32)
        if g.latent:
            self.v = self.k


class NarrowStore:
    """Pages, open pages and row buffers that hold NaN until written."""

    def __init__(
        self, backend: Backend, geometry: Geometry, num_blocks: int, num_seats: int, max_rows: int
    ) -> None:
        self.backend, self.geometry = backend, geometry
        g = geometry
        dims = (g.key_dim,) if g.latent else (g.key_dim, g.value_dim)
        sizes = [INT8.stored_bytes(g.block_size, g.kv_heads, dim) for dim in dims]
        opens = [g.kv_heads * g.block_size * dim * 2 for dim in dims]
        self.pages = np.full((num_blocks, 8 + sum(sizes)), 0xFF, np.uint8)
        self.open_pages = np.full((num_seats, 6 + sum(opens)), 0xFF, np.uint8)
        streams = []
        for i, dim in enumerate(dims):
            rows = np.full((max_rows, g.kv_heads, 2 * dim), 0xFF, np.uint8)
            form = OpenForm(self.open_pages, 6 + sum(opens[:i]), rows)
            streams.append(
                PagedStream(
                    self.pages,
                    8 + sum(sizes[:i]),
                    "int8",
                    g.kv_heads,
                    g.block_size,
                    dim,
                    INT8,
                    form,
                )
            )
        self.keys, self.values = streams[0], streams[-1]

    def batch(self, chunks: Sequence[Chunk]) -> AttendBatch:
        """The step's batch."""
        counts = [chunk.stop - chunk.start for chunk in chunks]
        positions = np.concatenate([np.arange(c.start, c.stop) for c in chunks]).astype(np.int32)
        width = max(len(c.table) for c in chunks)
        tables = np.array([np.pad(c.table, (0, width - len(c.table))) for c in chunks], np.int32)
        return AttendBatch(
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            np.array([c.stop for c in chunks], np.int32),
            tables,
            positions,
            np.zeros(len(positions), np.int64),
            seats=np.array([c.seat for c in chunks], np.int32),
        )

    def append(self, chunks: Sequence[Chunk], tokens: Sequence[Tokens]) -> AttendBatch:
        """Append the chunks' keys and values."""
        batch = self.batch(chunks)
        k, v = (
            np.concatenate([getattr(tokens[c.sequence], name)[c.start : c.stop] for c in chunks])
            for name in "kv"
        )
        self.backend.append(k, self.keys, batch)
        if not self.geometry.latent:
            self.backend.append(v, self.values, batch)
        return batch

    def step(self, chunks: Sequence[Chunk], tokens: Sequence[Tokens]) -> list[np.ndarray]:
        """Append and attend; the results of each chunk."""
        batch = self.append(chunks, tokens)
        q = np.concatenate([tokens[c.sequence].q[c.start : c.stop] for c in chunks])
        g = self.geometry
        out = np.full((len(q), g.heads, self.values.dim), np.nan, np.float32)
        pairs = self.backend.attend(q, self.keys, self.values, batch, g.params, out)
        assert pairs == sum(int(visible(g.params, int(p)).sum()) for p in batch.positions)
        return np.split(out, batch.cu_seqlens_q[1:-1])


def tables_of(lengths: Sequence[int], block_size: int, seed: int) -> tuple[list[np.ndarray], int]:
    """Scattered blocks for every sequence, and the number of blocks there are."""
    counts = [-(-n // block_size) for n in lengths]
    ids = np.random.default_rng(seed).permutation(sum(counts)).astype(np.int32) + 1
    return np.split(ids, np.cumsum(counts)[:-1]), sum(counts) + 1


def legal_stop(start: int, stop: int, block_size: int) -> int:
    """The last end up to `stop` that a chunk from `start` may have."""
    if (
        start % block_size == 0
        or stop % block_size == 0
        or start // block_size == stop // block_size
    ):
        return stop
    return stop // block_size * block_size


def run_alone(
    backend: Backend, geometry: Geometry, tokens: Tokens, borders: Sequence[int], seed: int = 0
) -> np.ndarray:
    """One sequence, chunk by chunk; chunks that would end inside a later block are cut at its border."""
    length = len(tokens.k)
    (table,), num_blocks = tables_of([length], geometry.block_size, seed)
    store = NarrowStore(backend, geometry, num_blocks, 2, length)
    outs, start = [], 0
    for border in [*borders, length]:
        while start < border:
            stop = legal_stop(start, border, geometry.block_size)
            outs += store.step([Chunk(0, start, stop, 1, table)], [tokens])
            start = stop
    return np.concatenate(outs)


def _as_read(x: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Float64 ``[n, heads, dim]`` as computed (bf16) and as stored, whole blocks only."""
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    whole = len(x) // block_size * block_size
    shape = (x.shape[1], whole, x.shape[2])
    stored = unseal(seal(np.ascontiguousarray(rounded[:whole].swapaxes(0, 1)), INT8), INT8, shape)
    return rounded.astype(np.float64), stored.swapaxes(0, 1).astype(np.float64)


def attend_reference(geometry: Geometry, tokens: Tokens) -> np.ndarray:
    """Every position's result in float64: its own block as computed, earlier ones as stored."""
    g, params = geometry, geometry.params
    (k_open, k_stored), (v_open, v_stored) = (
        _as_read(x, g.block_size) for x in (tokens.k, tokens.v)
    )
    out = np.zeros((len(tokens.k), g.heads, tokens.v.shape[2]))
    for p in range(len(tokens.k)):
        own = p // g.block_size * g.block_size
        sees = visible(params, p)
        k, v = (
            np.repeat(
                np.concatenate([stored[:own], full[own : p + 1]])[sees],
                g.heads // g.kv_heads,
                axis=1,
            )
            for full, stored in ((k_open, k_stored), (v_open, v_stored))
        )
        logits = np.einsum("nhd,hd->hn", k, tokens.q[p].astype(np.float64)) * params.scale
        if params.softcap:
            logits = params.softcap * np.tanh(logits / params.softcap)
        if params.sink_logits is not None:
            logits = np.concatenate([logits, params.sink_logits[:, None]], axis=1)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[p] = np.einsum("hn,nhd->hd", weights[:, : len(k)], v)
    return out
