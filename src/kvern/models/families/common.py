"""Reading configuration fields so that a bad one is named; and the usual layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvern.errors import ModelError, UnsupportedModelError
from kvern.models.config import Config, DecoderConfig, LayerConfig, RopeConfig
from kvern.models.rope import SCALING_KINDS, longest, regimes_of, scaling_kind
from kvern.spec.regimes import PositionRegimes

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Activation names of configurations, and the decoder's own."""

DEFAULT_POSITIONS = 2048


def integer(config: Config, field: str) -> int:
    """A positive integer field that must be there."""
    value = config.get(field)
    if value is None:
        raise ModelError(f"the configuration lacks the field {field!r}, which the decoder needs")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"configuration field {field!r} is {value!r}, not a positive integer")
    return value


def optional_integer(config: Config, field: str, default: int) -> int:
    """A positive integer field, or its default when absent or null."""
    return default if config.get(field) is None else integer(config, field)


def number(config: Config, field: str, default: float) -> float:
    """A real field, or its default when absent or null."""
    value = config.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"configuration field {field!r} is {value!r}, not a number")
    return float(value)


def optional_number(config: Config, field: str, default: float | None = None) -> float | None:
    """A real field; null and absent are ``default``, and a null in the file stays None."""
    if field in config and config[field] is None:
        return None
    return default if field not in config else number(config, field, 0.0)


def flag(config: Config, field: str, default: bool = False) -> bool:
    """A true-or-false field, or its default when absent or null."""
    value = config.get(field)
    return default if value is None else bool(value)


def refuse(config: Config, field: str, allowed: object, family: str) -> None:
    """Refuse a field that switches on what the decoder does not compute."""
    value = config.get(field, allowed)
    if value is not None and value != allowed:
        raise UnsupportedModelError(
            f"{field} {value!r} is not what the {family} decoder computes: it needs {allowed!r}"
        )


def activation(config: Config, default: str, fields: Sequence[str] = ("hidden_act",)) -> str:
    """The activation named by the first of ``fields`` that is set.

    Raises:
        UnsupportedModelError: one that the decoder does not know.
    """
    name = next((config[field] for field in fields if config.get(field) is not None), default)
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"activation {name!r} is not one that kvern computes ({', '.join(sorted(ACTIVATIONS))})"
        )
    return ACTIVATIONS[name]


def layer_kinds(config: Config, known: Sequence[str], default: Sequence[str]) -> list[str]:
    """``layer_types`` of the configuration, one per layer, or the default.

    Raises:
        UnsupportedModelError: a kind that is not in ``known``.
        ModelError: not one kind per layer.
    """
    kinds = list(config.get("layer_types") or default)
    for kind in kinds:
        if kind not in known:
            raise UnsupportedModelError(
                f"layer kind {kind!r} is not one that this decoder computes ({', '.join(known)})"
            )
    if len(kinds) != integer(config, "num_hidden_layers"):
        raise ModelError(
            f"layer_types names {len(kinds)} layers, "
            f"and num_hidden_layers is {config['num_hidden_layers']}"
        )
    return kinds


def expert_count(config: Config) -> int:
    """Routed experts, under whichever name the configuration has them."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return integer(config, next((name for name in names if config.get(name) is not None), names[0]))


def head_dim_of(config: Config) -> int:
    """``head_dim``, or the hidden size divided among the heads."""
    if config.get("head_dim") is not None:
        return integer(config, "head_dim")
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    if hidden % heads:
        raise ModelError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, "
            "and head_dim is absent"
        )
    return hidden // heads


def owner_of(kinds: Sequence[str], index: int, first_shared: int) -> int | None:
    """The layer whose cache a layer reads: from ``first_shared`` on the last before it of its kind.

    Raises:
        ModelError: there is none.
    """
    if index < first_shared:
        return None
    owners = [i for i in range(max(first_shared, 0)) if kinds[i] == kinds[index]]
    if not owners:
        raise ModelError(
            f"layer {index} of {len(kinds)} would read a {kinds[index]} layer's cache, and none of "
            f"the {max(first_shared, 0)} layers that store one is of that kind"
        )
    return owners[-1]


def rope_of(
    config: Config,
    dim: int,
    kind: str | None = None,
    theta: float = 10000.0,
    interleaved: bool = False,
) -> RopeConfig:
    """The rotary embedding of a configuration, in the older or the newer spelling.

    Args:
        config: has ``rope_parameters``, or ``rope_scaling`` and ``rope_theta``.
        dim: dims of a head that would turn without a ``partial_rotary_factor``.
        kind: layer kind, for configurations with one entry per kind.
        theta: the family's default base.
        interleaved: see `RopeConfig`.
    """
    scaling: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if kind is not None and isinstance(scaling.get(kind), Mapping):
        scaling = scaling[kind]
    if scaling_kind(scaling) not in SCALING_KINDS:
        raise UnsupportedModelError(
            f"rope scaling kind {scaling_kind(scaling)!r} is not one that kvern computes "
            f"({', '.join(SCALING_KINDS)})"
        )
    partial = scaling.get("partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
    if scaling_kind(scaling) == "proportional":
        partial = 1.0
    rotary_dim = optional_integer(config, "rotary_dim", int(dim * float(partial)))
    base = scaling.get("rope_theta")
    positions = optional_integer(config, "max_position_embeddings", DEFAULT_POSITIONS)
    original = optional_integer(config, "original_max_position_embeddings", positions)
    if original != positions:  # beside the table it goes before what the table says
        scaling = {**scaling, "original_max_position_embeddings": original}
    return RopeConfig(
        theta=number(config, "rope_theta", theta) if base is None else float(base),
        rotary_dim=rotary_dim,
        scaling=scaling,
        original_max_positions=positions,
        interleaved=interleaved,
    )


def usual_layer(config: Config, **changes: Any) -> LayerConfig:
    """Llama's layer as this configuration has it; ``changes`` replace fields."""
    heads, head_dim = integer(config, "num_attention_heads"), head_dim_of(config)
    rope = changes.pop("rope", ...)
    layer = LayerConfig(
        num_heads=heads,
        num_kv_heads=optional_integer(config, "num_key_value_heads", heads),
        key_dim=head_dim,
        value_dim=head_dim,
        scale=head_dim**-0.5,
        intermediate_size=changes.pop("intermediate_size", None)
        or integer(config, "intermediate_size"),
        activation=changes.pop("activation", None) or activation(config, "silu"),
        rope=rope_of(config, head_dim) if rope is ... else rope,
    )
    return replace(layer, **changes)


def usual_decoder(config: Config, layers: Sequence[LayerConfig], **changes: Any) -> DecoderConfig:
    """Llama's frame around the layers; ``changes`` replace fields.

    Raises:
        ModelError: a layer whose query heads cannot be shared out over its KV heads.
        UnsupportedModelError: layers whose rotations change at different lengths.
    """
    for layer in layers:
        if layer.num_kv_heads and layer.num_heads % layer.num_kv_heads:
            raise ModelError(
                f"{layer.num_heads} query heads cannot be shared out over {layer.num_kv_heads} "
                "KV heads: the configuration is damaged"
            )
    positions = optional_integer(config, "max_position_embeddings", DEFAULT_POSITIONS)
    ropes = {layer.rope for layer in layers if layer.rope is not None}
    context = min((longest(rope, positions) for rope in ropes), default=positions)
    regimes = _common_regimes(ropes)
    bias = flag(config, "attention_bias")
    decoder = DecoderConfig(
        hidden_size=integer(config, "hidden_size"),
        vocab_size=integer(config, "vocab_size"),
        max_positions=context,
        regimes=regimes if regimes is not None and regimes.border < context else None,
        norm_eps=changes.pop("norm_eps", None) or number(config, "rms_norm_eps", 1e-6),
        layers=tuple(layers),
        tie_embeddings=flag(config, "tie_word_embeddings"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
    )
    return replace(decoder, **changes)


def _common_regimes(ropes: Iterable[RopeConfig]) -> PositionRegimes | None:
    found = {regimes for regimes in map(regimes_of, ropes) if regimes is not None}
    if len(found) > 1:
        borders = sorted(regimes.border for regimes in found)
        raise UnsupportedModelError(
            f"layers whose rotations change beyond different lengths ({borders}) are not computed"
        )
    return found.pop() if found else None


def layer_norm_decoder(
    config: Config, layer: LayerConfig, norm_eps: float, **changes: Any
) -> DecoderConfig:
    """The frame of GPT and its relatives: equal layers, layer norms with biases."""
    return usual_decoder(
        config,
        [layer] * integer(config, "num_hidden_layers"),
        norm="layer",
        norm_bias=True,
        norm_eps=norm_eps,
        **changes,
    )
