"""DeepSeek V2 and V3, and MiniCPM3: latent attention.

In DeepSeek, experts compete in groups. Kimi K2 has V3's architecture.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kvern.errors import UnsupportedModelError
from kvern.models.config import (
    Config,
    DecoderConfig,
    ExpertsConfig,
    Family,
    LatentConfig,
    LayerConfig,
    RopeConfig,
)
from kvern.models.families.common import (
    activation,
    expert_count,
    flag,
    integer,
    number,
    optional_integer,
    rope_of,
    usual_decoder,
)
from kvern.models.names import GGUF_NAMES, HF_NAMES
from kvern.models.rope import scaling_kind

TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


def _with_magnitudes(rope: RopeConfig) -> RopeConfig:
    """YaRN's two magnitudes, which a GGUF file states as one: a tenth of either."""
    multiplier = rope.scaling.get("yarn_log_multiplier")
    if multiplier is None:
        return rope
    magnitude = 10 * float(multiplier)
    kept = {key: value for key, value in rope.scaling.items() if key != "attention_factor"}
    return replace(rope, scaling={**kept, "mscale": magnitude, "mscale_all_dim": magnitude})


def _layer(config: Config, inner: int, interleaved: bool) -> LayerConfig:
    """Latent attention with a dense feed-forward part of width ``inner``."""
    nope, rope_dim = integer(config, "qk_nope_head_dim"), integer(config, "qk_rope_head_dim")
    latent_dim = integer(config, "kv_lora_rank")
    rope = _with_magnitudes(
        rope_of({**config, "rotary_dim": rope_dim}, rope_dim, interleaved=interleaved)
    )
    scale = (nope + rope_dim) ** -0.5
    all_dim = rope.scaling.get("mscale_all_dim")
    if scaling_kind(rope.scaling) != "default" and all_dim and float(rope.scaling["factor"]) > 1:
        scale *= (0.1 * float(all_dim) * math.log(float(rope.scaling["factor"])) + 1.0) ** 2
    rank = config.get("q_lora_rank")
    return LayerConfig(
        num_heads=integer(config, "num_attention_heads"),
        num_kv_heads=1,
        key_dim=latent_dim + rope_dim,
        value_dim=integer(config, "v_head_dim"),
        scale=scale,
        intermediate_size=inner,
        activation=activation(config, "silu"),
        rope=rope,
        latent=LatentConfig(latent_dim, rope_dim, nope, None if rank is None else int(rank)),
    )


def dense_then_experts(
    config: Config, dense: LayerConfig, experts: ExpertsConfig
) -> list[LayerConfig]:
    """Dense layers first, experts after ``first_k_dense_replace`` of them."""
    first, step = (
        int(config.get("first_k_dense_replace") or 0),
        int(config.get("moe_layer_freq") or 1),
    )
    sparse = replace(dense, experts=experts, intermediate_size=0)
    count = integer(config, "num_hidden_layers")
    return [sparse if i >= first and i % step == 0 else dense for i in range(count)]


def _experts(config: Config, **changes: object) -> ExpertsConfig:
    inner = integer(config, "moe_intermediate_size")
    experts = ExpertsConfig(
        num_experts=expert_count(config),
        num_chosen=integer(config, "num_experts_per_tok"),
        intermediate_size=inner,
        routed_scale=number(config, "routed_scaling_factor", 1.0),
        shared_size=inner * int(config.get("n_shared_experts") or 0),
    )
    return replace(experts, **changes)  # type: ignore[arg-type]


def v3_experts(config: Config) -> ExpertsConfig:
    """DeepSeek-V3's experts: sigmoid scores, a bias per expert for the choice, groups by their best two."""
    return _experts(
        config,
        scoring="sigmoid",
        is_normalized=flag(config, "norm_topk_prob", True),
        has_score_bias=True,
        num_groups=optional_integer(config, "n_group", 1),
        num_chosen_groups=optional_integer(config, "topk_group", 1),
        group_score="top2",
    )


def describe_v2(config: Config) -> DecoderConfig:
    """Read a DeepSeek-V2 configuration."""
    method = config.get("topk_method") or "greedy"
    if method not in TOPK_METHODS[:2]:
        raise UnsupportedModelError(
            f"topk_method {method!r} is not one that the DeepSeek-V2 decoder computes "
            f"({', '.join(TOPK_METHODS[:2])})"
        )
    in_groups = method == "group_limited_greedy"
    experts = _experts(
        config,
        num_groups=optional_integer(config, "n_group", 1) if in_groups else 1,
        num_chosen_groups=optional_integer(config, "topk_group", 1) if in_groups else 1,
    )
    dense = _layer(config, integer(config, "intermediate_size"), interleaved=True)
    return usual_decoder(config, dense_then_experts(config, dense, experts))


def describe_v3(config: Config) -> DecoderConfig:
    """Read a DeepSeek-V3 configuration."""
    experts = v3_experts(config)
    interleaved = flag(config, "rope_interleave", True)
    dense = _layer(config, integer(config, "intermediate_size"), interleaved)
    return usual_decoder(config, dense_then_experts(config, dense, experts))


def describe_minicpm3(config: Config) -> DecoderConfig:
    """Read a MiniCPM3 configuration: embeddings, residuals and logits are scaled."""
    count, hidden = integer(config, "num_hidden_layers"), integer(config, "hidden_size")
    value_dim = optional_integer(
        config, "v_head_dim", hidden // integer(config, "num_attention_heads")
    )
    config = {**config, "v_head_dim": value_dim}
    layer = _layer(config, integer(config, "intermediate_size"), interleaved=False)
    return usual_decoder(
        config,
        [layer] * count,
        embedding_scale=number(config, "scale_emb", 12.0),
        residual_scale=number(config, "scale_depth", 1.4) / math.sqrt(count),
        logit_scale=number(config, "dim_model_base", 256.0) / hidden,
        tie_embeddings=flag(config, "tie_word_embeddings", True),
    )


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    gguf_architectures=(),
    read=describe_v3,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    gguf_rope_interleaved=True,
)


def variant(config: Config, family: Family) -> Family:
    """GGUF files of V3 call themselves deepseek2 and have routing biases."""
    return DEEPSEEK_V3 if config.get("model_type") == "deepseek_v3" else family


DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    gguf_architectures=("deepseek2",),
    read=describe_v2,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    gguf_rope_interleaved=True,
    variant=variant,
)

MINICPM3 = Family(
    name="minicpm3",
    architectures=("MiniCPM3ForCausalLM",),
    gguf_architectures=(),
    read=describe_minicpm3,
    hf_names=HF_NAMES,
)
