"""SmolLM3: Llama in which every fourth layer has no rotary embedding."""

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
from kvern.models.names import GGUF_NAMES, HF_NAMES

KINDS = ("full_attention", "sliding_attention")


def rotary_layers(config: Config) -> list[bool]:
    """Which layers turn: ``no_rope_layers`` holds 1 for those that do, or every fourth does not."""
    count = integer(config, "num_hidden_layers")
    period = int(config.get("no_rope_layer_interval") or 4)
    given = config.get("no_rope_layers")
    return [bool(x) for x in given] if given else [bool((i + 1) % period) for i in range(count)]


def describe(config: Config) -> DecoderConfig:
    """Read a SmolLM3 configuration."""
    count = integer(config, "num_hidden_layers")
    kinds = layer_kinds(config, KINDS, ["full_attention"] * count)
    window = integer(config, "sliding_window") if flag(config, "use_sliding_window") else None
    turning = usual_layer(config)
    layers = [
        replace(
            turning,
            rope=turning.rope if turns else None,
            window=window if kind == "sliding_attention" else None,
        )
        for kind, turns in zip(kinds, rotary_layers(config), strict=True)
    ]
    return usual_decoder(config, layers, tie_embeddings=flag(config, "tie_word_embeddings", True))


SMOLLM3 = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    gguf_architectures=("smollm3",),
    read=describe,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    gguf_rope_interleaved=True,
)
