"""StarCoder2: layer norms, biases everywhere, a plain GELU part, sometimes a sliding window."""

from __future__ import annotations

from dataclasses import replace

from kvern.models.config import Config, DecoderConfig, Family
from kvern.models.families.common import (
    activation,
    flag,
    integer,
    layer_norm_decoder,
    number,
    usual_layer,
)
from kvern.models.names import GGUF_NAMES, HF_NAMES


def describe(config: Config) -> DecoderConfig:
    """Read a StarCoder2 configuration."""
    layer = usual_layer(
        config,
        activation=activation(config, "gelu_pytorch_tanh"),
        window=None if config.get("sliding_window") is None else integer(config, "sliding_window"),
        is_gated=False,
    )
    bias = flag(config, "use_bias", True)
    return layer_norm_decoder(
        config,
        layer,
        number(config, "norm_epsilon", number(config, "layer_norm_eps", 1e-5)),
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


STARCODER2 = Family(
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    gguf_architectures=("starcoder2",),
    read=describe,
    hf_names=replace(
        HF_NAMES,
        gate=None,
        up="model.layers.{i}.mlp.c_fc.weight",
        down="model.layers.{i}.mlp.c_proj.weight",
    ),
    gguf_names=replace(GGUF_NAMES, gate=None),
)
