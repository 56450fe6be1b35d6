"""The reference of `kvern.kernels.family_protocol`: plain numpy, token after token, expert after expert."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import array_api_compat.numpy as array_numpy
import numpy as np
import numpy.typing as npt

from kvern.kernels import reference_ops as ops
from kvern.kernels.family_protocol import (
    DeltaShape,
    ExpertParts,
    Routing,
    ScanShape,
    ScanVectors,
    StatePlace,
)
from kvern.kernels.protocol import AttendBatch, Weight
from kvern.kernels.reference_routing import route
from kvern.kernels.reference_state import (
    causal_convolution,
    gated_delta_rule,
    rounded,
    selective_scan,
    sigmoid,
    silu,
    softplus,
)

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

UNIT_EPS = np.float32(1e-6)


def _activated(a: F32, kind: str) -> F32:
    if kind == "none":
        return a
    if kind in ("relu", "relu2"):
        cut: F32 = np.maximum(a, np.float32(0))
        return cut * cut if kind == "relu2" else cut
    if kind == "sigmoid":
        return sigmoid(a)
    with np.errstate(over="ignore"):  # exp of a large number: silu is then exactly 0
        result: F32 = ops.activation(array_numpy, a, kind)
    return result


def _sequences(batch: AttendBatch) -> Iterator[tuple[slice, I32]]:
    """Rows and pages of each sequence of a step that has rows."""
    borders = batch.cu_seqlens_q.tolist()
    for index, (start, stop) in enumerate(itertools.pairwise(borders)):
        if stop > start:
            yield slice(start, stop), batch.block_tables[index]


def _unit(x: F32) -> F32:
    """Vectors of length 1 along the last axis."""
    x = np.ascontiguousarray(x)
    unit: F32 = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + UNIT_EPS)
    return unit


class ReferenceFamilies(ABC):
    """See `FamilyOperations` for all of them."""

    def gate(
        self,
        a: F32,
        kind: str,
        b: F32 | None,
        out: F32,
        alpha: float = 1.702,
        clamp: float = 7.0,
    ) -> None:
        """See `FamilyOperations.gate`."""
        if kind == "clamped_swiglu":
            assert b is not None
            limit = np.float32(clamp)
            low = np.minimum(a, limit)
            up = np.clip(b, -limit, limit) + np.float32(1)
            out[...] = up * (low * sigmoid(np.float32(alpha) * low))
            return
        activated = _activated(a, kind)
        out[...] = activated if b is None else activated * b

    def norm(
        self, x: F32, weight: F32, bias: F32 | None, eps: float, is_centered: bool, out: F32
    ) -> None:
        """See `FamilyOperations.norm`."""
        if is_centered:
            x = x - np.mean(x, axis=-1, keepdims=True)
        shape = (-1, x.shape[-1]) if len(weight) > x.shape[-1] else (x.shape[-1],)
        normed = ops.rms_norm(np, x, weight.reshape(shape), eps)
        out[...] = normed if bias is None else normed + bias.reshape(shape)

    def add_bias(self, x: F32, bias: F32) -> None:
        """See `FamilyOperations.add_bias`."""
        x += bias

    def scale(self, x: F32, factor: float) -> None:
        """See `FamilyOperations.scale`."""
        x *= np.float32(factor)

    def softcap(self, x: F32, cap: float) -> None:
        """See `FamilyOperations.softcap`."""
        x /= np.float32(cap)
        np.tanh(x, out=x)
        x *= np.float32(cap)

    def copy(self, x: F32, out: F32) -> None:
        """See `FamilyOperations.copy`."""
        out[...] = x

    def scale_by_position(
        self, x: F32, positions: I32, floor: float, factor: float, start: float
    ) -> None:
        """See `FamilyOperations.scale_by_position`."""
        steps = np.floor((positions.astype(np.float32) + np.float32(start)) / np.float32(floor))
        factors = np.log1p(steps) * np.float32(factor) + np.float32(1)
        x *= factors[:, None, None]

    def embed_positions(self, weight: Weight, positions: I32, offset: int, out: F32) -> None:
        """See `FamilyOperations.embed_positions`."""
        rows: Any = positions + np.int32(offset)
        self.embed(weight, rows, out)

    @abstractmethod
    def embed(self, weight: Weight, token_ids: I32, out: F32) -> None:
        """See `Backend.embed`."""

    @abstractmethod
    def matmul(self, x: F32, weight: Weight, out: F32) -> None:
        """See `Backend.matmul`."""

    def convolve(
        self,
        x: F32,
        weight: F32,
        bias: F32 | None,
        is_silu: bool,
        tail: StatePlace,
        batch: AttendBatch,
        out: F32,
    ) -> None:
        """See `FamilyOperations.convolve`."""
        for rows, pages in _sequences(batch):
            inputs = rounded(x[rows], tail.dtype)
            result, after = causal_convolution(inputs, tail.read(pages), weight.T, bias)
            tail.write(pages, after)
            out[rows] = silu(result) if is_silu else result

    def gated_delta_rule(
        self,
        qkv: F32,
        gates: F32,
        decay: F32,
        step_bias: F32,
        shape: DeltaShape,
        state: StatePlace,
        batch: AttendBatch,
        out: F32,
    ) -> None:
        """See `FamilyOperations.gated_delta_rule`."""
        heads, width = shape.num_heads, shape.num_key_heads * shape.key_dim
        keys = (len(qkv), shape.num_key_heads, shape.key_dim)
        repeat = heads // shape.num_key_heads
        q = _unit(qkv[:, :width].reshape(keys)) * np.float32(shape.key_dim**-0.5)
        k = _unit(qkv[:, width : 2 * width].reshape(keys))
        q, k = np.repeat(q, repeat, axis=1), np.repeat(k, repeat, axis=1)
        v = qkv[:, 2 * width :].reshape(len(qkv), heads, shape.value_dim)
        beta = sigmoid(np.ascontiguousarray(gates[:, :heads]))
        kept = np.exp(softplus(gates[:, heads:] + step_bias) * decay)
        for rows, pages in _sequences(batch):
            mixed, after = gated_delta_rule(
                q[rows], k[rows], v[rows], kept[rows], beta[rows], state.read(pages), state.dtype
            )
            state.write(pages, after)
            out[rows] = mixed.reshape(len(mixed), -1)

    def selective_scan(
        self,
        xbc: F32,
        steps: F32,
        vectors: ScanVectors,
        shape: ScanShape,
        state: StatePlace,
        batch: AttendBatch,
        out: F32,
    ) -> None:
        """See `FamilyOperations.selective_scan`."""
        heads, num_tokens = shape.num_heads, len(xbc)
        width, per_group = heads * shape.head_dim, shape.num_groups * shape.state_dim
        x = xbc[:, :width].reshape(num_tokens, heads, shape.head_dim)
        b, c = (
            np.repeat(
                part.reshape(num_tokens, shape.num_groups, -1), heads // shape.num_groups, axis=1
            )
            for part in (xbc[:, width : width + per_group], xbc[:, width + per_group :])
        )
        low, high = (np.float32(limit) for limit in shape.step_limits)
        step = np.minimum(np.maximum(softplus(steps + vectors.step_bias), low), high)
        kept = np.exp(step * vectors.decay)
        for rows, pages in _sequences(batch):
            mixed, after = selective_scan(
                x[rows], step[rows], kept[rows], b[rows], c[rows], state.read(pages), state.dtype
            )
            state.write(pages, after)
            skipped = x[rows] * vectors.skip[:, None]
            out[rows] = (mixed + skipped).reshape(len(mixed), -1)

    def group_heads(self, weights: Sequence[Weight]) -> Any:
        """See `FamilyOperations.group_heads`."""
        return tuple(weights)

    def matmul_heads(self, x: F32, group: Any, out: F32) -> None:
        """See `FamilyOperations.matmul_heads`."""
        for head, weight in enumerate(group):
            result = np.empty((len(x), weight.rows), np.float32)
            self.matmul(np.ascontiguousarray(x[:, head]), weight, result)
            out[:, head] = result

    def group_experts(self, parts: ExpertParts) -> Any:
        """See `FamilyOperations.group_experts`."""
        return parts

    def route(self, logits: F32, routing: Routing, ids: I32, weights: F32) -> None:
        """See `FamilyOperations.route`."""
        chosen, chosen_weights = route(logits, routing)
        order = np.argsort(chosen, axis=-1)
        ids[...] = np.take_along_axis(chosen, order, axis=-1)
        weights[...] = np.take_along_axis(chosen_weights, order, axis=-1)

    def experts(self, x: F32, ids: I32, weights: F32, group: Any, out: F32) -> None:
        """See `FamilyOperations.experts`."""
        parts: ExpertParts = group
        out[...] = 0
        for expert in np.unique(ids):
            rows, slots = np.nonzero(ids == expert)
            factor = weights[rows, slots, None]
            if parts.scales_input:
                out[rows] += self._expert(x[rows] * factor, parts, int(expert))
            else:
                out[rows] += self._expert(x[rows], parts, int(expert)) * factor

    def _expert(self, x: F32, parts: ExpertParts, expert: int) -> F32:
        gate_up, down = parts.gate_up[expert], parts.down[expert]
        wide, inner = np.empty((len(x), gate_up.rows), np.float32), down.cols
        self.matmul(x, gate_up, wide)
        bias = parts.gate_up_bias[expert]
        if bias is not None:
            wide += bias
        activated = np.empty((len(x), inner), np.float32)
        up = wide[:, inner:] if parts.is_gated else None
        self.gate(wide[:, :inner], parts.activation, up, activated, parts.alpha, parts.clamp)
        result = np.empty((len(x), down.rows), np.float32)
        self.matmul(activated, down, result)
        bias = parts.down_bias[expert]
        return result if bias is None else result + bias
