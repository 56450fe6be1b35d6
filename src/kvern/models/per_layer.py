"""An embedding of each token for each layer, added behind the layer through a gate (Gemma 4).

Together with a projection of the token's usual embedding it makes one small vector per layer; the layer's
result gates it, and what comes out is projected up, normed and added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import Backend, Weight
from kvern.models.loader import Loader
from kvern.models.workspace import StepBuffers

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class PerLayerInputs:
    """The embedding of all layers, and per layer a gate, a projection and a norm."""

    embedding: Weight
    projection: Weight
    projection_norm: F32
    gates: list[Weight]
    outputs: list[Weight]
    output_norms: list[F32]
    eps: float
    activation: str

    def prepare(self, backend: Backend, token_ids: I32, buffers: StepBuffers) -> F32:
        """Every layer's input, ``[T, layers, size]``, from the embedded tokens in ``buffers.hidden``."""
        size = len(self.projection_norm)
        own, both = buffers.extra["per_layer_own"], buffers.extra["per_layer"]
        known = token_ids
        if int(token_ids.max()) >= self.embedding.rows:
            known = np.where(token_ids < self.embedding.rows, token_ids, np.int32(0))
        backend.embed(self.embedding, known, own)
        backend.scale(own, size**0.5)
        backend.matmul(buffers.hidden, self.projection, both)
        backend.scale(both, buffers.hidden.shape[1] ** -0.5)
        inputs = both.reshape(len(both), -1, size)
        backend.norm(inputs, self.projection_norm, None, self.eps, False, inputs)
        backend.add(both, own)
        backend.scale(both, 2**-0.5)
        return inputs

    def add(self, backend: Backend, layer: int, inputs: F32, buffers: StepBuffers) -> None:
        """Add a layer's input to its result ``buffers.hidden``."""
        backend.add(buffers.hidden, self.gated(backend, layer, inputs, buffers.hidden, buffers))

    def gated(self, backend: Backend, layer: int, inputs: F32, x: F32, buffers: StepBuffers) -> F32:
        """A layer's input, gated by ``x [T, hidden]``, projected up and normed."""
        extra = buffers.extra
        gate, out, normed = (
            extra["per_layer_gate"],
            extra["per_layer_out"],
            extra["per_layer_normed"],
        )
        backend.matmul(x, self.gates[layer], gate)
        backend.gate(gate, self.activation, inputs[:, layer], gate)
        backend.matmul(gate, self.outputs[layer], out)
        backend.rms_norm(out, self.output_norms[layer], self.eps, normed)
        return normed


def per_layer_inputs_of(loader: Loader) -> PerLayerInputs:
    """Load them."""
    config, names = loader.config, loader.names
    size, hidden, count = config.per_layer_size, config.hidden_size, len(config.layers)
    indices = range(count)
    return PerLayerInputs(
        embedding=loader.prepare(
            loader.matrix(
                names.per_layer_embedding,
                config.per_layer_vocab_size or config.vocab_size,
                count * size,
            )
        ),
        projection=loader.prepare(loader.matrix(names.per_layer_input, count * size, hidden)),
        projection_norm=loader.norm_weight(names.per_layer_input_norm, size),
        gates=[
            loader.prepare(loader.matrix(names.per_layer_gate, size, hidden, i=i)) for i in indices
        ],
        outputs=[
            loader.prepare(loader.matrix(names.per_layer_output, hidden, size, i=i))
            for i in indices
        ],
        output_norms=[
            loader.norm_weight(names.per_layer_output_norm, hidden, i=i) for i in indices
        ],
        eps=config.norm_eps,
        activation=config.per_layer_activation,
    )
