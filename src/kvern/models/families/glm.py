"""GLM-4.5: partial rotary, biases on q, k and v, and DeepSeek-V3's experts without latent attention."""

from __future__ import annotations

from dataclasses import replace

from kvern.models.config import Config, DecoderConfig, Family
from kvern.models.families.common import (
    flag,
    head_dim_of,
    rope_of,
    usual_decoder,
    usual_layer,
)
from kvern.models.families.deepseek import dense_then_experts, v3_experts
from kvern.models.names import HF_NAMES


def describe(config: Config) -> DecoderConfig:
    """Read a GLM-4.5 configuration."""
    rope = rope_of(config, head_dim_of(config))
    norm = "head" if flag(config, "use_qk_norm") else None
    dense = usual_layer(config, rope=rope, qk_norm=norm)
    decoder = usual_decoder(config, dense_then_experts(config, dense, v3_experts(config)))
    return replace(decoder, output_bias=False)


GLM4_MOE = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    gguf_architectures=(),
    read=describe,
    hf_names=HF_NAMES,
)
