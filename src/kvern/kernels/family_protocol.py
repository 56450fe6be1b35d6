"""Operations that only some families need: recurrent states, experts, products per head, gates, norms on views.

A part of `kvern.kernels.protocol.Backend`. Views need only their last axis contiguous. Rows of a step are
computed apart from each other here too; a state's tokens run in order, and the state is rounded as it
is stored after each of them, so that it does not matter where a chunk ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvern.store.dtypes import decode, encode

if TYPE_CHECKING:
    from kvern.kernels.protocol import AttendBatch, Weight

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

GATES = ("none", "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "clamped_swiglu")
"""Kinds of `FamilyOperations.gate`: relu2 is the square of relu; clamped_swiglu is gpt-oss's."""

SCORINGS = ("softmax", "sigmoid", "softmax_chosen", "sigmoid_chosen")
"""How a router's logits become weights: over all experts, or over the chosen ones."""


@dataclass(frozen=True, slots=True)
class StatePlace:
    """One tensor of a layer's states in every sequence's entry.

    Byte b of an entry is byte ``b % page_bytes`` of its page number ``b // page_bytes``; a batch's block table
    names each sequence's pages.

    Attributes:
        pages: the slab, ``uint8 [num_blocks, page_bytes]``.
        offset: where the tensor starts in an entry, in bytes.
        num_bytes: its size.
        dtype: ``fp32``, ``fp16`` or ``bf16``.
        shape: of one sequence's tensor.
    """

    pages: U8
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]

    def read(self, page_ids: I32) -> F32:
        """The tensor of the entry in these pages, decoded."""
        touched, start = self._touched()
        data = self.pages[page_ids[touched]].reshape(-1)[start : start + self.num_bytes]
        return decode(data, self.dtype).reshape(self.shape)

    def write(self, page_ids: I32, values: F32) -> None:
        """Store the tensor, rounded to its dtype."""
        touched, start = self._touched()
        data = self.pages[page_ids[touched]]
        data.reshape(-1)[start : start + self.num_bytes] = encode(values, self.dtype).reshape(-1)
        self.pages[page_ids[touched]] = data

    def _touched(self) -> tuple[slice, int]:
        """Pages of the entry that hold the tensor, and where in the first of them it starts."""
        page_bytes = self.pages.shape[1]
        first, start = divmod(self.offset, page_bytes)
        return slice(first, -(-(self.offset + self.num_bytes) // page_bytes)), start


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Geometry of a gated delta rule; each key head serves ``num_heads / num_key_heads`` value heads."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ScanShape:
    """Geometry of a selective scan, and the bounds of its step."""

    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    step_limits: tuple[float, float]


@dataclass(frozen=True, slots=True)
class ScanVectors:
    """Numbers of a selective scan, float32 ``[num_heads]`` each: ``decay`` is A, ``skip`` D."""

    decay: F32
    step_bias: F32
    skip: F32


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits become experts and weights; see `kvern.models.config.ExpertsConfig`."""

    num_experts: int
    num_chosen: int
    scoring: str
    is_normalized: bool
    scale: float
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: str = "max"
    score_bias: F32 | None = None
    expert_scale: F32 | None = None


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """The weights of a layer's experts, one entry each, and what they compute.

    Attributes:
        gate_up: gate and up stacked, or up alone where the experts are not gated.
        down: back to the hidden size.
        gate_up_bias: ``[rows]`` or None per expert, `down_bias` likewise.
        activation: one of `GATES`.
        is_gated: ``act(gate) * up`` rather than ``act(up)``.
        scales_input: the weight multiplies an expert's input instead of its output.
        alpha: of clamped_swiglu, `clamp` likewise.
    """

    gate_up: Sequence[Weight]
    down: Sequence[Weight]
    gate_up_bias: Sequence[F32 | None]
    down_bias: Sequence[F32 | None]
    activation: str
    is_gated: bool = True
    scales_input: bool = False
    alpha: float = 1.702
    clamp: float = 7.0


class FamilyOperations(Protocol):
    """See the module. `T` is num_tokens; a wrong shape raises ValueError."""

    def gate(
        self,
        a: F32,
        kind: str,
        b: F32 | None,
        out: F32,
        alpha: float = 1.702,
        clamp: float = 7.0,
    ) -> None:
        """``out[T, n] = act(a) * b``, kind one of `GATES`; ``out`` may be ``a`` or ``b``.

        Args:
            a: ``[T, n]``, or ``[T, 1]`` for one gate per row.
            kind: ``none`` for a itself; ``clamped_swiglu`` is
                ``(clip(b) + 1) * min(a, clamp) * sigmoid(alpha * min(a, clamp))``.
            b: ``[T, n]``; None for ones.
            out: ``[T, n]``.
            alpha: of clamped_swiglu.
            clamp: of clamped_swiglu.
        """
        ...

    def norm(
        self, x: F32, weight: F32, bias: F32 | None, eps: float, is_centered: bool, out: F32
    ) -> None:
        """A norm of each head of ``x [T, heads, n]`` or row of ``[T, n]``; ``out`` may be ``x``.

        Args:
            x: a view.
            weight: ``[n]``, or ``[heads * n]`` where each head has its own.
            bias: like weight; None for none.
            eps: added to the mean square.
            is_centered: of the deviations from the mean (a layer norm).
            out: like ``x``.
        """
        ...

    def add_bias(self, x: F32, bias: F32) -> None:
        """``x[T, n] += bias[n]``."""
        ...

    def scale(self, x: F32, factor: float) -> None:
        """``x[T, n] *= factor``."""
        ...

    def softcap(self, x: F32, cap: float) -> None:
        """``x = cap * tanh(x / cap)`` for a contiguous ``[T, n]``."""
        ...

    def copy(self, x: F32, out: F32) -> None:
        """``out = x``, views ``[T, heads, n]``."""
        ...

    def scale_by_position(
        self, x: F32, positions: I32, floor: float, factor: float, start: float
    ) -> None:
        """``x [T, heads, n] *= 1 + factor * log(1 + floor((position + start) / floor))``."""
        ...

    def embed_positions(self, weight: Weight, positions: I32, offset: int, out: F32) -> None:
        """``out[T, cols] =`` the rows ``positions + offset`` of ``weight``."""
        ...

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
        """Depthwise causal convolution of each sequence's rows; the tail in its entry moves on.

        Args:
            x: a view ``[T, channels]``; rounded as the tail is stored.
            weight: ``[taps, channels]``, the oldest first.
            bias: ``[channels]``.
            is_silu: whether silu follows.
            tail: the last inputs, ``[channels, taps - 1]``.
            batch: rows and entries.
            out: a view like ``x``.
        """
        ...

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
        """Gated delta rule (Yang et al. 2024, arXiv:2412.06464, equation 10) over each sequence's rows.

        Args:
            qkv: ``[T, ...]``: q and k of the key heads, v of the value heads; q and k are made vectors of
                length 1, q is then scaled by ``key_dim ** -0.5``.
            gates: ``[T, 2 * num_heads]``: before the sigmoid of the update's strength, and before the step.
            decay: ``[num_heads]``: the factor on the state is ``exp(softplus(step + step_bias) * decay)``.
            step_bias: ``[num_heads]``.
            shape: see `DeltaShape`.
            state: ``[num_heads, key_dim, value_dim]``.
            batch: rows and entries.
            out: ``[T, num_heads * value_dim]``.
        """
        ...

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
        """Mamba-2's recurrence (Dao and Gu 2024, arXiv:2405.21060, section 2) over each sequence's rows.

        Args:
            xbc: ``[T, ...]``: x of the heads, B and C of the groups.
            steps: ``[T, num_heads]``, before softplus.
            vectors: see `ScanVectors`.
            shape: see `ScanShape`.
            state: ``[num_heads, head_dim, state_dim]``.
            batch: rows and entries.
            out: ``[T, num_heads * head_dim]``.
        """
        ...

    def group_heads(self, weights: Sequence[Weight]) -> Any:
        """Weights of equal shape, one per head, for `matmul_heads`."""
        ...

    def matmul_heads(self, x: F32, group: Any, out: F32) -> None:
        """``out[:, h] = x[:, h] @ weight_h.T`` for views ``[T, heads, cols]`` and ``[T, heads, rows]``."""
        ...

    def group_experts(self, parts: ExpertParts) -> Any:
        """A layer's experts, for `experts`."""
        ...

    def route(self, logits: F32, routing: Routing, ids: I32, weights: F32) -> None:
        """The experts of each row of ``logits [T, num_experts]``, in order of id, and their weights.

        ``ids`` and ``weights`` are ``[T, num_chosen]``. A tie goes to the lower id.
        """
        ...

    def experts(self, x: F32, ids: I32, weights: F32, group: Any, out: F32) -> None:
        """``out[t] = sum of weights[t, c] * expert ids[t, c] of x[t]``, summed in the order of c."""
        ...
