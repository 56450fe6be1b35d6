"""The Llama family: RMS norm, rotary GQA, SwiGLU.

Llama 2 and 3, SmolLM2, TinyLlama, Mistral, Ministral.
"""

from __future__ import annotations

from dataclasses import replace

from kvern.models.config import Config, DecoderConfig, Family
from kvern.models.families.common import (
    flag,
    integer,
    layer_kinds,
    usual_decoder,
    usual_layer,
)
from kvern.models.families.mixtral import describe as describe_experts
from kvern.models.names import GGUF_NAMES, HF_NAMES

KINDS = ("full_attention", "sliding_attention")


def describe(config: Config) -> DecoderConfig:
    """Read a Llama or Mistral configuration; a window holds for every layer or for those named.

    Raises:
        ModelError: a field is missing or not a number.
        UnsupportedModelError: an activation or layer kind that the decoder does not compute.
    """
    count = integer(config, "num_hidden_layers")
    window = config.get("sliding_window")
    if window is None or not flag(config, "use_sliding_window", True):
        return usual_decoder(config, [usual_layer(config)] * count)
    window = integer(config, "sliding_window")
    kinds = layer_kinds(config, KINDS, ["sliding_attention"] * count)
    layers = {
        kind: usual_layer(config, window=None if kind == KINDS[0] else window)
        for kind in set(kinds)
    }
    return usual_decoder(config, [layers[kind] for kind in kinds])


def describe_ministral3(config: Config) -> DecoderConfig:
    """Read a Ministral 3 configuration: queries grow with their distance past the original length."""
    decoder = describe(config)
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    beta = scaling.get("llama_4_scaling_beta")
    if not beta:
        return decoder
    floor = integer(scaling, "original_max_position_embeddings")
    layers = (
        replace(layer, query_temperature=(float(floor), float(beta), 0.0))
        for layer in decoder.layers
    )
    return replace(decoder, layers=tuple(layers))


def variant(config: Config, family: Family) -> Family:
    """A GGUF file of Mixtral calls itself llama, and has experts."""
    return replace(family, read=describe_experts) if config.get("num_experts") else family


LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM"),
    gguf_architectures=("llama",),
    read=describe,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    gguf_rope_interleaved=True,
    variant=variant,
)

MINISTRAL3 = Family(
    name="ministral3",
    architectures=("Ministral3ForCausalLM",),
    gguf_architectures=(),
    read=describe_ministral3,
    hf_names=HF_NAMES,
)
