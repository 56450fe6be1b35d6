"""Feed-forward parts: gated or plain, and routed experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.kernels.protocol import Backend, Weight
from kvern.models.config import ExpertsConfig, LayerConfig
from kvern.models.rowwise import Norm, cut_to_sparsity, largest, plain_activation, sigmoid, softmax
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
            projected += weights.gate_up_bias
        if self.layer.sparsity:
            cut_to_sparsity(projected[:, : self.layer.intermediate_size], self.layer.sparsity)
        if self.layer.is_gated:
            backend.gated_activation(projected, self.layer.activation, views.activated)
        else:
            plain_activation(backend, projected, self.layer.activation, views.gate_up, projected)
        backend.matmul(views.activated, weights.down, out)
        if weights.down_bias is not None:
            out += weights.down_bias


@dataclass(slots=True)
class ExpertsWeights:
    """The router, one `DenseWeights` per expert, and what a shared expert needs."""

    router: Weight
    router_bias: F32 | None
    score_bias: F32 | None
    experts: tuple[DenseWeights, ...]
    shared: DenseWeights | None
    shared_router: Weight | None
    expert_scale: F32 | None = None


class Experts:
    """Routed experts: each token goes to the few that its router scores highest."""

    def __init__(self, config: ExpertsConfig, weights: ExpertsWeights) -> None:
        """Args: config: how to choose and to weigh."""
        self.config = config
        self.weights = weights
        self.on_margin: Callable[[F32], None] | None = None
        """Told each step's margins ``[T]``, for whoever must know how near a tie the choices were."""

    def run(self, backend: Backend, x: F32, out: F32, views: LayerBuffers, residual: F32) -> None:
        """``out [T, hidden]`` for ``x``: contributions in expert order, then the shared expert."""
        self.apply(backend, x, x, out)

    def apply(self, backend: Backend, x: F32, router_input: F32, out: F32) -> None:
        """As `run`, with another input for the router."""
        logits = self._router_logits(backend, router_input)
        if self.on_margin is not None:
            self.on_margin(self.margin(logits))
        chosen, weights = self.route(logits)
        out[...] = 0
        for expert in np.unique(chosen):
            rows, slots = np.nonzero(chosen == expert)
            factor = weights[rows, slots, None]
            part = x[rows]
            if self.config.scales_input:
                out[rows] += self._expert(backend, part * factor, self.weights.experts[expert])
            else:
                out[rows] += self._expert(backend, part, self.weights.experts[expert]) * factor
        if self.weights.shared is not None:
            out += self._shared(backend, x, self.weights.shared)

    def _router_logits(self, backend: Backend, x: F32) -> F32:
        logits = np.empty((len(x), self.config.num_experts), np.float32)
        backend.matmul(x, self.weights.router, logits)
        if self.weights.router_bias is not None:
            logits += self.weights.router_bias
        return logits

    def route(self, logits: F32) -> tuple[I64, F32]:
        """Chosen experts and their weights, ``[T, num_chosen]``, from logits ``[T, num_experts]``."""
        config = self.config
        scores, ranking = self._ranking(logits)
        chosen = largest(ranking, config.num_chosen)
        weights = np.take_along_axis(scores, chosen, axis=-1)
        if config.scoring == "softmax_chosen":
            weights = softmax(weights)
        elif config.scoring == "sigmoid_chosen":
            weights = sigmoid(weights)
        if config.is_normalized:
            weights = weights / (np.sum(weights, axis=-1, keepdims=True) + np.float32(1e-20))
        if config.routed_scale != 1.0:
            weights = weights * np.float32(config.routed_scale)
        if self.weights.expert_scale is not None:
            weights = weights * self.weights.expert_scale[chosen]
        return chosen, weights

    def margin(self, logits: F32) -> F32:
        """How clear each row's choice is: the last chosen rank score less the best one left out, ``[T]``."""
        ranked = -np.sort(-self._ranking(logits)[1], axis=-1)
        count = self.config.num_chosen
        if count == self.config.num_experts:
            return np.full(len(logits), np.inf, np.float32)
        clear: F32 = ranked[:, count - 1] - ranked[:, count]
        return clear

    def _ranking(self, logits: F32) -> tuple[F32, F32]:
        """Scores, and what the choice goes by."""
        config = self.config
        if config.scoring == "softmax":
            scores = softmax(logits)
        else:
            scores = sigmoid(logits) if config.scoring == "sigmoid" else logits
        ranking = scores if self.weights.score_bias is None else scores + self.weights.score_bias
        if config.num_groups > 1:
            ranking = self._within_groups(ranking)
        return scores, ranking

    def _within_groups(self, ranking: F32) -> F32:
        """The ranking with all but the best groups of experts out of the choice."""
        config, num_tokens = self.config, len(ranking)
        grouped = ranking.reshape(num_tokens, config.num_groups, -1)
        if config.group_score == "max":
            group_scores = np.max(grouped, axis=-1)
        else:
            best = np.sort(grouped, axis=-1)[:, :, -2:]
            group_scores = best[:, :, 1] + best[:, :, 0]
        kept = largest(group_scores, config.num_chosen_groups)
        is_kept = np.zeros(group_scores.shape, bool)
        np.put_along_axis(is_kept, kept, True, axis=-1)
        masked = np.where(is_kept[:, :, None], grouped, np.float32(-np.inf))
        return masked.reshape(num_tokens, -1)

    def _expert(self, backend: Backend, x: F32, weights: DenseWeights) -> F32:
        return self._gated(backend, x, weights, self.config.activation)

    def _shared(self, backend: Backend, x: F32, weights: DenseWeights) -> F32:
        result = self._gated(backend, x, weights, self.config.activation)
        if self.weights.shared_router is not None:
            gate = np.empty((len(x), 1), np.float32)
            backend.matmul(x, self.weights.shared_router, gate)
            result *= sigmoid(gate)
        return result

    def _gated(self, backend: Backend, x: F32, weights: DenseWeights, activation: str) -> F32:
        gate_up = np.empty((len(x), weights.gate_up.rows), np.float32)
        backend.matmul(x, weights.gate_up, gate_up)
        if weights.gate_up_bias is not None:
            gate_up += weights.gate_up_bias
        activated = np.empty((len(x), weights.down.cols), np.float32)
        if not self.config.is_gated:
            scratch = np.empty((len(x), 2 * weights.gate_up.rows), np.float32)
            plain_activation(backend, gate_up, activation, scratch, activated)
        elif activation == "clamped_swiglu":
            self._clamped_swiglu(gate_up, activated)
        else:
            backend.gated_activation(gate_up, activation, activated)
        result = np.empty((len(x), weights.down.rows), np.float32)
        backend.matmul(activated, weights.down, result)
        if weights.down_bias is not None:
            result += weights.down_bias
        return result

    def _clamped_swiglu(self, gate_up: F32, out: F32) -> None:
        """gpt-oss: ``(up + 1) * gate * sigmoid(alpha * gate)``, both clamped, gate only from above."""
        limit, half = np.float32(self.config.clamp), gate_up.shape[-1] // 2
        gate = np.minimum(gate_up[:, :half], limit)
        up = np.clip(gate_up[:, half:], -limit, limit)
        np.multiply(
            (up + np.float32(1)), gate * sigmoid(np.float32(self.config.alpha) * gate), out=out
        )


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
        self.dense.run(backend, x, out, views, residual)
        both, routed, normed = (np.empty_like(out) for _ in range(3))
        self.after_dense.apply(backend, out, both)
        self.before_experts.apply(backend, residual, normed)
        router_input = np.empty_like(out)
        self.router_norm.apply(backend, residual, router_input)
        self.experts.apply(backend, normed, router_input, routed)
        self.after_experts.apply(backend, routed, normed)
        np.add(both, normed, out=out)
