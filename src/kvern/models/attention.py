"""Attention over keys and values per head: MHA, GQA, MQA, with whatever a family adds to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import AttendBatch, AttendParams, Backend, PagedStream, Weight
from kvern.models.config import LayerConfig
from kvern.models.rope import RopeTable
from kvern.models.rowwise import sigmoid
from kvern.models.states import LayerState
from kvern.models.workspace import LayerBuffers
from kvern.spec.pages import StateOffset

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where one layer's keys and values lie, and which of the step's batches (KV groups) it reads.

    A layer of latent attention has its one stream in `keys`, and no `values`. A layer with a
    recurrent state has that instead, and one without attention has nothing.
    """

    keys: PagedStream | None
    values: PagedStream | None
    group: int
    state: LayerState | None = None

    @classmethod
    def of(cls, group: int, streams: tuple[PagedStream, ...]) -> LayerCache:
        """From a layer's streams in page order: (keys, values) or (latent,)."""
        return cls(streams[0], streams[1] if len(streams) > 1 else None, group)

    @classmethod
    def of_state(
        cls, group: int, pages: npt.NDArray[np.uint8], parts: tuple[StateOffset, ...]
    ) -> LayerCache:
        """From the slab and the layer's `kvern.spec.pages.state_offsets`.

        The group's batch has the pages of each sequence's entry as its block table.
        """
        return cls(None, None, group, LayerState(pages, parts))

    @classmethod
    def none(cls) -> LayerCache:
        """For a layer that leaves nothing behind."""
        return cls(None, None, 0)


@dataclass(slots=True)
class AttentionWeights:
    """q, k and v are stacked; with a gate the gate's rows come last."""

    qkv: Weight
    qkv_bias: F32 | None
    output: Weight
    output_bias: F32 | None
    q_norm: F32 | None = None
    k_norm: F32 | None = None
    norm_eps: float = 1e-6


class HeadsAttention:
    """One layer's attention with its weights."""

    def __init__(
        self,
        layer: LayerConfig,
        weights: AttentionWeights,
        params: AttendParams,
        rope: RopeTable | None,
    ) -> None:
        """Args: params: what `Backend.attend` is told; rope: None for no rotation."""
        self.layer = layer
        self.weights = weights
        self.params = params
        self.rope = rope
        self._q_shape = (-1, layer.num_heads, layer.key_dim)
        self._k_shape = (-1, layer.num_kv_heads, layer.key_dim)

    def run(
        self,
        backend: Backend,
        x: F32,
        out: F32,
        views: LayerBuffers,
        batch: AttendBatch,
        cache: LayerCache,
        num_positions: int,
    ) -> int:
        """``out [T, hidden]`` for the normed input ``x [T, hidden]``; also appends to the cache.

        Returns:
            Query-key products per head.
        """
        weights, layer = self.weights, self.layer
        backend.matmul(x, weights.qkv, views.qkv)
        if weights.qkv_bias is not None:
            views.qkv[...] += weights.qkv_bias
        q, k = views.q, views.k
        if layer.qk_norm is not None and layer.qk_norm != "unit":
            q, k = self._normed(backend, q, k, views)
        if self.rope is not None and layer.rope is not None:
            cos, sin = self.rope.cover(num_positions)
            backend.rotary(q, batch.positions, cos, sin, layer.rope.interleaved)
            backend.rotary(k, batch.positions, cos, sin, layer.rope.interleaved)
        if layer.qk_norm == "unit":
            q, k = self._normed(backend, q, k, views)
        if layer.query_temperature is not None:
            q *= _temperatures(batch.positions, *layer.query_temperature)
        keys, values = cache.keys, cache.values
        assert keys is not None
        assert values is not None
        backend.append(k, keys, batch.slot_mapping)
        backend.append(views.v, values, batch.slot_mapping)
        products = backend.attend(q, keys, values, batch, self.params, views.attended)
        if layer.has_gate:
            views.attended_rows[...] *= sigmoid(views.extra["gate"])
        backend.matmul(views.attended_rows, weights.output, out)
        if weights.output_bias is not None:
            out += weights.output_bias
        return products

    def _normed(self, backend: Backend, q: F32, k: F32, views: LayerBuffers) -> tuple[F32, F32]:
        """Normed copies; ``all`` norms a token's heads together, else each head alone."""
        assert self.weights.q_norm is not None
        assert self.weights.k_norm is not None
        normed = []
        for x, weight, name in ((q, self.weights.q_norm, "q"), (k, self.weights.k_norm, "k")):
            source = views.extra[name].reshape(x.shape)
            target = views.extra[name + "_normed"]
            np.copyto(source, x)
            rows = (-1, len(weight))
            backend.rms_norm(
                source.reshape(rows), weight, self.weights.norm_eps, target.reshape(rows)
            )
            normed.append(target.reshape(x.shape))
        return normed[0], normed[1]


def _temperatures(positions: npt.NDArray[np.int32], floor: float, factor: float) -> F32:
    """``[T, 1, 1]``; see `LayerConfig.query_temperature`."""
    steps = np.floor((positions.astype(np.float32) + np.float32(1)) / np.float32(floor))
    factors: F32 = np.log1p(steps) * np.float32(factor) + np.float32(1)
    return factors[:, None, None]
