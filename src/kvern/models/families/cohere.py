"""Command R: layer norms without bias, attention beside the feed-forward part, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from kvern.models.config import Config, DecoderConfig, Family
from kvern.models.families.common import (
    flag,
    head_dim_of,
    integer,
    number,
    refuse,
    rope_of,
    usual_decoder,
    usual_layer,
)
from kvern.models.names import GGUF_NAMES, HF_NAMES


def describe(config: Config) -> DecoderConfig:
    """Read a Command R configuration; Command R+'s norms on q and k are refused."""
    refuse(config, "use_qk_norm", False, "Command R")
    rope = rope_of(config, head_dim_of(config), theta=500_000.0, interleaved=True)
    return usual_decoder(
        config,
        [usual_layer(config, rope=rope)] * integer(config, "num_hidden_layers"),
        norm="layer",
        norm_eps=number(config, "layer_norm_eps", 1e-5),
        is_parallel=True,
        logit_scale=number(config, "logit_scale", number(config, "logits_scaling", 0.0625)),
        tie_embeddings=flag(config, "tie_word_embeddings", True),
    )


COHERE = Family(
    name="cohere",
    architectures=("CohereForCausalLM",),
    gguf_architectures=("command-r",),
    read=describe,
    hf_names=replace(HF_NAMES, mlp_norm=None),
    gguf_names=replace(GGUF_NAMES, mlp_norm=None),
    gguf_rope_interleaved=True,
)
