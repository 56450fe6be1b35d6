"""Phi-3 and Phi-4: Llama with q, k, v in one matrix and gate, up in another; longrope; windows."""

from __future__ import annotations

from dataclasses import replace

from kvern.models.config import Config, DecoderConfig, Family
from kvern.models.families.common import (
    head_dim_of,
    integer,
    rope_of,
    usual_decoder,
    usual_layer,
)
from kvern.models.names import GGUF_NAMES, HF_NAMES
from kvern.models.rope import scaling_kind


def describe(config: Config) -> DecoderConfig:
    """Read a Phi-3 configuration; with longrope the context ends at the original length."""
    rope = rope_of(config, head_dim_of(config))
    if scaling_kind(rope.scaling) == "yarn":  # what the first files called longrope
        rope = replace(rope, scaling={**rope.scaling, "rope_type": "longrope"})
    window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
    layer = usual_layer(config, rope=rope, window=window)
    decoder = usual_decoder(config, [layer] * integer(config, "num_hidden_layers"))
    return replace(decoder, qkv_bias=False, output_bias=False)


PHI3 = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    gguf_architectures=("phi3",),
    read=describe,
    hf_names=replace(
        HF_NAMES,
        qkv="model.layers.{i}.self_attn.qkv_proj.weight",
        gate_up="model.layers.{i}.mlp.gate_up_proj.weight",
    ),
    gguf_names=replace(GGUF_NAMES, qkv="blk.{i}.attn_qkv.weight", gate_up="blk.{i}.ffn_up.weight"),
)
