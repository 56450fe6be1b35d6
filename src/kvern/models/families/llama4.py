"""Llama 4's text model: chunked local attention, full layers without rotary, experts.

Chunked layers have rotary and unit-norm heads, full layers neither, but a query temperature. The
router's score multiplies an expert's input.
"""

from __future__ import annotations

from dataclasses import replace

from kvern.models.config import Config, DecoderConfig, ExpertsConfig, Family, LayerConfig
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
from kvern.models.families.smollm import rotary_layers
from kvern.models.names import HF_NAMES

KINDS = ("full_attention", "chunked_attention")


def describe(config: Config) -> DecoderConfig:
    """Read a Llama 4 configuration, or the text part of a multimodal one."""
    turns = rotary_layers(config)
    default = [KINDS[turn and config.get("attention_chunk_size") is not None] for turn in turns]
    kinds = layer_kinds(config, KINDS, default)
    step = optional_integer(config, "interleave_moe_layer_step", 1)
    with_experts = config.get("moe_layers")
    if with_experts is None:
        with_experts = range(step - 1, len(kinds), step)
    layers = [_layer(config, *layer) for layer in zip(kinds, turns, strict=True)]
    experts = ExpertsConfig(
        num_experts=expert_count(config),
        num_chosen=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "intermediate_size"),
        scoring="sigmoid_chosen",
        scales_input=True,
        shared_size=integer(config, "intermediate_size"),
    )
    layers = [
        replace(layer, experts=experts, intermediate_size=0) if index in with_experts else layer
        for index, layer in enumerate(layers)
    ]
    return usual_decoder(config, layers)


def _layer(config: Config, kind: str, turns: bool) -> LayerConfig:
    has_temperature = not turns and flag(config, "attn_temperature_tuning", True)
    return usual_layer(
        config,
        intermediate_size=integer(config, "intermediate_size_mlp"),
        rope=rope_of(config, head_dim_of(config), theta=500000.0, interleaved=True)
        if turns
        else None,
        chunk=integer(config, "attention_chunk_size") if kind == "chunked_attention" else None,
        qk_norm="unit" if turns and flag(config, "use_qk_norm", True) else None,
        query_temperature=(
            number(config, "floor_scale", 8192),
            number(config, "attn_scale", 0.1),
            1.0,
        )
        if has_temperature
        else None,
    )


_FF = "model.layers.{i}.feed_forward."

LLAMA4 = Family(
    name="llama4",
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    gguf_architectures=(),
    read=describe,
    hf_names=replace(
        HF_NAMES,
        gate=_FF + "gate_proj.weight",
        up=_FF + "up_proj.weight",
        down=_FF + "down_proj.weight",
        router=_FF + "router.weight",
        expert_gate_up=_FF + "experts.gate_up_proj",
        expert_gate="",
        expert_down=_FF + "experts.down_proj",
        experts_transposed=True,
        shared_gate=_FF + "shared_expert.gate_proj.weight",
        shared_up=_FF + "shared_expert.up_proj.weight",
        shared_down=_FF + "shared_expert.down_proj.weight",
    ),
)
