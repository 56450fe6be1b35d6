"""LFM2: gated short convolutions, and attention with q and k norms in some layers."""

from __future__ import annotations

from dataclasses import replace

from kvern.models.config import Config, DecoderConfig, Family, LayerConfig, ShortConvConfig
from kvern.models.families.common import (
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
from kvern.models.names import HF_NAMES

CONV, FULL = KINDS = ("conv", "full_attention")


def _inner(config: Config) -> int:
    """Width of the feed-forward part: two thirds of the stated one, scaled and rounded up."""
    inner = integer(config, "intermediate_size")
    if not flag(config, "block_auto_adjust_ff_dim", True):
        return inner
    inner = int(number(config, "block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
    multiple = optional_integer(config, "block_multiple_of", 256)
    return -(-inner // multiple) * multiple


def describe(config: Config) -> DecoderConfig:
    """Read an LFM2 configuration."""
    count, attending = integer(config, "num_hidden_layers"), config.get("full_attn_idxs")
    default = [FULL if attending is None or i in attending else CONV for i in range(count)]
    kinds = layer_kinds(config, KINDS, default)
    rope = rope_of(config, head_dim_of(config), theta=1e6)
    full = usual_layer(config, intermediate_size=_inner(config), rope=rope, qk_norm="head")
    kernel, bias = optional_integer(config, "conv_L_cache", 3), flag(config, "conv_bias")
    conv = LayerConfig(
        intermediate_size=full.intermediate_size,
        activation=full.activation,
        state=ShortConvConfig(kernel, bias),
    )
    return usual_decoder(
        config,
        [conv if kind == CONV else full for kind in kinds],
        norm_eps=number(config, "norm_eps", 1e-5),
        tie_embeddings=flag(config, "tie_word_embeddings", flag(config, "tie_embedding", True)),
    )


_LAYER = "model.layers.{i}."

LFM2 = Family(
    name="lfm2",
    architectures=("Lfm2ForCausalLM",),
    gguf_architectures=(),
    read=describe,
    hf_names=replace(
        HF_NAMES,
        final_norm="model.embedding_norm.weight",
        attention_norm=_LAYER + "operator_norm.weight",
        output=_LAYER + "self_attn.out_proj.weight",
        q_norm=_LAYER + "self_attn.q_layernorm.weight",
        k_norm=_LAYER + "self_attn.k_layernorm.weight",
        state_inputs=(_LAYER + "conv.in_proj.weight",),
        state_conv=_LAYER + "conv.conv.weight",
        state_output=_LAYER + "conv.out_proj.weight",
        mlp_norm=_LAYER + "ffn_norm.weight",
        gate=_LAYER + "feed_forward.w1.weight",
        up=_LAYER + "feed_forward.w3.weight",
        down=_LAYER + "feed_forward.w2.weight",
    ),
)
