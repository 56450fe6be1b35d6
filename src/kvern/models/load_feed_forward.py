"""From a layer's description to its feed-forward part with weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvern.kernels.family_protocol import ExpertParts
from kvern.kernels.protocol import HostTensor
from kvern.models.config import ExpertsConfig
from kvern.models.feed_forward import (
    Dense,
    DenseBesideExperts,
    DenseWeights,
    Experts,
    ExpertsWeights,
)
from kvern.models.loader import Loader, bias_name
from kvern.models.rowwise import Norm
from kvern.models.weights import decoded, take_rows, transposed

F32 = npt.NDArray[np.float32]


def feed_forward_of(loader: Loader, index: int) -> Dense | DenseBesideExperts | Experts:
    """One layer's feed-forward part."""
    layer = loader.config.layers[index]
    if layer.experts is None:
        return _dense_part(loader, index)
    experts = Experts(layer.experts, _experts_weights(loader, index, layer.experts))
    if not layer.has_both:
        return experts
    names = loader.names
    return DenseBesideExperts(
        _dense_part(loader, index),
        experts,
        (
            _plain_norm(loader, names.post_dense_norm, index),
            _plain_norm(loader, names.experts_norm, index),
            _plain_norm(loader, names.post_experts_norm, index),
        ),
        _plain_norm(loader, names.router_norm, index, loader.config.hidden_size**-0.5),
    )


def _dense_part(loader: Loader, index: int) -> Dense:
    layer, names = loader.config.layers[index], loader.names
    parts = (names.gate, names.up) if layer.is_gated else (names.up,)
    fused = names.gate_up if layer.is_gated else None
    return Dense(layer, _dense(loader, index, parts, fused, names.down, layer.intermediate_size))


def _plain_norm(loader: Loader, template: str, index: int, factor: float = 1.0) -> Norm:
    """An RMS norm whose weight is multiplied by ``factor``."""
    weight = loader.norm_weight(template, loader.config.hidden_size, i=index)
    return Norm(weight * np.float32(factor), None, loader.config.norm_eps, is_centered=False)


def _dense(
    loader: Loader,
    index: int,
    parts: tuple[str | None, ...],
    fused: str | None,
    down: str,
    inner: int,
) -> DenseWeights:
    config, hidden = loader.config, loader.config.hidden_size
    named = [(str(name), inner) for name in parts] if fused is None else [(fused, 2 * inner)]
    return DenseWeights(
        gate_up=loader.prepare(
            *(loader.matrix(name, rows, hidden, i=index) for name, rows in named)
        ),
        gate_up_bias=loader.bias(config.mlp_bias, *named, i=index),
        down=loader.prepare(loader.matrix(down, hidden, inner, i=index)),
        down_bias=loader.bias(config.mlp_bias, (down, hidden), i=index),
    )


def _experts_weights(loader: Loader, index: int, experts: ExpertsConfig) -> ExpertsWeights:
    names, hidden, count = loader.names, loader.config.hidden_size, experts.num_experts
    shared = shared_router = score_bias = None
    if experts.shared_size:
        gated = (names.shared_gate, names.shared_up)
        parts = gated if experts.is_gated else (names.shared_up,)
        shared = _dense(
            loader, index, parts, names.shared_gate_up, names.shared_down, experts.shared_size
        )
    if experts.has_shared_gate:
        shared_router = loader.prepare(_row(loader, names.shared_router, hidden, index))
    if experts.has_score_bias:
        score_bias = loader.source.vector(loader.name(names.score_bias, i=index), count)
    return ExpertsWeights(
        router=loader.prepare(loader.matrix(names.router, count, hidden, i=index)),
        router_bias=loader.bias(experts.has_router_bias, (names.router, count), i=index),
        score_bias=score_bias,
        experts=_all_experts(loader, index, experts),
        shared=shared,
        shared_router=shared_router,
        expert_scale=loader.source.vector(loader.name(names.expert_scale, i=index), count)
        if experts.has_expert_scale
        else None,
    )


def _row(loader: Loader, template: str, cols: int, index: int) -> HostTensor:
    """A matrix of one row, which a GGUF file may store as a vector."""
    name = loader.name(template, i=index)
    stored = loader.source.tensors.get(name)
    if stored is not None and len(stored.shape) == 1:
        data = loader.source.vector(name, cols).view(np.uint8)
        return HostTensor(name, "F32", 1, cols, data)
    return loader.source.matrix(name, 1, cols)


def _all_experts(loader: Loader, index: int, experts: ExpertsConfig) -> Any:
    """The backend's group of all experts."""
    names, hidden, inner = loader.names, loader.config.hidden_size, experts.intermediate_size
    count = experts.num_experts
    if _is_fused(loader, index):
        both = _per_expert(loader, str(names.expert_gate_up), index, count, 2 * inner, hidden)
        if names.experts_interleaved:
            both = [take_rows(part, _gate_then_up(inner)) for part in both]
        gate_ups = [[part] for part in both]
    elif not experts.is_gated:
        ups = _per_expert(loader, names.expert_up, index, count, inner, hidden)
        gate_ups = [[up] for up in ups]
    else:
        gates = _per_expert(loader, names.expert_gate, index, count, inner, hidden)
        ups = _per_expert(loader, names.expert_up, index, count, inner, hidden)
        gate_ups = [[gate, up] for gate, up in zip(gates, ups, strict=True)]
    downs = _per_expert(loader, names.expert_down, index, count, hidden, inner)
    gate_up_biases, down_biases = _expert_biases(loader, index, experts)
    return loader.backend.group_experts(
        ExpertParts(
            gate_up=[loader.prepare(*gate_up) for gate_up in gate_ups],
            down=[loader.prepare(down) for down in downs],
            gate_up_bias=gate_up_biases,
            down_bias=down_biases,
            activation=experts.activation,
            is_gated=experts.is_gated,
            scales_input=experts.scales_input,
            alpha=experts.alpha,
            clamp=experts.clamp,
        )
    )


def _is_fused(loader: Loader, index: int) -> bool:
    """Whether the file has gate and up of all experts in one tensor; some families' files differ."""
    template = loader.names.expert_gate_up
    if template is None:
        return False
    return loader.name(template, i=index) in loader.source or not loader.names.expert_gate


def _per_expert(
    loader: Loader, template: str, index: int, count: int, rows: int, cols: int
) -> list[HostTensor]:
    if "{e}" in template:
        return [loader.matrix(template, rows, cols, i=index, e=expert) for expert in range(count)]
    name = loader.name(template, i=index)
    one_each = loader.names.expert_down_each
    if name not in loader.source and template == loader.names.expert_down and one_each:
        return _per_expert(loader, one_each, index, count, rows, cols)
    if loader.names.experts_transposed:
        return [transposed(part) for part in loader.source.matrices(name, count, cols, rows)]
    return loader.source.matrices(name, count, rows, cols)


def _expert_biases(
    loader: Loader, index: int, experts: ExpertsConfig
) -> tuple[list[F32 | None], list[F32 | None]]:
    """Per expert, the biases of gate and up together and of down."""
    names, hidden, inner = loader.names, loader.config.hidden_size, experts.intermediate_size
    count = experts.num_experts
    if not experts.has_bias:
        return [None] * count, [None] * count

    def rows(template: str, size: int) -> F32:
        name = loader.name(bias_name(template), i=index)
        return decoded(loader.source.matrix(name, count, size))

    if names.expert_gate_up is not None:
        gate_up = rows(names.expert_gate_up, 2 * inner)
        if names.experts_interleaved:
            gate_up = gate_up[:, _gate_then_up(inner)]
    else:
        gate_up = np.concatenate([rows(names.expert_gate, inner), rows(names.expert_up, inner)], -1)
    down = np.ascontiguousarray(rows(names.expert_down, hidden))
    return list(np.ascontiguousarray(gate_up)), list(down)


def _gate_then_up(inner: int) -> npt.NDArray[np.int64]:
    """Rows of an interleaved matrix in the order gate, then up."""
    return np.concatenate([np.arange(0, 2 * inner, 2), np.arange(1, 2 * inner, 2)])
