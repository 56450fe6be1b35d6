"""The native backend's part of `kvern.kernels.family_protocol`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern.kernels.family_protocol import (
    GATES,
    SCORINGS,
    DeltaShape,
    ExpertParts,
    Routing,
    ScanShape,
    ScanVectors,
    StatePlace,
)
from kvern.kernels.protocol import AttendBatch, Weight

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

_GATE_INDEX = {name: index for index, name in enumerate(GATES)}
_SCORING_INDEX = {name: index for index, name in enumerate(SCORINGS)}
_STATE_INDEX = {name: index for index, name in enumerate(("fp32", "fp16", "bf16"))}


def _place(place: StatePlace) -> tuple[Any, int, int, int]:
    return place.pages, place.offset, place.num_bytes, _STATE_INDEX[place.dtype]


def batch_arrays(batch: AttendBatch) -> tuple[I32, I32, I32, I32, I64, I32 | None]:
    """What the extension reads of a batch."""
    return (
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.block_tables,
        batch.positions,
        batch.slot_mapping,
        batch.seats,
    )


def _heads(x: F32) -> F32:
    return x[:, None, :] if x.ndim == 2 else x


class NativeFamilies:
    """Operations on `_runtime`; see `FamilyOperations` for all of them."""

    _native: Any
    _runtime: Any

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
        self._runtime.gate(a, _GATE_INDEX[kind], b, out, alpha, clamp)

    def norm(
        self, x: F32, weight: F32, bias: F32 | None, eps: float, is_centered: bool, out: F32
    ) -> None:
        """See `FamilyOperations.norm`."""
        self._runtime.norm(_heads(x), weight, bias, eps, is_centered, _heads(out))

    def add_bias(self, x: F32, bias: F32) -> None:
        """See `FamilyOperations.add_bias`."""
        self._runtime.add_bias(x, bias)

    def scale(self, x: F32, factor: float) -> None:
        """See `FamilyOperations.scale`."""
        self._runtime.scale(x, factor)

    def softcap(self, x: F32, cap: float) -> None:
        """See `FamilyOperations.softcap`."""
        self._runtime.softcap(x, cap)

    def copy(self, x: F32, out: F32) -> None:
        """See `FamilyOperations.copy`."""
        self._runtime.copy(x, out)

    def scale_by_position(
        self, x: F32, positions: I32, floor: float, factor: float, start: float
    ) -> None:
        """See `FamilyOperations.scale_by_position`."""
        self._runtime.scale_by_position(x, positions, floor, factor, start)

    def embed_positions(self, weight: Weight, positions: I32, offset: int, out: F32) -> None:
        """See `FamilyOperations.embed_positions`."""
        self._runtime.embed_positions(weight, positions, offset, out)

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
        self._runtime.convolve(x, weight, bias, is_silu, _place(tail), batch_arrays(batch), out)

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
        dims = (shape.num_key_heads, shape.num_heads, shape.key_dim, shape.value_dim)
        self._runtime.gated_delta_rule(
            qkv, gates, decay, step_bias, dims, _place(state), batch_arrays(batch), out
        )

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
        dims = (shape.num_heads, shape.num_groups, shape.head_dim, shape.state_dim)
        numbers = (vectors.decay, vectors.step_bias, vectors.skip)
        self._runtime.selective_scan(
            xbc, steps, numbers, shape.step_limits, dims, _place(state), batch_arrays(batch), out
        )

    def group_heads(self, weights: Sequence[Weight]) -> Any:
        """See `FamilyOperations.group_heads`."""
        return self._native.group_heads(list(weights))

    def matmul_heads(self, x: F32, group: Any, out: F32) -> None:
        """See `FamilyOperations.matmul_heads`."""
        self._runtime.matmul_heads(x, group, out)

    def group_experts(self, parts: ExpertParts) -> Any:
        """See `FamilyOperations.group_experts`."""
        return self._native.group_experts(
            list(parts.gate_up),
            list(parts.down),
            list(parts.gate_up_bias),
            list(parts.down_bias),
            _GATE_INDEX[parts.activation],
            parts.is_gated,
            parts.scales_input,
            parts.alpha,
            parts.clamp,
        )

    def route(self, logits: F32, routing: Routing, ids: I32, weights: F32) -> None:
        """See `FamilyOperations.route`."""
        self._runtime.route(
            logits,
            (
                _SCORING_INDEX[routing.scoring],
                routing.num_experts,
                routing.num_chosen,
                routing.num_groups,
                routing.num_chosen_groups,
            ),
            (routing.group_score != "max", routing.is_normalized),
            routing.scale,
            routing.score_bias,
            routing.expert_scale,
            ids,
            weights,
        )

    def experts(self, x: F32, ids: I32, weights: F32, group: Any, out: F32) -> None:
        """See `FamilyOperations.experts`."""
        self._runtime.experts(x, ids, weights, group, out)
