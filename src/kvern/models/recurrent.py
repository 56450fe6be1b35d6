"""Token mixers with a state of fixed size: gated delta net, Mamba-2, short convolution.

Projections run for all rows of a step at once; the recurrence runs for each sequence by itself,
from the state that its pages hold, which it then replaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import AttendBatch, Backend, Weight
from kvern.kernels.reference_state import (
    causal_convolution,
    gated_delta_rule,
    rounded,
    selective_scan,
)
from kvern.models.attention import LayerStep
from kvern.models.config import DeltaNetConfig, MambaConfig, ShortConvConfig
from kvern.models.rowwise import sigmoid, silu, softplus
from kvern.models.states import LayerState

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

UNIT_EPS = np.float32(1e-6)
CONV, RECURRENT = "conv", "recurrent"
"""Names of the parts of a state."""


@dataclass(slots=True)
class StateWeights:
    """Weights of a mixer with a state; what a kind does not have is None.

    Attributes:
        inputs: the projection into the mixer.
        gates: the second projection, of a delta net's update strength and decay.
        conv: ``[channels, kernel]``.
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


def _sequences(batch: AttendBatch) -> Iterator[tuple[slice, I32]]:
    """Rows and pages of each sequence of a step."""
    for index, (start, stop) in enumerate(
        zip(batch.cu_seqlens_q[:-1].tolist(), batch.cu_seqlens_q[1:].tolist(), strict=True)
    ):
        yield slice(start, stop), batch.block_tables[index]


def _matmul(backend: Backend, x: F32, weight: Weight, bias: F32 | None = None) -> F32:
    out = np.empty((len(x), weight.rows), np.float32)
    backend.matmul(x, weight, out)
    if bias is not None:
        out += bias
    return out


def _convolved(x: F32, state: LayerState, pages: I32, weights: StateWeights) -> F32:
    """The causal convolution of one sequence's rows; its tail in the pages moves on."""
    x = rounded(x, state.dtype(CONV))
    out, tail = causal_convolution(x, state.read(CONV, pages), weights.conv, weights.conv_bias)
    state.write(CONV, pages, tail)
    return out


class ShortConv:
    """LFM2's double-gated short convolution: ``C * conv(B * x)``."""

    def __init__(self, config: ShortConvConfig, weights: StateWeights) -> None:
        """Args: config: only for its type; weights: inputs are B, C and x stacked."""
        self.config = config
        self.weights = weights

    def run(self, backend: Backend, x: F32, out: F32, step: LayerStep) -> int:
        """See `HeadsAttention.run`; there are no query-key products."""
        weights, state = self.weights, step.cache.state
        assert state is not None
        before, after, values = np.split(
            _matmul(backend, x, weights.inputs, weights.inputs_bias), 3, 1
        )
        mixed = np.empty_like(x)
        for rows, pages in _sequences(step.batch):
            mixed[rows] = after[rows] * _convolved(
                before[rows] * values[rows], state, pages, weights
            )
        out[...] = _matmul(backend, mixed, weights.output, weights.output_bias)
        return 0


class DeltaNet:
    """Gated delta net (Qwen3-Next), recurrent in token order."""

    def __init__(self, config: DeltaNetConfig, weights: StateWeights) -> None:
        """Args: weights: inputs are q, k, v and the output gate stacked; gates are b and a."""
        self.config = config
        self.weights = weights

    def run(self, backend: Backend, x: F32, out: F32, step: LayerStep) -> int:
        """See `HeadsAttention.run`; there are no query-key products."""
        config, weights, state = self.config, self.weights, step.cache.state
        assert state is not None
        assert weights.gates is not None
        assert weights.norm is not None
        projected = _matmul(backend, x, weights.inputs)
        gates = _matmul(backend, x, weights.gates)
        channels = config.num_channels
        mixed = np.empty((len(x), config.num_value_heads, config.value_dim), np.float32)
        for rows, pages in _sequences(step.batch):
            qkv = silu(_convolved(projected[rows, :channels], state, pages, weights))
            mixed[rows] = self._recur(qkv, gates[rows], state, pages)
        flat = mixed.reshape(-1, config.value_dim)
        normed = np.empty_like(flat)
        backend.rms_norm(flat, weights.norm, weights.norm_eps, normed)
        normed = normed.reshape(len(x), -1) * silu(np.ascontiguousarray(projected[:, channels:]))
        backend.matmul(normed, weights.output, out)
        return 0

    def _recur(self, qkv: F32, gates: F32, state: LayerState, pages: I32) -> F32:
        config, weights = self.config, self.weights
        assert weights.decay is not None
        assert weights.step_bias is not None
        heads, width = config.num_value_heads, config.num_key_heads * config.key_dim
        key_shape = (len(qkv), config.num_key_heads, config.key_dim)
        q = self._unit(qkv[:, :width].reshape(key_shape)) * np.float32(config.key_dim**-0.5)
        k = self._unit(qkv[:, width : 2 * width].reshape(key_shape))
        v = qkv[:, 2 * width :].reshape(len(qkv), heads, config.value_dim)
        repeat = heads // config.num_key_heads
        q, k = np.repeat(q, repeat, axis=1), np.repeat(k, repeat, axis=1)
        beta = sigmoid(np.ascontiguousarray(gates[:, :heads]))
        step = softplus(gates[:, heads:] + weights.step_bias)
        mixed, after = gated_delta_rule(
            q,
            k,
            v,
            np.exp(step * weights.decay),
            beta,
            state.read(RECURRENT, pages),
            state.dtype(RECURRENT),
        )
        state.write(RECURRENT, pages, after)
        return mixed

    @staticmethod
    def _unit(x: F32) -> F32:
        """Vectors of length 1 along the last axis."""
        x = np.ascontiguousarray(x)
        unit: F32 = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + UNIT_EPS)
        return unit


class Mamba:
    """Mamba-2, recurrent in token order."""

    def __init__(self, config: MambaConfig, weights: StateWeights) -> None:
        """Args: weights: inputs are the output gate, x, B, C and the step stacked."""
        self.config = config
        self.weights = weights

    def run(self, backend: Backend, x: F32, out: F32, step: LayerStep) -> int:
        """See `HeadsAttention.run`; there are no query-key products."""
        config, weights, state = self.config, self.weights, step.cache.state
        assert state is not None
        assert weights.norm is not None
        width, channels = config.num_heads * config.head_dim, config.num_channels
        projected = _matmul(backend, x, weights.inputs, weights.inputs_bias)
        mixed = np.empty((len(x), width), np.float32)
        for rows, pages in _sequences(step.batch):
            convolved = _convolved(projected[rows, width : width + channels], state, pages, weights)
            steps = np.ascontiguousarray(projected[rows, width + channels :])
            mixed[rows] = self._recur(silu(convolved), steps, state, pages)
        mixed *= silu(np.ascontiguousarray(projected[:, :width]))
        grouped = mixed.reshape(-1, width // config.num_norm_groups)
        normed = np.empty_like(grouped)
        ones = np.ones(grouped.shape[1], np.float32)
        backend.rms_norm(grouped, ones, weights.norm_eps, normed)
        result = _matmul(
            backend, normed.reshape(mixed.shape) * weights.norm, weights.output, weights.output_bias
        )
        out[...] = result
        return 0

    def _recur(self, xbc: F32, steps: F32, state: LayerState, pages: I32) -> F32:
        config, weights, num_tokens = self.config, self.weights, len(xbc)
        assert (
            weights.decay is not None and weights.step_bias is not None and weights.skip is not None
        )
        width, per_group = config.num_heads * config.head_dim, config.num_groups * config.state_dim
        x = xbc[:, :width].reshape(num_tokens, config.num_heads, config.head_dim)
        repeat = config.num_heads // config.num_groups
        b, c = (
            np.repeat(part.reshape(num_tokens, config.num_groups, config.state_dim), repeat, axis=1)
            for part in (xbc[:, width : width + per_group], xbc[:, width + per_group :])
        )
        low, high = (np.float32(limit) for limit in config.step_limits)
        step = np.minimum(np.maximum(softplus(steps + weights.step_bias), low), high)
        mixed, after = selective_scan(
            x,
            step,
            np.exp(step * weights.decay),
            b,
            c,
            state.read(RECURRENT, pages),
            state.dtype(RECURRENT),
        )
        state.write(RECURRENT, pages, after)
        return (mixed + x * weights.skip[:, None]).reshape(num_tokens, -1)
