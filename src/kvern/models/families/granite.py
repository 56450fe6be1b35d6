"""Granite 3: Llama with four factors, on embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from kvern.models.config import Config, DecoderConfig, Family
from kvern.models.families.common import integer, number, usual_decoder, usual_layer
from kvern.models.names import GGUF_NAMES, HF_NAMES


def describe(config: Config) -> DecoderConfig:
    """Read a Granite configuration."""
    layer = usual_layer(config, scale=number(config, "attention_multiplier", 1.0))
    return usual_decoder(
        config,
        [layer] * integer(config, "num_hidden_layers"),
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / number(config, "logits_scaling", 1.0),
    )


GRANITE = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    gguf_architectures=("granite",),
    describe=describe,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    gguf_rope_interleaved=True,
)
