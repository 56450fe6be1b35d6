"""Parallel residual streams (AltUp, Baykal et al. 2023, arXiv:2301.13310), as Gemma 3n has them.

A layer computes on one stream only. Before it, every stream is predicted from all of them; behind it,
every stream is corrected by what the layer changed in its own. The mixing coefficients come from a small
router on the token. All sums run in order of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import Backend, Weight
from kvern.models.loader import Loader

F32 = npt.NDArray[np.float32]

SMALLEST_MEAN_SQUARE = np.float32(1e-5)


@dataclass(slots=True)
class StreamLayer:
    """One layer's router, its maps, and the low-rank residual (Laurel) beside its attention."""

    router: Weight
    router_norm: F32
    predict: Weight
    correct: Weight
    scale: F32
    laurel_down: Weight
    laurel_up: Weight
    laurel_norm: F32


@dataclass(slots=True)
class Streams:
    """The streams of a decoder: how they begin and end, and each layer's part."""

    into: list[Weight]
    out_of: list[Weight]
    layers: list[StreamLayer]
    eps: float

    def expand(self, backend: Backend, hidden: F32) -> list[F32]:
        """All streams of the embedded tokens ``[T, hidden]``; each as long as the first."""
        return [hidden.copy(), *(self._as_long(backend, hidden, w, hidden) for w in self.into)]

    def collapse(self, backend: Backend, streams: list[F32], out: F32) -> None:
        """The mean of all streams, brought to the first one's length."""
        first, total = streams[0], streams[0].copy()
        for weight, stream in zip(self.out_of, streams[1:], strict=True):
            total += self._as_long(backend, stream, weight, first)
        np.multiply(total, np.float32(1 / len(streams)), out=out)

    @staticmethod
    def _as_long(backend: Backend, x: F32, weight: Weight, model: F32) -> F32:
        """``x`` projected, each row scaled to the root mean square of the row of ``model``."""
        out = np.empty_like(x)
        backend.matmul(x, weight, out)
        target = np.sqrt(np.mean(model * model, axis=-1, keepdims=True))
        own = np.sqrt(np.maximum(np.mean(out * out, axis=-1, keepdims=True), SMALLEST_MEAN_SQUARE))
        result: F32 = out * target / own
        return result

    def predict(self, backend: Backend, layer: int, streams: list[F32]) -> list[F32]:
        """Every stream as the layer is to find it."""
        count, part = len(streams), self.layers[layer]
        mix = np.empty((len(streams[0]), count * count), np.float32)
        backend.matmul(self._routed(backend, part, streams[0]), part.predict, mix)
        predicted = []
        for target in range(count):
            total = streams[target].copy()
            for source in range(count):
                total += streams[source] * mix[:, target * count + source, None]
            predicted.append(total)
        return predicted

    def correct(self, backend: Backend, layer: int, predicted: list[F32], hidden: F32) -> list[F32]:
        """Every stream, corrected by the layer's result ``hidden`` on the first."""
        part = self.layers[layer]
        mix = np.empty((len(hidden), len(predicted)), np.float32)
        backend.matmul(self._routed(backend, part, hidden), part.correct, mix)
        change = hidden - predicted[0]
        return [
            stream + change * (mix[:, index, None] + np.float32(1))
            for index, stream in enumerate(predicted)
        ]

    def laurel(self, backend: Backend, layer: int, x: F32) -> F32:
        """The low-rank residual of the normed input ``x [T, hidden]``."""
        part = self.layers[layer]
        low = np.empty((len(x), part.laurel_down.rows), np.float32)
        up, normed = np.empty_like(x), np.empty_like(x)
        backend.matmul(x, part.laurel_down, low)
        backend.matmul(low, part.laurel_up, up)
        backend.rms_norm(up, part.laurel_norm, self.eps, normed)
        return normed + x

    def _routed(self, backend: Backend, part: StreamLayer, x: F32) -> F32:
        normed = np.empty_like(x)
        backend.rms_norm(x, part.router_norm, self.eps, normed)
        normed *= np.float32(1 / x.shape[1])
        routed = np.empty((len(x), part.router.rows), np.float32)
        backend.matmul(normed, part.router, routed)
        return np.tanh(routed)


def streams_of(loader: Loader) -> Streams:
    """Load them."""
    config, names = loader.config, loader.names
    hidden, count = config.hidden_size, config.num_streams

    def outer(template: str) -> list[Weight]:
        return [
            loader.prepare(loader.matrix(template, hidden, hidden, e=i)) for i in range(count - 1)
        ]

    def layer(index: int) -> StreamLayer:
        def matrix(template: str, rows: int, cols: int) -> Weight:
            return loader.prepare(loader.matrix(template, rows, cols, i=index))

        return StreamLayer(
            router=matrix(names.stream_router, count, hidden),
            router_norm=loader.norm_weight(names.stream_router_norm, hidden, i=index),
            predict=matrix(names.stream_predict, count * count, count),
            correct=matrix(names.stream_correct, count, count),
            scale=loader.source.vector(loader.name(names.stream_scale, i=index), hidden),
            laurel_down=matrix(names.laurel_down, config.laurel_rank, hidden),
            laurel_up=matrix(names.laurel_up, hidden, config.laurel_rank),
            laurel_norm=loader.norm_weight(names.laurel_norm, hidden, i=index),
        )

    layers = [layer(index) for index in range(len(config.layers))]
    return Streams(outer(names.stream_in), outer(names.stream_out), layers, config.norm_eps)
