"""Feed-forward parts: gated or plain, and routed experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern.kernels.family_protocol import Routing
from kvern.kernels.protocol import Backend, Weight
from kvern.kernels.reference_routing import margin, route
from kvern.models.config import ExpertsConfig, LayerConfig
from kvern.models.rowwise import Norm, cut_to_sparsity
from kvern.models.workspace import LayerBuffers

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class DenseWeights:
    """`gate_up` holds gate and up stacked, or up alone where the part is not gated."""

    gate_up: Weight
    gate_up_bias: F32 | None
    down: Weight
    down_bias: F32 | None


class Dense:
    """A feed-forward part that every token uses."""

    def __init__(self, layer: LayerConfig, weights: DenseWeights) -> None:
        """Args: layer: geometry and activation."""
        self.layer = layer
        self.weights = weights

    def run(self, backend: Backend, x: F32, out: F32, views: LayerBuffers, residual: F32) -> None:
        """``out [T, hidden]`` for the normed input ``x [T, hidden]`` of the stream ``residual``."""
        weights = self.weights
        projected = views.gate_up if self.layer.is_gated else views.activated
        backend.matmul(x, weights.gate_up, projected)
        if weights.gate_up_bias is not None:
            backend.add_bias(projected, weights.gate_up_bias)
        if self.layer.sparsity:
            cut_to_sparsity(projected[:, : self.layer.intermediate_size], self.layer.sparsity)
        activate(backend, projected, self.layer.activation, self.layer.is_gated, views.activated)
        backend.matmul(views.activated, weights.down, out)
        if weights.down_bias is not None:
            backend.add_bias(out, weights.down_bias)


def activate(backend: Backend, projected: F32, kind: str, is_gated: bool, out: F32) -> None:
    """``out [T, n]``: gate and up of ``projected [T, 2n]`` joined, or ``projected [T, n]`` activated."""
    width = out.shape[1]
    if not is_gated:
        backend.gate(projected, kind, None, out)
    elif kind in ("silu", "gelu", "gelu_tanh"):
        backend.gated_activation(projected, kind, out)
    else:
        backend.gate(projected[:, :width], kind, projected[:, width:], out)


@dataclass(slots=True)
class ExpertsWeights:
    """The router, the experts (a backend's `group_experts`), and what a shared expert needs."""

    router: Weight
    router_bias: F32 | None
    score_bias: F32 | None
    experts: Any
    shared: DenseWeights | None
    shared_router: Weight | None
    expert_scale: F32 | None = None


class Experts:
    """Routed experts: each token goes to the few that its router scores highest."""

    def __init__(self, config: ExpertsConfig, weights: ExpertsWeights) -> None:
        """Args: config: how to choose and to weigh."""
        self.config = config
        self.weights = weights
        self.routing = Routing(
            num_experts=config.num_experts,
            num_chosen=config.num_chosen,
            scoring=config.scoring,
            is_normalized=config.is_normalized,
            scale=config.routed_scale,
            num_groups=config.num_groups,
            num_chosen_groups=config.num_chosen_groups,
            group_score=config.group_score,
            score_bias=weights.score_bias,
            expert_scale=weights.expert_scale,
        )
        self.on_margin: Callable[[F32], None] | None = None
        """Told each step's margins ``[T]``, for whoever must know how near a tie the choices were."""

    def run(self, backend: Backend, x: F32, out: F32, views: LayerBuffers, residual: F32) -> None:
        """``out [T, hidden]`` for ``x``: contributions in expert order, then the shared expert."""
        self.apply(backend, x, x, out, views)

    def apply(
        self, backend: Backend, x: F32, router_input: F32, out: F32, views: LayerBuffers
    ) -> None:
        """As `run`, with another input for the router."""
        extra, own = views.extra, self.weights
        logits, weights = extra["router_logits"], extra["expert_weights"]
        ids = extra["expert_ids"].view(np.int32)
        backend.matmul(router_input, own.router, logits)
        if own.router_bias is not None:
            backend.add_bias(logits, own.router_bias)
        if self.on_margin is not None:
            self.on_margin(margin(logits, self.routing))
        backend.route(logits, self.routing, ids, weights)
        backend.experts(x, ids, weights, own.experts, out)
        if own.shared is not None:
            backend.add(out, self._shared(backend, x, own.shared, views))

    def route(self, logits: F32) -> tuple[I64, F32]:
        """Chosen experts, the best first, and their weights, from logits ``[T, num_experts]``."""
        return route(logits, self.routing)

    def margin(self, logits: F32) -> F32:
        """How clear each row's choice is; see `kvern.kernels.reference_routing.margin`."""
        return margin(logits, self.routing)

    def _shared(self, backend: Backend, x: F32, weights: DenseWeights, views: LayerBuffers) -> F32:
        config, extra = self.config, views.extra
        wide, inner, result = extra["shared_wide"], extra["shared_inner"], extra["shared"]
        backend.matmul(x, weights.gate_up, wide)
        if weights.gate_up_bias is not None:
            backend.add_bias(wide, weights.gate_up_bias)
        activate(backend, wide, config.activation, config.is_gated, inner)
        backend.matmul(inner, weights.down, result)
        if weights.down_bias is not None:
            backend.add_bias(result, weights.down_bias)
        if self.weights.shared_router is not None:
            gate = extra["shared_gate"]
            backend.matmul(x, self.weights.shared_router, gate)
            backend.gate(gate, "sigmoid", result, result)
        return result


class DenseBesideExperts:
    """A dense part and experts on the same residual stream, each normed, then summed (Gemma 4)."""

    def __init__(
        self,
        dense: Dense,
        experts: Experts,
        norms: tuple[Norm, Norm, Norm],
        router_norm: Norm,
    ) -> None:
        """Args: norms: behind the dense part, before the experts, behind them; router_norm: its own."""
        self.dense = dense
        self.experts = experts
        self.after_dense, self.before_experts, self.after_experts = norms
        self.router_norm = router_norm

    def run(self, backend: Backend, x: F32, out: F32, views: LayerBuffers, residual: F32) -> None:
        """See `Dense.run`."""
        extra = views.extra
        both, routed, normed = extra["both"], extra["routed"], extra["routed_normed"]
        self.dense.run(backend, x, out, views, residual)
        self.after_dense.apply(backend, out, both)
        self.before_experts.apply(backend, residual, normed)
        router_input = extra["routed_input"]
        self.router_norm.apply(backend, residual, router_input)
        self.experts.apply(backend, normed, router_input, routed, views)
        self.after_experts.apply(backend, routed, out)
        backend.add(out, both)
