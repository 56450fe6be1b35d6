"""OLMo 2 and 3 (norms only behind each part, q and k normed over all heads) and OLMoE (experts)."""

from __future__ import annotations

from dataclasses import replace

from kvern.models.config import Config, DecoderConfig, ExpertsConfig, Family
from kvern.models.families.common import (
    expert_count,
    flag,
    head_dim_of,
    integer,
    layer_kinds,
    refuse,
    rope_of,
    usual_decoder,
    usual_layer,
)
from kvern.models.names import GGUF_NAMES, HF_NAMES

FULL, SLIDING = KINDS = ("full_attention", "sliding_attention")


def describe(config: Config) -> DecoderConfig:
    """Read an OLMo 2 or 3 configuration; in 3 rotary scaling is for layers without a window."""
    count = integer(config, "num_hidden_layers")
    layer = usual_layer(config, qk_norm="all")
    if config.get("sliding_window") is None:
        return usual_decoder(config, [layer] * count)
    kinds = layer_kinds(config, KINDS, [SLIDING if (i + 1) % 4 else FULL for i in range(count)])
    full, plain = (rope_of(config, head_dim_of(config), kind) for kind in KINDS)
    local = replace(
        layer,
        window=integer(config, "sliding_window"),
        rope=replace(plain, scaling=_unscaled(config)),
    )
    by_kind = {FULL: replace(layer, rope=full), SLIDING: local}
    return usual_decoder(config, [by_kind[kind] for kind in kinds])


def _unscaled(config: Config) -> dict[str, object]:
    """Sliding layers keep the plain rotation, unless the configuration has an entry for them."""
    entry = (config.get("rope_parameters") or {}).get(SLIDING)
    return dict(entry) if entry else {}


def describe_olmoe(config: Config) -> DecoderConfig:
    """Read an OLMoE configuration."""
    refuse(config, "clip_qkv", None, "OLMoE")
    experts = ExpertsConfig(
        num_experts=expert_count(config),
        num_chosen=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "intermediate_size"),
        is_normalized=flag(config, "norm_topk_prob"),
    )
    layer = replace(usual_layer(config, qk_norm="all", experts=experts), intermediate_size=0)
    return usual_decoder(config, [layer] * integer(config, "num_hidden_layers"))


OLMO2 = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    gguf_architectures=("olmo2",),
    read=describe,
    hf_names=replace(
        HF_NAMES,
        attention_norm=None,
        post_attention_norm="model.layers.{i}.post_attention_layernorm.weight",
        mlp_norm=None,
        post_mlp_norm="model.layers.{i}.post_feedforward_layernorm.weight",
    ),
    gguf_names=replace(
        GGUF_NAMES,
        attention_norm=None,
        post_attention_norm="blk.{i}.post_attention_norm.weight",
        mlp_norm=None,
        post_mlp_norm="blk.{i}.post_ffw_norm.weight",
    ),
)

OLMOE = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    gguf_architectures=("olmoe",),
    read=describe_olmoe,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
)
