"""Token mixers with a state of fixed size: gated delta net, Mamba-2, short convolution.

Projections run for all rows of a step at once; the recurrence runs for each sequence by itself, token after
token, from the state that its pages hold, which it then replaces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.kernels.family_protocol import DeltaShape, ScanShape, ScanVectors
from kvern.kernels.protocol import Backend, Weight
from kvern.models.attention import LayerStep
from kvern.models.config import DeltaNetConfig, MambaConfig, ShortConvConfig

F32 = npt.NDArray[np.float32]

CONV, RECURRENT = "conv", "recurrent"
"""Names of the parts of a state."""


@dataclass(slots=True)
class StateWeights:
    """Weights of a mixer with a state; what a kind does not have is None.

    Attributes:
        inputs: the projection into the mixer.
        gates: the second projection, of a delta net's update strength and decay.
        conv: ``[kernel, channels]``, the oldest tap first.
        decay: ``-exp(A_log)``, ``[heads]``.
        step_bias: ``[heads]``.
        skip: Mamba's D, ``[heads]``.
        norm: weight of the norm on the mixer's result.
    """

    inputs: Weight
    inputs_bias: F32 | None
    conv: F32
    conv_bias: F32 | None
    output: Weight
    output_bias: F32 | None
    gates: Weight | None = None
    decay: F32 | None = None
    step_bias: F32 | None = None
    skip: F32 | None = None
    norm: F32 | None = None
    norm_eps: float = 1e-6


class ShortConv:
    """LFM2's double-gated short convolution: ``C * conv(B * x)``."""

    def __init__(self, config: ShortConvConfig, weights: StateWeights) -> None:
        """Args: config: only for its type; weights: inputs are B, C and x stacked."""
        self.config = config
        self.weights = weights

    def run(self, backend: Backend, x: F32, out: F32, step: LayerStep) -> int:
        """See `HeadsAttention.run`; there are no query-key products."""
        weights, mixed = self.weights, step.views.extra["state_mixed"]
        projected = _projected(backend, x, weights, step)
        width = mixed.shape[1]
        before, after, values = (projected[:, i * width : (i + 1) * width] for i in range(3))
        backend.gate(before, "none", values, mixed)
        convolved = _convolved(backend, mixed, weights, step, is_silu=False)
        backend.gate(after, "none", convolved, mixed)
        return _finished(backend, mixed, weights, out)


class DeltaNet:
    """Gated delta net (Qwen3-Next), recurrent in token order."""

    def __init__(self, config: DeltaNetConfig, weights: StateWeights) -> None:
        """Args: weights: inputs are q, k, v and the output gate stacked; gates are b and a."""
        self.config = config
        self.weights = weights
        self.shape = DeltaShape(
            config.num_key_heads, config.num_value_heads, config.key_dim, config.value_dim
        )

    def run(self, backend: Backend, x: F32, out: F32, step: LayerStep) -> int:
        """See `HeadsAttention.run`; there are no query-key products."""
        config, weights, state = self.config, self.weights, step.cache.state
        assert state is not None
        assert weights.gates is not None
        assert weights.norm is not None
        assert weights.decay is not None
        assert weights.step_bias is not None
        extra, channels = step.views.extra, config.num_channels
        projected = _projected(backend, x, weights, step)
        gates, mixed = extra["state_gates"], extra["state_mixed"]
        backend.matmul(x, weights.gates, gates)
        qkv = _convolved(backend, projected[:, :channels], weights, step, is_silu=True)
        backend.gated_delta_rule(
            qkv,
            gates,
            weights.decay,
            weights.step_bias,
            self.shape,
            state.place(RECURRENT),
            step.batch,
            mixed,
        )
        heads = mixed.reshape(len(x), config.num_value_heads, config.value_dim)
        backend.norm(heads, weights.norm, None, weights.norm_eps, False, heads)
        backend.gate(projected[:, channels:], "silu", mixed, mixed)
        return _finished(backend, mixed, weights, out)


class Mamba:
    """Mamba-2, recurrent in token order."""

    def __init__(self, config: MambaConfig, weights: StateWeights) -> None:
        """Args: weights: inputs are the output gate, x, B, C and the step stacked."""
        assert weights.decay is not None
        assert weights.step_bias is not None
        assert weights.skip is not None
        self.config = config
        self.weights = weights
        self.vectors = ScanVectors(weights.decay, weights.step_bias, weights.skip)
        self.shape = ScanShape(
            config.num_heads,
            config.num_groups,
            config.head_dim,
            config.state_dim,
            config.step_limits,
        )

    def run(self, backend: Backend, x: F32, out: F32, step: LayerStep) -> int:
        """See `HeadsAttention.run`; there are no query-key products."""
        config, weights, state = self.config, self.weights, step.cache.state
        assert state is not None
        assert weights.norm is not None
        width, channels = config.num_heads * config.head_dim, config.num_channels
        mixed = step.views.extra["state_mixed"]
        projected = _projected(backend, x, weights, step)
        inputs = projected[:, width : width + channels]
        backend.selective_scan(
            _convolved(backend, inputs, weights, step, is_silu=True),
            projected[:, width + channels :],
            self.vectors,
            self.shape,
            state.place(RECURRENT),
            step.batch,
            mixed,
        )
        backend.gate(projected[:, :width], "silu", mixed, mixed)
        grouped = mixed.reshape(len(x), config.num_norm_groups, -1)
        backend.norm(grouped, weights.norm, None, weights.norm_eps, False, grouped)
        return _finished(backend, mixed, weights, out)


def _projected(backend: Backend, x: F32, weights: StateWeights, step: LayerStep) -> F32:
    """The projection into the mixer."""
    projected = step.views.extra["state_inputs"]
    backend.matmul(x, weights.inputs, projected)
    if weights.inputs_bias is not None:
        backend.add_bias(projected, weights.inputs_bias)
    return projected


def _convolved(
    backend: Backend, x: F32, weights: StateWeights, step: LayerStep, *, is_silu: bool
) -> F32:
    """The causal convolution of every sequence's rows; the tails in their entries move on."""
    assert step.cache.state is not None
    out, tail = step.views.extra["state_conv"], step.cache.state.place(CONV)
    backend.convolve(x, weights.conv, weights.conv_bias, is_silu, tail, step.batch, out)
    return out


def _finished(backend: Backend, mixed: F32, weights: StateWeights, out: F32) -> int:
    """The projection out of the mixer; no query-key products were needed."""
    backend.matmul(mixed, weights.output, out)
    if weights.output_bias is not None:
        backend.add_bias(out, weights.output_bias)
    return 0
