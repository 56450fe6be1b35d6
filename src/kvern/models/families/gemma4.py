"""Gemma 4: window layers and full layers of other head sizes; late layers read earlier ones' caches.

Norm weights are stored as they are, values are normed too, attention scores are not scaled, and the
small models add an embedding of each token for each layer.
"""

from __future__ import annotations

from dataclasses import replace

from kvern.errors import UnsupportedModelError
from kvern.models.config import Config, DecoderConfig, Family, LayerConfig
from kvern.models.families.common import (
    activation,
    flag,
    integer,
    layer_kinds,
    optional_integer,
    optional_number,
    rope_of,
    text_config,
    usual_decoder,
    usual_layer,
)
from kvern.models.families.gemma import FULL, KINDS, SANDWICH_HF_NAMES, SLIDING

ROPE_DEFAULTS = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _layers_by_kind(config: Config, kinds: list[str]) -> dict[str, LayerConfig]:
    """A window layer and a full layer, whose heads may be wider and fewer."""
    fields = {**config, "rope_parameters": config.get("rope_parameters") or ROPE_DEFAULTS}
    usual = usual_layer(
        fields,
        activation=activation(config, "gelu_pytorch_tanh", ("hidden_activation",)),
        scale=1.0,
        qk_norm="head",
        has_value_norm=True,
        rope=None,
    )
    nested = config.get("per_layer_config") or {}
    first_full = nested.get(str(kinds.index(FULL)), nested.get(FULL, {})) if FULL in kinds else {}
    stated = {**config, **{f"global_{k}": v for k, v in first_full.items()}}
    head_dim = optional_integer(stated, "global_head_dim", 512)
    shares_keys = flag(config, "attention_k_eq_v")
    kv_heads = usual.num_kv_heads
    if shares_keys:
        kv_heads = optional_integer(stated, "num_global_key_value_heads", kv_heads)
    kv_heads = optional_integer(stated, "global_num_key_value_heads", kv_heads)
    return {
        SLIDING: replace(
            usual,
            rope=rope_of(fields, usual.key_dim, SLIDING),
            window=optional_integer(config, "sliding_window", 512),
        ),
        FULL: replace(
            usual,
            num_kv_heads=kv_heads,
            key_dim=head_dim,
            value_dim=head_dim,
            rope=rope_of(fields, head_dim, FULL),
            keys_are_values=shares_keys,
        ),
    }


def describe(config: Config) -> DecoderConfig:
    """Read a Gemma 4 configuration, or the text part of a multimodal one."""
    config = text_config(config)
    if config.get("use_bidirectional_attention") == "all":
        raise UnsupportedModelError(
            "the model attends to later tokens too: a new token changes old ones, "
            "so nothing can be cached"
        )
    if flag(config, "enable_moe_block"):
        raise UnsupportedModelError("Gemma 4 with experts has no decoder here; the dense ones have")
    count = integer(config, "num_hidden_layers")
    kinds = layer_kinds(config, KINDS, [SLIDING if (i + 1) % 6 else FULL for i in range(count)])
    by_kind, layers = _layers_by_kind(config, kinds), []
    first_shared = count - int(config.get("num_kv_shared_layers") or 0)
    for index, kind in enumerate(kinds):
        layer = by_kind[kind]
        if index >= first_shared:
            owners = [i for i in range(first_shared) if kinds[i] == kind]
            width = 2 if flag(config, "use_double_wide_mlp") else 1
            layer = replace(
                layer,
                share_with=owners[-1],
                has_value_norm=False,
                intermediate_size=width * layer.intermediate_size,
            )
        layers.append(layer)
    return usual_decoder(
        config,
        layers,
        embedding_scale=integer(config, "hidden_size") ** 0.5,
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        logit_softcap=optional_number(config, "final_logit_softcapping"),
        has_layer_scale=True,
        per_layer_size=int(config.get("hidden_size_per_layer_input", 256) or 0),
        per_layer_activation=layers[0].activation,
    )


_LAYER = "model.layers.{i}."

GEMMA4 = Family(
    name="gemma4",
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    gguf_architectures=(),
    describe=describe,
    hf_names=replace(
        SANDWICH_HF_NAMES,
        layer_scale=_LAYER + "layer_scalar",
        per_layer_embedding="model.embed_tokens_per_layer.weight",
        per_layer_input="model.per_layer_model_projection.weight",
        per_layer_input_norm="model.per_layer_projection_norm.weight",
        per_layer_gate=_LAYER + "per_layer_input_gate.weight",
        per_layer_output=_LAYER + "per_layer_projection.weight",
        per_layer_output_norm=_LAYER + "post_per_layer_input_norm.weight",
    ),
)
