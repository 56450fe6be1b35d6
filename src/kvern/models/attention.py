"""Attention over keys and values per head: MHA, GQA, MQA, with whatever a family adds to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import AttendBatch, AttendParams, Backend, PagedStream, Weight
from kvern.models.config import LayerConfig
from kvern.models.rope import RopeTable
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


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What a layer's mixer works with in one step, beside its input and output.

    Attributes:
        views: the layer's buffers, as many rows as the step has tokens.
        batch: the rows, positions and block tables of the layer's KV group.
        cache: where the layer's keys and values, or its states, lie.
        num_positions: one more than the last position of the step.
    """

    views: LayerBuffers
    batch: AttendBatch
    cache: LayerCache
    num_positions: int


@dataclass(slots=True)
class AttentionWeights:
    """q, k and v are stacked; with a gate the gate's rows come last."""

    qkv: Weight
    qkv_bias: F32 | None
    output: Weight
    output_bias: F32 | None
    q_norm: F32 | None = None
    k_norm: F32 | None = None
    v_norm: F32 | None = None
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

    def run(self, backend: Backend, x: F32, out: F32, step: LayerStep) -> int:
        """``out [T, hidden]`` for the normed input ``x [T, hidden]``; also appends to the cache.

        Returns:
            Query-key products per head.
        """
        weights, layer, views, batch = self.weights, self.layer, step.views, step.batch
        backend.matmul(x, weights.qkv, views.qkv)
        if weights.qkv_bias is not None:
            backend.add_bias(views.qkv, weights.qkv_bias)
        keys, values = step.cache.keys, step.cache.values
        assert keys is not None
        assert values is not None
        if layer.share_with is None:
            v = self._normed_values(backend, views) if layer.has_value_norm else views.v
            backend.append(v, values, batch)
            self._turn(backend, views.k, weights.k_norm, step)
            backend.append(views.k, keys, batch)
        self._turn(backend, views.q, weights.q_norm, step)
        if layer.query_temperature is not None:
            backend.scale_by_position(views.q, batch.positions, *layer.query_temperature)
        products = backend.attend(views.q, keys, values, batch, self.params, views.attended)
        if layer.has_gate:
            rows = views.attended_rows
            backend.gate(views.extra["gate"], "sigmoid", rows, rows)
        backend.matmul(views.attended_rows, weights.output, out)
        if weights.output_bias is not None:
            backend.add_bias(out, weights.output_bias)
        return products

    def _turn(self, backend: Backend, x: F32, weight: F32 | None, step: LayerStep) -> None:
        """Norm and rotate queries or keys as the layer has it, in place."""
        layer = self.layer
        if layer.qk_norm is not None and layer.qk_norm != "unit":
            self._norm(backend, x, weight)
        if self.rope is not None and layer.rope is not None:
            rows, cos, sin = self.rope.of_step(step.batch, step.num_positions)
            backend.rotary(x, rows, cos, sin, layer.rope.interleaved)
        if layer.qk_norm == "unit":
            self._norm(backend, x, weight)

    def _norm(self, backend: Backend, x: F32, weight: F32 | None) -> None:
        """Norm heads in place; a weight as long as all heads norms a token's heads together."""
        assert weight is not None
        heads = x.reshape(len(x), -1, len(weight))  # a view: a token's heads lie side by side
        backend.norm(heads, weight, None, self.weights.norm_eps, False, heads)

    def _normed_values(self, backend: Backend, views: LayerBuffers) -> F32:
        """A normed copy of the values, which may be the keys before their norm."""
        weight = self.weights.v_norm
        assert weight is not None
        out = views.extra["v_normed"].reshape(views.v.shape)
        backend.norm(views.v, weight, None, self.weights.norm_eps, False, out)
        return out
