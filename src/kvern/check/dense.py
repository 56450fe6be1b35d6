"""Forward passes without any cache, by the model's own weights: also deliberately wrong ones.

The pass shares matrix products, norms and rotations with the engine's backend, and nothing with its cache:
keys and values are plain arrays, attention is a few lines of numpy with an explicit mask. `Replay` says what
a pass does: with its default values the right thing, otherwise what a known fault would do. A fault is named
when its replay gives the logits that the engine gave.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import (
    F32,
    I32,
    I64,
    AttendBatch,
    AttendParams,
    Backend,
    PagedStream,
    Weight,
)
from kvern.models.decoder import Decoder, LayerCache
from kvern.models.workspace import Workspace
from kvern.store.dtypes import decode, encode

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


@dataclass(slots=True)
class _LayerKV:
    keys: F32
    values: F32


@dataclass(slots=True)
class _PassState:
    """What one pass knows and collects; keys and values are `[n, heads, dim]` per layer."""

    replay: Replay
    swapped: dict[int, _LayerKV] = field(default_factory=dict)
    collected: dict[int, _LayerKV] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Stream:
    """Stands where the decoder expects a paged stream."""

    layer: int
    is_key: bool
    dtype: str


class _DenseBackend:
    """A backend whose `append` and `attend` know no pages; everything else is the inner backend's."""

    def __init__(self, inner: Backend, state: _PassState) -> None:
        self._inner = inner
        self._state = state
        self._pending: F32 = np.empty(0, np.float32)

    def matmul(self, x: F32, weight: Weight, out: F32) -> None:
        self._inner.matmul(x, weight, out)

    def embed(self, weight: Weight, token_ids: I32, out: F32) -> None:
        self._inner.embed(weight, token_ids, out)

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32) -> None:
        self._inner.rms_norm(x, weight, eps, out)

    def rotary(self, x: F32, positions: I32, cos: F32, sin: F32, interleaved: bool) -> None:
        self._inner.rotary(x, positions, cos, sin, interleaved)

    def gated_activation(self, gate_up: F32, kind: str, out: F32) -> None:
        self._inner.gated_activation(gate_up, kind, out)

    def add(self, x: F32, y: F32) -> None:
        self._inner.add(x, y)

    def append(self, x: F32, stream: PagedStream, slot_mapping: I64) -> None:
        """Keep the rows, rounded as the pool would round them."""
        place = cast(_Stream, stream)
        rounded = decode(encode(x, place.dtype), place.dtype)
        if place.is_key:
            self._pending = rounded
        else:
            self._state.collected[place.layer] = _LayerKV(self._pending, rounded)

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
        layer, state = cast(_Stream, keys).layer, self._state
        own, swap = state.collected[layer], state.replay.swap
        seen = visible(state.replay, params)
        out[...] = _attention(q, own, seen, params)
        if swap is not None and swap.first_query < len(q):
            rows = slice(swap.first_query, None)
            mixed = _LayerKV(own.keys.copy(), own.values.copy())
            other = state.swapped.get(layer)
            for target, source in (
                (mixed.keys, None if other is None else other.keys),
                (mixed.values, None if other is None else other.values),
            ):
                count = swap.stop - swap.start
                target[swap.start : swap.stop] = (
                    0 if source is None else source[swap.source_start : swap.source_start + count]
                )
            out[rows] = _attention(q[rows], mixed, seen[rows], params)
        return int(seen.sum())


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


def _attention(q: F32, kv: _LayerKV, seen: Bool, params: AttendParams) -> F32:
    num_queries, num_heads, dim = q.shape
    num_kv_heads = kv.keys.shape[1]
    grouped = q.reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, dim)
    scores = np.einsum("qhgd,khd->hgqk", grouped, kv.keys, optimize=True) * np.float32(params.scale)
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
    out = np.einsum("hgqk,khd->qhgd", weights / total, kv.values, optimize=True)
    result: F32 = out.reshape(num_queries, num_heads, -1).astype(np.float32)
    return result


class DensePass:
    """Runs replays on one model."""

    def __init__(self, decoder: Decoder, dtypes: list[tuple[str, str]]) -> None:
        """Args: decoder: untouched; dtypes: stored dtype of keys and of values per layer."""
        self._decoder = decoder
        self._dtypes = dtypes
        self._known: dict[tuple[int, ...], dict[int, _LayerKV]] = {}

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

    def _content_of(self, tokens: tuple[int, ...]) -> dict[int, _LayerKV]:
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
        rope = np.array(replay.rope or range(count), np.int32)
        batch = AttendBatch(
            np.array([0, count], np.int32),
            np.array([count], np.int32),
            np.zeros((1, 1), np.int32),
            rope,
            np.zeros(count, np.int64),
        )
        cache: list[Any] = [
            LayerCache(
                cast(PagedStream, _Stream(index, True, key_dtype)),
                cast(PagedStream, _Stream(index, False, value_dtype)),
                0,
            )
            for index, (key_dtype, value_dtype) in enumerate(self._dtypes)
        ]
        workspace = Workspace(decoder.config, count)
        hidden, _ = decoder.forward(np.array(replay.tokens, np.int32), [batch], cache, workspace)
        return hidden


def restarted(replay: Replay, rope: npt.NDArray[np.int64], *, masks_too: bool) -> Replay:
    """The replay with rows rotated to other positions, and perhaps masked by them."""
    positions = tuple(int(p) for p in rope)
    return replace(replay, rope=positions, mask_end=positions if masks_too else ())
