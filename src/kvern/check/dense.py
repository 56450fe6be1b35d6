"""Forward passes without any cache, by the model's own weights: also deliberately wrong ones.

The pass shares matrix products, norms and rotations with the engine's backend, and nothing with its cache:
keys and values are plain arrays, attention is a few lines of numpy with an explicit mask. In narrow formats
a row sees its own block as computed and earlier blocks rounded to their stored form. `Replay` says what a
pass does: with its default values the right thing, otherwise what a known fault would do. A fault is named
when its replay gives the logits that the engine gave.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import F32, AttendBatch, AttendParams, Backend, PagedStream
from kvern.models.attention import LayerCache
from kvern.models.decoder import Decoder
from kvern.models.workspace import Workspace
from kvern.spec.codec import Codec
from kvern.spec.pages import state_offsets
from kvern.store.codecs import seal, unseal
from kvern.store.dtypes import decode, encode
from kvern.store.pool import PagedStore
from kvern.store.streams import OPEN_DTYPE

Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Swap:
    """From some query on, a run of positions holds another run's keys and values.

    Attributes:
        first_query: rows from here on see the swapped content, rows before it the right one.
        start: first position that is wrong.
        stop: position after the last that is wrong.
        source: token ids of the other run; None: zeros, as in memory that nobody has written.
        source_start: the other run's position whose content lies at ``start``.
    """

    first_query: int
    start: int
    stop: int
    source: tuple[int, ...] | None
    source_start: int = 0


@dataclass(frozen=True, slots=True)
class Replay:
    """One pass over ``tokens``; rows are their indices.

    Attributes:
        tokens: token ids.
        rope: the position that each row is rotated to; empty: its index.
        mask_end: the last index that each row sees; empty: its own.
        mask_start: the first index that each row sees; empty: 0.
        swap: what has been exchanged; None: nothing.
    """

    tokens: tuple[int, ...]
    rope: tuple[int, ...] = ()
    mask_end: tuple[int, ...] = ()
    mask_start: tuple[int, ...] = ()
    swap: Swap | None = None


@dataclass(frozen=True, slots=True)
class _Stream:
    """Stands where the decoder expects a paged stream; `place` tells streams apart."""

    place: tuple[int, int]
    codec: Codec
    block_size: int

    @property
    def open_dtype(self) -> str:
        """What rows are rounded to when they are appended."""
        return self.codec.dtype if self.codec.is_wide else OPEN_DTYPE

    def sealed(self, rows: F32) -> F32:
        """Rows ``[n, heads, dim]`` as whole blocks of them are stored; the last, incomplete one as it is."""
        if self.codec.is_wide:
            return rows
        stored, size = rows.copy(), self.block_size
        for start in range(0, len(rows) - size + 1, size):
            block = np.ascontiguousarray(rows[start : start + size].transpose(1, 0, 2))
            values = unseal(seal(block, self.codec), self.codec, block.shape)
            stored[start : start + size] = values.transpose(1, 0, 2)
        return stored


@dataclass(slots=True)
class _PassState:
    """What one pass knows and collects: rows ``[n, heads, dim]`` per stream."""

    replay: Replay
    swapped: dict[_Stream, F32] = field(default_factory=dict)
    collected: dict[_Stream, F32] = field(default_factory=dict)

    def rows(self, stream: _Stream, *, is_swapped: bool = False) -> F32:
        """A stream's rows as right rows see them, or as rows behind the swap do."""
        own, swap = self.collected[stream], self.replay.swap
        if not is_swapped or swap is None:
            return own
        mixed = own.copy()
        if swap.source is None:
            mixed[swap.start : swap.stop] = 0
        else:
            stop = swap.source_start + swap.stop - swap.start
            mixed[swap.start : swap.stop] = self.swapped[stream][swap.source_start : stop]
        return mixed


class _DenseBackend:
    """A backend whose `append` and `attend` know no pages; everything else is the inner backend's."""

    def __init__(self, inner: Backend, state: _PassState) -> None:
        self._inner = inner
        self._state = state

    def __getattr__(self, name: str) -> Any:
        """Row-wise operations that the inner backend may have beside those below."""
        return getattr(self._inner, name)

    def append(self, x: F32, stream: PagedStream, batch: AttendBatch) -> None:
        """Keep the rows, rounded as the pool would round them while their block is open."""
        place = cast(_Stream, stream)
        self._state.collected[place] = decode(encode(x, place.open_dtype), place.open_dtype)

    def attend(
        self,
        q: F32,
        keys: PagedStream,
        values: PagedStream,
        batch: AttendBatch,
        params: AttendParams,
        out: F32,
    ) -> int:
        """Attention over plain arrays, once more with the swapped content for the rows that see it."""
        streams, swap = (cast(_Stream, keys), cast(_Stream, values)), self._state.replay.swap
        seen = visible(self._state.replay, params)
        forms = by_form(self._state.replay, seen, streams)
        out[...] = _attention(q, *self._both_forms(streams), forms, params)
        if swap is not None and swap.first_query < len(q):
            rows = slice(swap.first_query, None)
            both = self._both_forms(streams, is_swapped=True)
            out[rows] = _attention(q[rows], *both, forms[rows], params)
        return int(seen.sum())

    def _both_forms(
        self, streams: tuple[_Stream, _Stream], *, is_swapped: bool = False
    ) -> tuple[F32, F32]:
        """Keys and values as computed, and behind them, where one is narrow, once more as they are stored."""
        own = [self._state.rows(stream, is_swapped=is_swapped) for stream in streams]
        if all(stream.codec.is_wide for stream in streams):
            return own[0], own[1]
        pairs = zip(streams, own, strict=True)
        keys, values = (np.concatenate((rows, stream.sealed(rows))) for stream, rows in pairs)
        return keys, values


def visible(replay: Replay, params: AttendParams) -> Bool:
    """Boolean ``[n, n]``: which index each row sees."""
    index = np.arange(len(replay.tokens))
    end = np.array(replay.mask_end) if replay.mask_end else index
    start = np.array(replay.mask_start) if replay.mask_start else np.zeros_like(index)
    key = index[None, :]
    seen = (key <= end[:, None]) & (key >= start[:, None])
    if params.window is not None:
        inside = (key > end[:, None] - params.window) | (key < params.num_sink_tokens)
        seen &= inside
    if params.chunk is not None:
        seen &= key >= end[:, None] // params.chunk * params.chunk
    return seen


def by_form(replay: Replay, seen: Bool, streams: tuple[_Stream, _Stream]) -> Bool:
    """Which rows of `_both_forms` each row sees: its own block as computed, earlier ones as stored.

    Args:
        replay: where each row's mask ends, and with it its own block.
        seen: what `visible` says, ``[n, n]``.
        streams: keys and values.

    Returns:
        ``seen``, or ``[n, 2 n]`` where one of the streams is narrow.
    """
    if all(stream.codec.is_wide for stream in streams):
        return seen
    index, size = np.arange(len(seen)), streams[0].block_size
    end = np.array(replay.mask_end) if replay.mask_end else index
    is_own = index[None, :] >= end[:, None] // size * size
    return np.concatenate((seen & is_own, seen & ~is_own), axis=1)


def _attention(q: F32, keys: F32, values: F32, seen: Bool, params: AttendParams) -> F32:
    num_queries, num_heads, dim = q.shape
    num_kv_heads = keys.shape[1]
    grouped = q.reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, dim)
    scores = np.einsum("qhgd,khd->hgqk", grouped, keys, optimize=True) * np.float32(params.scale)
    if params.softcap is not None:
        scores = params.softcap * np.tanh(scores / params.softcap)
    scores = np.where(seen[None, None], scores, -np.inf)
    peak = scores.max(axis=-1, keepdims=True)
    if params.sink_logits is not None:
        sinks = params.sink_logits.reshape(num_kv_heads, -1, 1, 1)
        peak = np.maximum(peak, sinks)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    if params.sink_logits is not None:
        total = total + np.exp(sinks - peak)
    out = np.einsum("hgqk,khd->qhgd", weights / total, values, optimize=True)
    result: F32 = out.reshape(num_queries, num_heads, -1).astype(np.float32)
    return result


class DensePass:
    """Runs replays on one model."""

    def __init__(self, decoder: Decoder, store: PagedStore) -> None:
        """Args: decoder: untouched; store: tells which layers share a stream, and the stored forms."""
        self._decoder = decoder
        self._store = store
        self._known: dict[tuple[int, ...], dict[_Stream, F32]] = {}

    def logits(self, replay: Replay, rows: list[int]) -> F32:
        """Logits ``[len(rows), vocab_size]`` of the given rows."""
        state = _PassState(replay)
        swap = replay.swap
        if swap is not None and swap.source is not None:
            state.swapped = self._content_of(swap.source)
        hidden = self._forward(state)
        out = np.empty((len(rows), self._decoder.config.vocab_size), np.float32)
        self._decoder.logits(np.ascontiguousarray(hidden[rows]), out)
        return out

    def _content_of(self, tokens: tuple[int, ...]) -> dict[_Stream, F32]:
        """Keys and values of another run, computed the right way."""
        found = self._known.get(tokens)
        if found is None:
            state = _PassState(Replay(tokens))
            self._forward(state)
            found = self._known[tokens] = state.collected
        return found

    def _forward(self, state: _PassState) -> F32:
        replay, count = state.replay, len(state.replay.tokens)
        decoder = copy.copy(self._decoder)
        decoder.backend = cast(Backend, _DenseBackend(self._decoder.backend, state))
        batch = AttendBatch(
            np.array([0, count], np.int32),
            np.array([count], np.int32),
            np.arange(1, self._entry_pages + 1, dtype=np.int32)[None],
            np.array(replay.rope or range(count), np.int32),
            np.zeros(count, np.int64),
        )
        regimes = decoder.config.regimes
        if regimes is not None and count > regimes.border:
            batch.regimes = np.full(count, regimes.of(count), np.int32)
        workspace = Workspace(decoder.config, count)
        tokens = np.array(replay.tokens, np.int32)
        hidden, _ = decoder.forward(tokens, [batch], self._cache(), workspace)
        return hidden

    def _cache(self) -> list[LayerCache]:
        """Stand-ins for streams; fresh zeros for states, which begin at the first token anyway."""
        plan = self._store.plan
        states = {
            layer: LayerCache.of_state(
                0, np.zeros((self._entry_pages + 1, plan.page_bytes), np.uint8), parts
            )
            for group in plan.groups
            if group.is_state
            for layer, parts in state_offsets(group).items()
        }
        cache = []
        for layer in range(len(self._decoder.config.layers)):
            found = self._store.streams(layer)
            if layer in states:
                cache.append(states[layer])
            elif found is None:
                cache.append(LayerCache.none())
            else:
                group, streams = found
                stand_ins = tuple(cast(PagedStream, _stand_in(group, stream)) for stream in streams)
                cache.append(LayerCache.of(0, stand_ins))
        return cache

    @property
    def _entry_pages(self) -> int:
        return max(group.pages_per_entry for group in self._store.plan.groups)


def _stand_in(group: int, stream: PagedStream) -> _Stream:
    return _Stream((group, stream.offset), stream.form, stream.block_size)
