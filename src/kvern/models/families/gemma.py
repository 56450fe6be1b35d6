"""Gemma 1, 2 and 3: norm weights stored as w - 1, scaled embeddings, GELU gates.

From 2 on there are norms before and after each part, and sliding windows in most layers. In 2
attention and final logits are capped; in 3 there are q and k norms and two rotary bases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvern.errors import UnsupportedModelError
from kvern.models.config import Config, DecoderConfig, Family, LayerConfig, RopeConfig
from kvern.models.families.common import (
    activation,
    flag,
    head_dim_of,
    integer,
    layer_kinds,
    number,
    optional_integer,
    optional_number,
    rope_of,
    usual_decoder,
    usual_layer,
)
from kvern.models.names import GGUF_NAMES, HF_NAMES

FULL, SLIDING = KINDS = ("full_attention", "sliding_attention")
HIDDEN_PER_HEAD_SCALE = (46, 62)
"""Layers of the 27B models: the query scale is that of hidden_size / heads instead of head_dim.

GGUF files do not say so.
"""


def _gemma(
    config: Config, layers: Sequence[LayerConfig], cap: float | None = None
) -> DecoderConfig:
    if flag(config, "use_bidirectional_attention"):
        raise UnsupportedModelError(
            "the model attends to later tokens too: a new token changes old ones, "
            "so nothing can be cached"
        )
    return usual_decoder(
        config,
        layers,
        norm_offset=1.0,
        embedding_scale=integer(config, "hidden_size") ** 0.5,
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        logit_softcap=cap,
    )


def _layer(
    config: Config, rope: RopeConfig, window: int | None, default_cap: float | None
) -> LayerConfig:
    head_dim = head_dim_of(config)
    per_head = integer(config, "hidden_size") // integer(config, "num_attention_heads")
    is_largest = integer(config, "num_hidden_layers") in HIDDEN_PER_HEAD_SCALE
    scalar = number(config, "query_pre_attn_scalar", per_head if is_largest else head_dim)
    return usual_layer(
        config,
        activation=activation(config, "gelu_pytorch_tanh", ("hidden_activation", "hidden_act")),
        scale=scalar**-0.5,
        rope=rope,
        window=window,
        softcap=optional_number(config, "attn_logit_softcapping", default_cap),
    )


def describe_gemma(config: Config) -> DecoderConfig:
    """Gemma 1."""
    kind = activation(config, "gelu_pytorch_tanh", ("hidden_activation", "hidden_act"))
    layer = usual_layer(config, activation=kind)
    return _gemma(config, [layer] * integer(config, "num_hidden_layers"))


def describe_gemma2(config: Config) -> DecoderConfig:
    """Gemma 2: every other layer has a window; attention and final logits are capped."""
    count = integer(config, "num_hidden_layers")
    kinds = layer_kinds(config, KINDS, [KINDS[(index + 1) % 2] for index in range(count)])
    window, rope = (
        optional_integer(config, "sliding_window", 4096),
        rope_of(config, head_dim_of(config)),
    )
    layers = {
        kind: _layer(config, rope, window if kind == SLIDING else None, 50.0) for kind in set(kinds)
    }
    return _gemma(
        config, [layers[k] for k in kinds], optional_number(config, "final_logit_softcapping", 30.0)
    )


def describe_gemma3(config: Config) -> DecoderConfig:
    """Gemma 3: five layers with a window and rotary base 10,000, then one of base 1,000,000."""
    count, period = integer(config, "num_hidden_layers"), config.get("sliding_window_pattern") or 6
    default = [SLIDING if (index + 1) % int(period) else FULL for index in range(count)]
    kinds, head_dim = layer_kinds(config, KINDS, default), head_dim_of(config)
    full = rope_of(config, head_dim, FULL, theta=1e6)
    parameters = config.get("rope_parameters") or {}
    if SLIDING in parameters:
        local = rope_of(config, head_dim, SLIDING)
    else:
        base = number(config, "rope_local_base_freq", 10000.0)
        local = replace(full, theta=base, scaling={})
    window = optional_integer(config, "sliding_window", 4096)
    by_kind = {
        FULL: replace(_layer(config, full, None, None), qk_norm="head"),
        SLIDING: replace(_layer(config, local, window, None), qk_norm="head"),
    }
    cap = optional_number(config, "final_logit_softcapping")
    return _gemma(config, [by_kind[kind] for kind in kinds], cap)


SANDWICH_HF_NAMES = replace(
    HF_NAMES,
    post_attention_norm="model.layers.{i}.post_attention_layernorm.weight",
    mlp_norm="model.layers.{i}.pre_feedforward_layernorm.weight",
    post_mlp_norm="model.layers.{i}.post_feedforward_layernorm.weight",
)
SANDWICH_GGUF_NAMES = replace(
    GGUF_NAMES,
    post_attention_norm="blk.{i}.post_attention_norm.weight",
    post_mlp_norm="blk.{i}.post_ffw_norm.weight",
)

GEMMA = Family(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    gguf_architectures=("gemma",),
    read=describe_gemma,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
)

GEMMA2 = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    gguf_architectures=("gemma2",),
    read=describe_gemma2,
    hf_names=SANDWICH_HF_NAMES,
    gguf_names=SANDWICH_GGUF_NAMES,
)

GEMMA3 = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    gguf_architectures=("gemma3",),
    read=describe_gemma3,
    hf_names=SANDWICH_HF_NAMES,
    gguf_names=SANDWICH_GGUF_NAMES,
)
