"""gpt-oss: alternating windows, a learned sink per head, biases, experts with a clamped SwiGLU."""

from __future__ import annotations

from dataclasses import replace

from kvern.models.config import Config, DecoderConfig, ExpertsConfig, Family
from kvern.models.families.common import (
    expert_count,
    flag,
    integer,
    layer_kinds,
    number,
    optional_integer,
    usual_decoder,
    usual_layer,
)
from kvern.models.names import HF_NAMES

FULL, SLIDING = KINDS = ("full_attention", "sliding_attention")


def describe(config: Config) -> DecoderConfig:
    """Read a gpt-oss configuration."""
    count = integer(config, "num_hidden_layers")
    kinds = layer_kinds(config, KINDS, [KINDS[(index + 1) % 2] for index in range(count)])
    experts = ExpertsConfig(
        num_experts=expert_count(config),
        num_chosen=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "intermediate_size"),
        scoring="softmax_chosen",
        has_router_bias=True,
        has_bias=True,
        activation="clamped_swiglu",
        clamp=number(config, "swiglu_limit", 7.0),
        alpha=number(config, "swiglu_alpha", 1.702),
    )
    full = replace(usual_layer(config, has_sinks=True, experts=experts), intermediate_size=0)
    sliding = replace(full, window=optional_integer(config, "sliding_window", 128))
    layers = [sliding if kind == SLIDING else full for kind in kinds]
    bias = flag(config, "attention_bias", True)
    return usual_decoder(config, layers, qkv_bias=bias, output_bias=bias)


_MLP = "model.layers.{i}.mlp."

GPT_OSS = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    gguf_architectures=(),
    read=describe,
    hf_names=replace(
        HF_NAMES,
        router=_MLP + "router.weight",
        expert_gate_up=_MLP + "experts.gate_up_proj",
        expert_gate="",
        expert_down=_MLP + "experts.down_proj",
        experts_transposed=True,
        experts_interleaved=True,
    ),
)
