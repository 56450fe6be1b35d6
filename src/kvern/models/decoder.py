"""The one decoder that every family shares: embed, layers of mixer and feed-forward, norm.

It asks a `Backend` for every operation, passes preallocated outputs, and reads keys and values only
through the cache: also those it has just computed, so that a token's result cannot depend on where
a chunk began.

    usual        x += attention(norm(x));                    x += feed_forward(norm(x))
    sandwich     x += norm(attention(norm(x)));              x += norm(feed_forward(norm(x)))
    after only   x += norm(attention(x));                    x += norm(feed_forward(x))
    parallel     x += attention(norm(x)) + feed_forward(norm(x))

Which of these a family does follows from the norms that it names (`kvern.models.names`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import AttendBatch, Backend
from kvern.models.attention import LayerCache, LayerStep
from kvern.models.config import DecoderConfig, Family
from kvern.models.feed_forward import Dense, DenseBesideExperts, Experts
from kvern.models.load_feed_forward import feed_forward_of
from kvern.models.load_mixer import Mixer, mixer_of
from kvern.models.loader import Loader
from kvern.models.per_layer import per_layer_inputs_of
from kvern.models.program import RecordingBackend, is_repeatable, run_or_repeat
from kvern.models.rowwise import Norm
from kvern.models.streams import Streams, streams_of
from kvern.models.weights import WeightSource
from kvern.models.workspace import StepBuffers, Workspace

__all__ = ["Decoder", "LayerCache", "LayerTrace"]

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

LayerTrace = Callable[[int, F32], None]
"""Called with (layer, hidden ``[T, hidden_size]``) after each layer; must not keep the array."""


@dataclass(slots=True)
class DecoderLayer:
    """One layer's parts; what is None does not exist in the family, or in this layer."""

    attention_norm: Norm | None
    mixer: Mixer | None
    post_attention_norm: Norm | None
    mlp_norm: Norm | None
    feed_forward: Dense | DenseBesideExperts | Experts | None
    post_mlp_norm: Norm | None
    scale: np.float32 | None = None


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
        loader = Loader(config, family, source, backend, weights_format)
        self.config = loader.config
        self.backend = backend
        self.embedding, self.head, self.head_bias = loader.ends()
        self.positions = loader.position_embedding()
        self.final_norm = loader.final_norm()
        self.per_layer = per_layer_inputs_of(loader) if config.per_layer_size else None
        self.streams = streams_of(loader) if config.num_streams else None
        self.layers = [self._layer(loader, index) for index in range(len(config.layers))]
        parts = [layer.feed_forward for layer in self.layers]
        routed = [part.experts if isinstance(part, DenseBesideExperts) else part for part in parts]
        self._experts = [part for part in routed if isinstance(part, Experts)]
        records = hasattr(backend, "recording") and is_repeatable(self.config)
        self._recorder = cast("RecordingBackend", backend) if records else None

    @staticmethod
    def _layer(loader: Loader, index: int) -> DecoderLayer:
        layer = loader.config.layers[index]
        before_mixer, after_mixer, before_mlp, after_mlp = loader.norms(index)
        return DecoderLayer(
            before_mixer,
            mixer_of(loader, index) if layer.has_mixer else None,
            after_mixer,
            before_mlp,
            feed_forward_of(loader, index) if layer.has_feed_forward else None,
            after_mlp,
            loader.layer_scale(index),
        )

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
            The final normed hidden states ``[T, hidden_size]`` (a view of the workspace, valid
            until the next call) and the number of query-key products per head, summed over layers.
        """
        recorder = self._recorder if batches[0].regimes is None else None
        if any(part.on_margin is not None for part in self._experts):
            recorder = None
        if trace is None and recorder is not None and cast("object", recorder) is self.backend:
            return run_or_repeat(
                recorder,
                workspace,
                token_ids,
                batches,
                cache,
                lambda: self._forward(token_ids, batches, cache, workspace, None),
            )
        return self._forward(token_ids, batches, cache, workspace, trace)

    def _forward(
        self,
        token_ids: I32,
        batches: Sequence[AttendBatch],
        cache: Sequence[LayerCache],
        workspace: Workspace,
        trace: LayerTrace | None,
    ) -> tuple[F32, int]:
        """`forward`, operation by operation."""
        buffers = workspace.rows(len(token_ids))
        hidden, products = buffers.hidden, 0
        self._embed(token_ids, batches[0].positions, buffers)
        num_positions = int(batches[0].positions.max()) + 1
        inputs = None
        if self.per_layer is not None:
            inputs = self.per_layer.prepare(self.backend, token_ids, buffers)
        if self.streams is not None:
            assert inputs is not None
            products = self._stream_layers(self.streams, inputs, buffers, batches, cache, trace)
            self.final_norm.apply(self.backend, hidden, buffers.normed)
            return buffers.normed, products
        run_layer = self._parallel_layer if self.config.is_parallel else self._serial_layer
        for index, layer in enumerate(self.layers):
            shared = self.config.layers[index].share_with
            layer_cache = cache[index if shared is None else shared]
            step = LayerStep(
                buffers.layers[index], batches[layer_cache.group], layer_cache, num_positions
            )
            products += run_layer(layer, buffers, step)
            if self.per_layer is not None and inputs is not None:
                self.per_layer.add(self.backend, index, inputs, buffers)
            if layer.scale is not None:
                self.backend.scale(hidden, float(layer.scale))
            if trace is not None:
                trace(index, hidden)
        self.final_norm.apply(self.backend, hidden, buffers.normed)
        return buffers.normed, products

    def logits(self, hidden: F32, out: F32) -> None:
        """``out [n, vocab_size]`` for final hidden states ``[n, hidden_size]``."""
        self.backend.matmul(hidden, self.head, out)
        if self.head_bias is not None:
            self.backend.add_bias(out, self.head_bias)
        if self.config.logit_scale != 1.0:
            self.backend.scale(out, self.config.logit_scale)
        if self.config.logit_softcap is not None:
            self.backend.softcap(out, self.config.logit_softcap)

    def _embed(self, token_ids: I32, positions: I32, buffers: StepBuffers) -> None:
        config = self.config
        self.backend.embed(self.embedding, token_ids, buffers.hidden)
        if config.embedding_scale != 1.0:
            self.backend.scale(buffers.hidden, config.embedding_scale)
        if self.positions is not None:
            self.backend.embed_positions(
                self.positions, positions, config.position_offset, buffers.delta
            )
            self.backend.add(buffers.hidden, buffers.delta)

    def _serial_layer(self, layer: DecoderLayer, buffers: StepBuffers, step: LayerStep) -> int:
        backend, products = self.backend, 0
        if layer.mixer is not None:
            x = self._normed(layer.attention_norm, buffers)
            products = layer.mixer.run(backend, x, buffers.delta, step)
            self._add(layer.post_attention_norm, buffers)
        if layer.feed_forward is not None:
            x = self._normed(layer.mlp_norm, buffers)
            layer.feed_forward.run(backend, x, buffers.delta, step.views, buffers.hidden)
            self._add(layer.post_mlp_norm, buffers)
        return products

    def _parallel_layer(self, layer: DecoderLayer, buffers: StepBuffers, step: LayerStep) -> int:
        backend = self.backend
        assert layer.mixer is not None
        assert layer.feed_forward is not None
        x = self._normed(layer.attention_norm, buffers)
        products = layer.mixer.run(backend, x, buffers.delta, step)
        if layer.mlp_norm is not None:
            x = self._normed(layer.mlp_norm, buffers)
        layer.feed_forward.run(backend, x, buffers.second_delta, step.views, buffers.hidden)
        backend.add(buffers.hidden, buffers.delta)
        backend.add(buffers.hidden, buffers.second_delta)
        return products

    def _stream_layers(
        self,
        streams: Streams,
        inputs: F32,
        buffers: StepBuffers,
        batches: Sequence[AttendBatch],
        cache: Sequence[LayerCache],
        trace: LayerTrace | None,
    ) -> int:
        """All layers of a decoder with parallel residual streams; leaves their mean in ``buffers.hidden``."""
        backend, hidden, products = self.backend, buffers.hidden, 0
        assert self.per_layer is not None
        num_positions = int(batches[0].positions.max()) + 1
        current = streams.expand(backend, hidden)
        for index, layer in enumerate(self.layers):
            assert layer.mixer is not None
            assert layer.feed_forward is not None
            views, shared = buffers.layers[index], self.config.layers[index].share_with
            own = cache[index if shared is None else shared]
            predicted = streams.predict(backend, index, current)
            hidden[...] = predicted[0]
            x = self._normed(layer.attention_norm, buffers)
            laurel = streams.laurel(backend, index, x)
            step = LayerStep(views, batches[own.group], own, num_positions)
            products += layer.mixer.run(backend, x, buffers.delta, step)
            self._add(layer.post_attention_norm, buffers)
            backend.add(hidden, laurel)
            hidden *= np.float32(2**-0.5)
            x = self._normed(layer.mlp_norm, buffers)
            layer.feed_forward.run(backend, x, buffers.delta, views, buffers.hidden)
            self._add(layer.post_mlp_norm, buffers)
            current = streams.correct(backend, index, predicted, hidden)
            gate = current[0] * streams.layers[index].scale
            added = self.per_layer.gated(backend, index, inputs, gate, buffers)
            for stream in current[1:]:
                stream += added
            if trace is not None:
                trace(index, current[0])
        streams.collapse(backend, current, hidden)
        return products

    def _normed(self, norm: Norm | None, buffers: StepBuffers) -> F32:
        """The input of a part: the residual stream, normed where the family norms before."""
        if norm is None:
            return buffers.hidden
        norm.apply(self.backend, buffers.hidden, buffers.normed)
        return buffers.normed

    def _add(self, norm: Norm | None, buffers: StepBuffers) -> None:
        """Add a part's result to the residual stream, normed where the family norms after."""
        delta = buffers.delta
        if norm is not None:
            norm.apply(self.backend, delta, buffers.normed)
            delta = buffers.normed
        if self.config.residual_scale != 1.0:
            self.backend.scale(delta, self.config.residual_scale)
        self.backend.add(buffers.hidden, delta)
