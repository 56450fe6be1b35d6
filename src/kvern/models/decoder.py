"""The one decoder that every family shares: embed, then per layer attention and feed-forward, then norm.

It asks a `Backend` for every operation, passes preallocated outputs, and reads keys and values only through
the cache: also those it has just computed, so that a token's result cannot depend on where a chunk began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import (
    AttendBatch,
    AttendParams,
    Backend,
    HostTensor,
    PagedStream,
    Weight,
)
from kvern.models.config import DecoderConfig, Family, LayerConfig, RopeConfig
from kvern.models.rope import RopeTable
from kvern.models.weights import WeightSource
from kvern.models.workspace import LayerBuffers, StepBuffers, Workspace

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

LayerTrace = Callable[[int, F32], None]
"""Called with (layer, hidden ``[T, hidden_size]``) after each layer; must not keep the array."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's prepared weights; q, k, v are stacked, and so are gate and up."""

    attention_norm: F32
    qkv: Weight
    qkv_bias: F32 | None
    output: Weight
    output_bias: F32 | None
    mlp_norm: F32
    gate_up: Weight
    gate_up_bias: F32 | None
    down: Weight
    down_bias: F32 | None


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where one layer's keys and values lie, and which of the step's batches (KV groups) it reads."""

    keys: PagedStream
    values: PagedStream
    group: int


class Decoder:
    """A decoder with its weights on one backend."""

    def __init__(
        self,
        config: DecoderConfig,
        family: Family,
        source: WeightSource,
        backend: Backend,
        weights_format: str = "auto",
    ) -> None:
        """Prepare all weights.

        Raises:
            ModelError: a tensor is missing or has the wrong shape.
        """
        self.config = config
        self.backend = backend
        loader = _Loader(config, family, source, backend, weights_format)
        self.embedding, self.head, self.final_norm = loader.ends()
        self.layers = [loader.layer(index) for index in range(len(config.layers))]
        self._params = [
            AttendParams(scale=layer.scale, window=layer.window, softcap=layer.softcap)
            for layer in config.layers
        ]
        self._rope_interleaved = source.is_gguf and family.gguf_rope_interleaved
        self._rope_tables = loader.rope_tables()

    def forward(
        self,
        token_ids: I32,
        batches: Sequence[AttendBatch],
        cache: Sequence[LayerCache],
        workspace: Workspace,
        trace: LayerTrace | None = None,
    ) -> tuple[F32, int]:
        """Compute one step's tokens.

        Args:
            token_ids: int32 ``[T]``.
            batches: one per KV group; all name the same rows and positions.
            cache: one per layer.
            workspace: at least T rows.
            trace: see `LayerTrace`.

        Returns:
            The final normed hidden states ``[T, hidden_size]`` (a view of the workspace, valid until the
            next call) and the number of query-key products per head, summed over layers.
        """
        buffers = workspace.rows(len(token_ids))
        hidden, products = buffers.hidden, 0
        self.backend.embed(self.embedding, token_ids, hidden)
        if self.config.embedding_scale != 1.0:
            hidden *= np.float32(self.config.embedding_scale)
        num_positions = int(batches[0].positions.max()) + 1
        for index, layer in enumerate(self.config.layers):
            layer_cache, weights = cache[index], self.layers[index]
            batch, views = batches[layer_cache.group], buffers.layers[index]
            self._project(layer, weights, buffers, views, batch, num_positions)
            products += self._attend(index, weights, layer_cache, buffers, views, batch)
            self._feed_forward(layer, weights, buffers, views)
            if trace is not None:
                trace(index, hidden)
        self.backend.rms_norm(hidden, self.final_norm, self.config.norm_eps, buffers.normed)
        return buffers.normed, products

    def logits(self, hidden: F32, out: F32) -> None:
        """``out [n, vocab_size]`` for final hidden states ``[n, hidden_size]``."""
        self.backend.matmul(hidden, self.head, out)

    def _project(
        self,
        layer: LayerConfig,
        weights: LayerWeights,
        buffers: StepBuffers,
        views: LayerBuffers,
        batch: AttendBatch,
        num_positions: int,
    ) -> None:
        backend = self.backend
        backend.rms_norm(buffers.hidden, weights.attention_norm, self.config.norm_eps, buffers.normed)
        backend.matmul(buffers.normed, weights.qkv, views.qkv)
        if weights.qkv_bias is not None:
            views.qkv[...] += weights.qkv_bias
        if layer.rope is not None:
            cos, sin = self._rope_tables[layer.rope].cover(num_positions)
            backend.rotary(views.q, batch.positions, cos, sin, self._rope_interleaved)
            backend.rotary(views.k, batch.positions, cos, sin, self._rope_interleaved)

    def _attend(
        self,
        index: int,
        weights: LayerWeights,
        cache: LayerCache,
        buffers: StepBuffers,
        views: LayerBuffers,
        batch: AttendBatch,
    ) -> int:
        backend = self.backend
        backend.append(views.k, cache.keys, batch.slot_mapping)
        backend.append(views.v, cache.values, batch.slot_mapping)
        products = backend.attend(
            views.q, cache.keys, cache.values, batch, self._params[index], views.attended
        )
        backend.matmul(views.attended_rows, weights.output, buffers.delta)
        if weights.output_bias is not None:
            buffers.delta[...] += weights.output_bias
        backend.add(buffers.hidden, buffers.delta)
        return products

    def _feed_forward(
        self, layer: LayerConfig, weights: LayerWeights, buffers: StepBuffers, views: LayerBuffers
    ) -> None:
        backend = self.backend
        backend.rms_norm(buffers.hidden, weights.mlp_norm, self.config.norm_eps, buffers.normed)
        backend.matmul(buffers.normed, weights.gate_up, views.gate_up)
        if weights.gate_up_bias is not None:
            views.gate_up[...] += weights.gate_up_bias
        backend.gated_activation(views.gate_up, layer.activation, views.activated)
        backend.matmul(views.activated, weights.down, buffers.delta)
        if weights.down_bias is not None:
            buffers.delta[...] += weights.down_bias
        backend.add(buffers.hidden, buffers.delta)


class _Loader:
    """Takes a family's tensors by their names and hands them to the backend."""

    def __init__(
        self,
        config: DecoderConfig,
        family: Family,
        source: WeightSource,
        backend: Backend,
        weights_format: str,
    ) -> None:
        self.config = config
        self.source = source
        self.backend = backend
        self.weights_format = weights_format
        self.names = family.gguf_names if source.is_gguf else family.hf_names

    def _prepare(self, *tensors: HostTensor) -> Weight:
        return self.backend.prepare(tensors, self.weights_format)

    def ends(self) -> tuple[Weight, Weight, F32]:
        """The embedding, the output head (the same object when tied) and the final norm."""
        config, names = self.config, self.names
        shape = config.vocab_size, config.hidden_size
        embedding = self._prepare(self.source.matrix(names.embedding, *shape))
        tied = config.tie_embeddings or (self.source.is_gguf and names.head not in self.source)
        head = embedding if tied else self._prepare(self.source.matrix(names.head, *shape))
        return embedding, head, self.source.vector(names.final_norm, config.hidden_size)

    def layer(self, index: int) -> LayerWeights:
        """All weights of one layer."""
        names, hidden = self.names, self.config.hidden_size
        layer = self.config.layers[index]

        def matrix(template: str, rows: int, cols: int) -> HostTensor:
            return self.source.matrix(template.format(i=index), rows, cols)

        def bias(wanted: bool, *parts: tuple[str, int]) -> F32 | None:
            if not wanted:
                return None
            named = ((t.format(i=index).removesuffix(".weight") + ".bias", n) for t, n in parts)
            return np.concatenate([self.source.vector(name, size) for name, size in named])

        q_rows = layer.num_heads * layer.key_dim
        k_rows, v_rows = layer.num_kv_heads * layer.key_dim, layer.num_kv_heads * layer.value_dim
        inner = layer.intermediate_size
        attention_bias, mlp_bias = self.config.attention_bias, self.config.mlp_bias
        return LayerWeights(
            attention_norm=self.source.vector(names.attention_norm.format(i=index), hidden),
            qkv=self._prepare(
                matrix(names.q, q_rows, hidden),
                matrix(names.k, k_rows, hidden),
                matrix(names.v, v_rows, hidden),
            ),
            qkv_bias=bias(attention_bias, (names.q, q_rows), (names.k, k_rows), (names.v, v_rows)),
            output=self._prepare(matrix(names.output, hidden, layer.num_heads * layer.value_dim)),
            output_bias=bias(attention_bias, (names.output, hidden)),
            mlp_norm=self.source.vector(names.mlp_norm.format(i=index), hidden),
            gate_up=self._prepare(matrix(names.gate, inner, hidden), matrix(names.up, inner, hidden)),
            gate_up_bias=bias(mlp_bias, (names.gate, inner), (names.up, inner)),
            down=self._prepare(matrix(names.down, hidden, inner)),
            down_bias=bias(mlp_bias, (names.down, hidden)),
        )

    def rope_tables(self) -> dict[RopeConfig, RopeTable]:
        """One table per distinct rotation."""
        tables: dict[RopeConfig, RopeTable] = {}
        for layer in self.config.layers:
            if layer.rope is None or layer.rope in tables:
                continue
            factors, name = None, self.names.rope_factors
            if name is not None and name in self.source:
                factors = self.source.vector(name, layer.rope.rotary_dim // 2)
            tables[layer.rope] = RopeTable(layer.rope, factors)
        return tables
