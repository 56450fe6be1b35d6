"""Falcon: multi-query attention beside the feed-forward part, layer norms, plain GELU."""

from __future__ import annotations

from dataclasses import replace

from kvern.models.config import Config, DecoderConfig, Family
from kvern.models.families.common import (
    activation,
    flag,
    integer,
    layer_norm_decoder,
    number,
    optional_integer,
    refuse,
    usual_layer,
)
from kvern.models.families.gpt import PLAIN_GGUF_NAMES, grouped_rows
from kvern.models.names import TensorNames


def describe(config: Config) -> DecoderConfig:
    """Read a Falcon configuration."""
    refuse(config, "alibi", False, "Falcon")
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    is_new = flag(config, "new_decoder_architecture")
    kv_heads = optional_integer(config, "num_kv_heads", heads)
    if not is_new:
        kv_heads = 1 if flag(config, "multi_query", True) else heads
    fields = {**config, "num_key_value_heads": kv_heads}
    layer = usual_layer(
        fields,
        intermediate_size=optional_integer(config, "ffn_hidden_size", 4 * hidden),
        activation=activation(config, "gelu", ("activation",)),
        is_gated=False,
    )
    bias = flag(config, "bias")
    return layer_norm_decoder(
        fields,
        layer,
        number(config, "layer_norm_epsilon", number(config, "layer_norm_eps", 1e-5)),
        is_parallel=is_new or flag(config, "parallel_attn", True),
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def variant(config: Config, family: Family) -> Family:
    """Norm names: one norm for both parts (7B), one each (40B), or a serial layer (1B)."""
    is_new, names = flag(config, "new_decoder_architecture"), family.hf_names
    if is_new and optional_integer(config, "num_ln_in_parallel_attn", 2) == 2:
        names = replace(names, attention_norm=_H + "ln_attn.weight", mlp_norm=_H + "ln_mlp.weight")
    elif not is_new and not flag(config, "parallel_attn", True):
        names = replace(names, mlp_norm=_H + "post_attention_layernorm.weight")
    return replace(family, hf_names=names)


_H = "transformer.h.{i}."

FALCON = Family(
    name="falcon",
    architectures=("FalconForCausalLM",),
    gguf_architectures=("falcon",),
    read=describe,
    variant=variant,
    hf_names=TensorNames(
        embedding="transformer.word_embeddings.weight",
        final_norm="transformer.ln_f.weight",
        head="lm_head.weight",
        attention_norm=_H + "input_layernorm.weight",
        qkv=_H + "self_attention.query_key_value.weight",
        output=_H + "self_attention.dense.weight",
        up=_H + "mlp.dense_h_to_4h.weight",
        down=_H + "mlp.dense_4h_to_h.weight",
    ),
    gguf_names=replace(PLAIN_GGUF_NAMES, mlp_norm=None),
    fused_rows=grouped_rows,
)
