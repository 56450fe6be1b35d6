"""Mixtral: Llama with experts."""

from __future__ import annotations

from dataclasses import replace

from kvern.models.config import Config, DecoderConfig, ExpertsConfig, Family
from kvern.models.families.common import (
    expert_count,
    integer,
    optional_integer,
    usual_decoder,
    usual_layer,
)
from kvern.models.names import HF_NAMES


def describe(config: Config) -> DecoderConfig:
    """Read a Mixtral configuration."""
    experts = ExpertsConfig(
        num_experts=expert_count(config),
        num_chosen=optional_integer(config, "num_experts_per_tok", 2),
        intermediate_size=integer(config, "intermediate_size"),
        is_normalized=True,
    )
    window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
    layer = replace(usual_layer(config, window=window, experts=experts), intermediate_size=0)
    return usual_decoder(config, [layer] * integer(config, "num_hidden_layers"))


_MOE = "model.layers.{i}.block_sparse_moe."

MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    gguf_architectures=(),
    read=describe,
    hf_names=replace(
        HF_NAMES,
        router=_MOE + "gate.weight",
        expert_gate=_MOE + "experts.{e}.w1.weight",
        expert_up=_MOE + "experts.{e}.w3.weight",
        expert_down=_MOE + "experts.{e}.w2.weight",
    ),
)
