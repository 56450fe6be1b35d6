"""OPT: learned positions that start at row 2, layer norms, biases, ReLU."""

from __future__ import annotations

from kvern.models.config import Config, DecoderConfig, Family
from kvern.models.families.common import (
    activation,
    flag,
    integer,
    layer_norm_decoder,
    refuse,
    usual_layer,
)
from kvern.models.names import TensorNames

FIRST_ROW = 2
"""Row of the position embedding that position 0 has."""


def describe(config: Config) -> DecoderConfig:
    """Read an OPT configuration; norms behind the parts (350M) are refused."""
    hidden = integer(config, "hidden_size")
    refuse(config, "do_layer_norm_before", True, "OPT")
    refuse(config, "_remove_final_layer_norm", False, "OPT")
    refuse(config, "layer_norm_elementwise_affine", True, "OPT")
    refuse(config, "word_embed_proj_dim", hidden, "OPT")
    layer = usual_layer(
        config,
        intermediate_size=integer(config, "ffn_dim"),
        activation=activation(config, "relu", ("activation_function",)),
        rope=None,
        is_gated=False,
    )
    bias = flag(config, "enable_bias", True)
    return layer_norm_decoder(
        config,
        layer,
        1e-5,
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        num_learned_positions=integer(config, "max_position_embeddings") + FIRST_ROW,
        position_offset=FIRST_ROW,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


_LAYER = "model.decoder.layers.{i}."

OPT = Family(
    name="opt",
    architectures=("OPTForCausalLM",),
    gguf_architectures=(),
    read=describe,
    hf_names=TensorNames(
        embedding="model.decoder.embed_tokens.weight",
        final_norm="model.decoder.final_layer_norm.weight",
        head="lm_head.weight",
        positions="model.decoder.embed_positions.weight",
        attention_norm=_LAYER + "self_attn_layer_norm.weight",
        q=_LAYER + "self_attn.q_proj.weight",
        k=_LAYER + "self_attn.k_proj.weight",
        v=_LAYER + "self_attn.v_proj.weight",
        output=_LAYER + "self_attn.out_proj.weight",
        mlp_norm=_LAYER + "final_layer_norm.weight",
        up=_LAYER + "fc1.weight",
        down=_LAYER + "fc2.weight",
    ),
)
