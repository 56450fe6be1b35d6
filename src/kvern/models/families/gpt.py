"""GPT-2 (learned positions), GPT-J and GPT-NeoX / Pythia (partial rotary, parallel residual)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvern.models.config import Config, DecoderConfig, Family, LayerConfig, RopeConfig
from kvern.models.families.common import (
    activation,
    flag,
    head_dim_of,
    integer,
    layer_norm_decoder,
    number,
    optional_integer,
    refuse,
    rope_of,
    usual_layer,
)
from kvern.models.names import TensorNames

GPT2_FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}


def grouped_rows(layer: LayerConfig) -> Any:
    """Rows of a matrix that holds, per KV head, its queries, key and value: q first, then k, then v."""
    group = layer.num_heads // layer.num_kv_heads
    shape = layer.num_kv_heads, group + 2, layer.key_dim
    rows = np.arange(layer.num_kv_heads * (group + 2) * layer.key_dim).reshape(shape)
    return np.concatenate(
        [rows[:, :group].ravel(), rows[:, group].ravel(), rows[:, group + 1].ravel()]
    )


def _usual_names(config: Config) -> dict[str, Any]:
    """A configuration with GPT-2's field names, under the usual ones too."""
    fields: dict[str, Any] = dict(config)
    for theirs, ours in GPT2_FIELDS.items():
        if fields.get(ours) is None:
            fields[ours] = config.get(theirs)
    return fields


def _layer(fields: Config, rope: RopeConfig | None) -> LayerConfig:
    """A layer without gates, four times as wide inside unless the configuration says otherwise."""
    return usual_layer(
        fields,
        intermediate_size=optional_integer(
            fields, "intermediate_size", 4 * integer(fields, "hidden_size")
        ),
        activation=activation(fields, "gelu_new", ("activation_function",)),
        rope=rope,
        is_gated=False,
    )


def describe_gptj(config: Config) -> DecoderConfig:
    """Read a GPT-J configuration: one norm for both parts, neighbouring rotary pairs."""
    fields = {"rotary_dim": 64, **_usual_names(config)}
    layer = _layer(fields, rope_of(fields, head_dim_of(fields), interleaved=True))
    return layer_norm_decoder(
        fields,
        layer,
        number(fields, "layer_norm_eps", 1e-5),
        is_parallel=True,
        head_bias=True,
        mlp_bias=True,
    )


def describe_gpt2(config: Config) -> DecoderConfig:
    """Read a GPT-2 configuration, with its own field names."""
    fields = _usual_names(config)
    refuse(config, "scale_attn_by_inverse_layer_idx", False, "GPT-2")
    refuse(config, "scale_attn_weights", True, "GPT-2")
    refuse(config, "add_cross_attention", False, "GPT-2")
    layer = _layer(fields, None)
    return layer_norm_decoder(
        fields,
        layer,
        number(fields, "layer_norm_eps", 1e-5),
        num_learned_positions=integer(fields, "max_position_embeddings"),
        tie_embeddings=flag(fields, "tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def describe_neox(config: Config) -> DecoderConfig:
    """Read a GPT-NeoX configuration."""
    head_dim = head_dim_of(config)
    fields: dict[str, Any] = {"partial_rotary_factor": number(config, "rotary_pct", 0.25), **config}
    fields["num_key_value_heads"] = integer(config, "num_attention_heads")
    layer = usual_layer(
        fields,
        activation=activation(config, "gelu"),
        rope=rope_of(fields, head_dim, theta=number(config, "rotary_emb_base", 10000.0)),
        is_gated=False,
    )
    bias = flag(config, "attention_bias", True)
    return layer_norm_decoder(
        config,
        layer,
        number(config, "layer_norm_eps", 1e-5),
        is_parallel=flag(config, "use_parallel_residual", True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
    )


_H, _NEOX, _BLOCK = "transformer.h.{i}.", "gpt_neox.layers.{i}.", "blk.{i}."

PLAIN_GGUF_NAMES = TensorNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    positions="position_embd.weight",
    attention_norm=_BLOCK + "attn_norm.weight",
    qkv=_BLOCK + "attn_qkv.weight",
    output=_BLOCK + "attn_output.weight",
    mlp_norm=_BLOCK + "ffn_norm.weight",
    up=_BLOCK + "ffn_up.weight",
    down=_BLOCK + "ffn_down.weight",
)

GPT2 = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    gguf_architectures=("gpt2",),
    read=describe_gpt2,
    hf_names=TensorNames(
        embedding="transformer.wte.weight",
        final_norm="transformer.ln_f.weight",
        head="lm_head.weight",
        positions="transformer.wpe.weight",
        attention_norm=_H + "ln_1.weight",
        qkv=_H + "attn.c_attn.weight",
        output=_H + "attn.c_proj.weight",
        mlp_norm=_H + "ln_2.weight",
        up=_H + "mlp.c_fc.weight",
        down=_H + "mlp.c_proj.weight",
    ),
    gguf_names=PLAIN_GGUF_NAMES,
    is_transposed=True,
)

GPTJ = Family(
    name="gptj",
    architectures=("GPTJForCausalLM",),
    gguf_architectures=(),
    read=describe_gptj,
    hf_names=TensorNames(
        embedding="transformer.wte.weight",
        final_norm="transformer.ln_f.weight",
        head="lm_head.weight",
        attention_norm=_H + "ln_1.weight",
        q=_H + "attn.q_proj.weight",
        k=_H + "attn.k_proj.weight",
        v=_H + "attn.v_proj.weight",
        output=_H + "attn.out_proj.weight",
        up=_H + "mlp.fc_in.weight",
        down=_H + "mlp.fc_out.weight",
    ),
)

GPT_NEOX = Family(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    gguf_architectures=("gptneox",),
    read=describe_neox,
    hf_names=TensorNames(
        embedding="gpt_neox.embed_in.weight",
        final_norm="gpt_neox.final_layer_norm.weight",
        head="embed_out.weight",
        attention_norm=_NEOX + "input_layernorm.weight",
        qkv=_NEOX + "attention.query_key_value.weight",
        output=_NEOX + "attention.dense.weight",
        mlp_norm=_NEOX + "post_attention_layernorm.weight",
        up=_NEOX + "mlp.dense_h_to_4h.weight",
        down=_NEOX + "mlp.dense_4h_to_h.weight",
    ),
    gguf_names=PLAIN_GGUF_NAMES,
    fused_rows=grouped_rows,
)
