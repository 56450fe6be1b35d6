"""Granite: Llama with four factors, on embeddings, attention scores, residuals and logits.

Granite 3 is dense or has experts; Granite 4 H has Mamba-2 in most layers and a shared feed-forward
part beside the experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvern.errors import UnsupportedModelError
from kvern.models.config import (
    Config,
    DecoderConfig,
    ExpertsConfig,
    Family,
    LayerConfig,
    MambaConfig,
)
from kvern.models.families.common import (
    expert_count,
    flag,
    head_dim_of,
    integer,
    layer_kinds,
    number,
    optional_integer,
    rope_of,
    usual_decoder,
    usual_layer,
)
from kvern.models.names import GGUF_NAMES, HF_NAMES

MAMBA, ATTENTION = "mamba", "attention"
KIND_NAMES = {
    MAMBA: MAMBA,
    "linear_attention": MAMBA,
    ATTENTION: ATTENTION,
    "full_attention": ATTENTION,
}


def _decoder(config: Config, layers: list[LayerConfig]) -> DecoderConfig:
    return usual_decoder(
        config,
        layers,
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / number(config, "logits_scaling", 1.0),
    )


def describe(config: Config) -> DecoderConfig:
    """Read a dense Granite 3 configuration."""
    layer = usual_layer(config, scale=number(config, "attention_multiplier", 1.0))
    return _decoder(config, [layer] * integer(config, "num_hidden_layers"))


def _experts(config: Config, shared_size: int = 0) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=expert_count(config),
        num_chosen=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "intermediate_size"),
        scoring="softmax_chosen",
        shared_size=shared_size,
    )


def describe_experts(config: Config) -> DecoderConfig:
    """Read a Granite 3 configuration with experts."""
    scale = number(config, "attention_multiplier", 1.0)
    layer = replace(usual_layer(config, scale=scale, experts=_experts(config)), intermediate_size=0)
    return _decoder(config, [layer] * integer(config, "num_hidden_layers"))


def describe_hybrid(config: Config) -> DecoderConfig:
    """Read a Granite 4 configuration."""
    count, inner = integer(config, "num_hidden_layers"), integer(config, "shared_intermediate_size")
    given = layer_kinds(config, tuple(KIND_NAMES), [MAMBA] * count)
    position = config.get("position_embedding_type")
    if position not in (None, "rope", "nope"):
        raise UnsupportedModelError(f"position_embedding_type {position!r} is not 'rope' or 'nope'")
    attention = usual_layer(
        config,
        intermediate_size=inner,
        scale=number(config, "attention_multiplier", 1.0),
        rope=rope_of(config, head_dim_of(config)) if position == "rope" else None,
    )
    mamba = LayerConfig(
        intermediate_size=inner, activation=attention.activation, state=_mamba(config)
    )
    by_kind = {MAMBA: mamba, ATTENTION: attention}
    if "num_local_experts" not in config:
        integer(config, "num_local_experts")  # absent is unlike 0: it is not known
    if config.get("num_local_experts"):
        experts = _experts(config, inner)
        by_kind = {
            kind: replace(layer, experts=experts, intermediate_size=0)
            for kind, layer in by_kind.items()
        }
    return _decoder(config, [by_kind[KIND_NAMES[kind]] for kind in given])


def _mamba(config: Config) -> MambaConfig:
    heads = integer(config, "mamba_n_heads")
    head_dim = config.get("mamba_d_head")
    if not isinstance(head_dim, int):
        head_dim = (
            optional_integer(config, "mamba_expand", 2) * integer(config, "hidden_size") // heads
        )
    groups = optional_integer(config, "mamba_n_groups", 1)
    low, high = config.get("time_step_limit") or (0.0, float("inf"))
    return MambaConfig(
        num_heads=heads,
        head_dim=head_dim,
        state_dim=integer(config, "mamba_d_state"),
        num_groups=groups,
        kernel=integer(config, "mamba_d_conv"),
        num_norm_groups=groups,
        step_limits=(_bound(low), _bound(high)),
        has_bias=flag(config, "mamba_proj_bias"),
        has_conv_bias=flag(config, "mamba_conv_bias", True),
    )


def _bound(value: Any) -> float:
    """A number; transformers writes an infinite one as ``{"__float__": "Infinity"}``."""
    return float(value["__float__"]) if isinstance(value, Mapping) else float(value)


_LAYER = "model.layers.{i}."
_MOE = _LAYER + "block_sparse_moe."

MOE_NAMES = replace(
    HF_NAMES,
    router=_MOE + "router.layer.weight",
    expert_gate_up=_MOE + "input_linear.weight",
    expert_gate="",
    expert_down=_MOE + "output_linear.weight",
    gate_up=_LAYER + "shared_mlp.input_linear.weight",
    down=_LAYER + "shared_mlp.output_linear.weight",
    shared_gate_up=_LAYER + "shared_mlp.input_linear.weight",
    shared_down=_LAYER + "shared_mlp.output_linear.weight",
)

GRANITE = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    gguf_architectures=("granite",),
    read=describe,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    gguf_rope_interleaved=True,
)

GRANITE_MOE = Family(
    name="granitemoe",
    architectures=("GraniteMoeForCausalLM",),
    gguf_architectures=(),
    read=describe_experts,
    hf_names=MOE_NAMES,
)

GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    gguf_architectures=(),
    read=describe_hybrid,
    hf_names=replace(
        MOE_NAMES,
        state_inputs=(_LAYER + "mamba.in_proj.weight",),
        state_conv=_LAYER + "mamba.conv1d.weight",
        state_decay=_LAYER + "mamba.A_log",
        state_step_bias=_LAYER + "mamba.dt_bias",
        state_skip=_LAYER + "mamba.D",
        state_norm=_LAYER + "mamba.norm.weight",
        state_output=_LAYER + "mamba.out_proj.weight",
    ),
)
