"""MiniMax-M2: q and k normed over all heads, partial rotary, experts scored by biased sigmoids."""

from __future__ import annotations

from dataclasses import replace

from kvern.models.config import Config, DecoderConfig, ExpertsConfig, Family
from kvern.models.families.common import (
    expert_count,
    integer,
    usual_decoder,
    usual_layer,
)
from kvern.models.families.mixtral import MIXTRAL


def describe(config: Config) -> DecoderConfig:
    """Read a MiniMax-M2 configuration."""
    experts = ExpertsConfig(
        num_experts=expert_count(config),
        num_chosen=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "intermediate_size"),
        scoring="sigmoid",
        is_normalized=True,
        has_score_bias=True,
    )
    layer = replace(usual_layer(config, qk_norm="all", experts=experts), intermediate_size=0)
    return usual_decoder(config, [layer] * integer(config, "num_hidden_layers"))


MINIMAX_M2 = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    gguf_architectures=(),
    read=describe,
    hf_names=replace(
        MIXTRAL.hf_names,
        score_bias="model.layers.{i}.block_sparse_moe.e_score_correction_bias",
    ),
)
