"""Weights of one rank: from real file sizes, a given size, or parameters times a format."""

from __future__ import annotations

from dataclasses import dataclass

from kvern.errors import UsageError
from kvern.plan.facts import named_parameters
from kvern.plan.request import PlanRequest
from kvern.plan.shards import stage_layers
from kvern.spec.layers import LayerParameters, ModelSpec

WEIGHT_BITS = {
    "fp32": 32.0,
    "bf16": 16.0,
    "fp16": 16.0,
    "fp8": 8.0,
    "int8": 8.0,
    "q8_0": 8.5,
    "q6_k": 6.5625,
    "q5_k_m": 5.67,
    "q4_k_m": 4.85,
    "q4_0": 4.5,
    "int4": 4.25,
    "nvfp4": 4.5,
    "mxfp4": 4.25,
}
"""Bits per parameter, scales included; K-quants are averages over a model's tensors."""

ALIASES = {"f32": "fp32", "f16": "fp16", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of every stage, for one rank of it.

    Attributes:
        per_stage: bytes on one tensor rank, by pipeline stage.
        total: bytes of the whole model, each tensor once.
        basis: where the figure comes from, for the explanation.
    """

    per_stage: tuple[int, ...]
    total: int
    basis: str


def weight_bits(weights_format: str | None, model: ModelSpec) -> tuple[float, str]:
    """Bits per parameter and the format's name.

    Raises:
        UsageError: unknown format.
    """
    name = (weights_format or "auto").lower()
    if name == "auto":
        name = (model.torch_dtype or "bf16").lower()
    name = ALIASES.get(name, name)
    if name not in WEIGHT_BITS:
        raise UsageError(
            f"unknown weights format {weights_format!r}: choose one of {', '.join(WEIGHT_BITS)}, "
            "or give the size with --weights SIZE"
        )
    return WEIGHT_BITS[name], name


def total_parameters(model: ModelSpec) -> int | None:
    """All parameters, as the configuration notes them or counted from it; None if unknown."""
    noted = named_parameters(model)
    if noted is not None or model.parameters is None:
        return noted
    return model.parameters.total


def weights_of(request: PlanRequest) -> Weights | None:
    """Weights per stage, or None when nothing is known about them."""
    model = request.model
    shares = _stage_shares(request)
    if request.weights_bytes is not None:
        total = request.weights_bytes
        return Weights(tuple(int(total * s) for s in shares), total, request.weights_basis)
    count = total_parameters(model)
    if count is None:
        return None
    bits, name = weight_bits(request.weights_format, model)
    total = int(count * bits / 8)
    basis = f"{count:,} parameters × {bits:g} bit ({name})"
    return Weights(tuple(int(total * s) for s in shares), total, basis)


def _stage_shares(request: PlanRequest) -> tuple[float, ...]:
    """One tensor rank's share of all weights, by stage.

    Matrices are split over tensor ranks; norms and routers are copied. The embedding lies on the
    first stage, the head on the last; a tied one on both.
    """
    model, tp = request.model, request.tp
    counts = model.parameters
    stages = stage_layers(request)
    if counts is None or any(layer.parameters is None for layer in model.layers):
        return tuple(len(layers) / model.num_layers / tp for layers in stages)
    shares: list[float] = []
    for number, layers in enumerate(stages):
        own = sum(_on_rank(model.layers[i].parameters, tp) for i in layers)
        if number == 0:
            own += counts.embedding / tp
        if number == len(stages) - 1:
            own += counts.final_norm + counts.lm_head / tp
            if not counts.lm_head and len(stages) > 1:
                own += counts.embedding / tp
        shares.append(own / counts.total)
    return tuple(shares)


def _on_rank(layer: LayerParameters | None, tp: int) -> float:
    assert layer is not None
    split = layer.attention + layer.mlp + layer.experts
    return split / tp + layer.router + layer.norms
