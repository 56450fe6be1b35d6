"""Gemma 4: window layers and full layers of other head sizes; late layers read earlier ones' caches.

Norm weights are stored as they are, values are normed too, attention scores are not scaled, and the
small models add an embedding of each token for each layer.
"""

from __future__ import annotations

from dataclasses import replace

from kvern.errors import UnsupportedModelError
from kvern.models.config import Config, DecoderConfig, ExpertsConfig, Family, LayerConfig
from kvern.models.families.common import (
    activation,
    expert_count,
    flag,
    integer,
    layer_kinds,
    optional_integer,
    optional_number,
    owner_of,
    rope_of,
    usual_decoder,
    usual_layer,
)
from kvern.models.families.gemma import FULL, KINDS, SANDWICH_HF_NAMES, SLIDING

ROPE_DEFAULTS = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _full_heads(config: Config, usual: LayerConfig, shares_keys: bool) -> tuple[int, int]:
    """Width and number of the KV heads of full layers.

    transformers saves them as ``per_layer_config``: layer number to the fields that differ there,
    the same for all full layers.
    """
    saved = config.get("per_layer_config")
    if saved is not None:
        own: Config = next(iter(saved.values()), {})
        if any(fields != own for fields in saved.values()):
            raise UnsupportedModelError("per_layer_config says different things of full layers")
        return (
            optional_integer(own, "head_dim", usual.key_dim),
            optional_integer(own, "num_key_value_heads", usual.num_kv_heads),
        )
    heads = usual.num_kv_heads
    if shares_keys:
        heads = optional_integer(config, "num_global_key_value_heads", heads)
    return optional_integer(config, "global_head_dim", 512), heads


def _layers_by_kind(config: Config) -> dict[str, LayerConfig]:
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
    shares_keys = flag(config, "attention_k_eq_v")
    head_dim, kv_heads = _full_heads(config, usual, shares_keys)
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


def _experts(config: Config) -> ExpertsConfig:
    """Experts beside the dense part of every layer."""
    return ExpertsConfig(
        num_experts=expert_count(config),
        num_chosen=integer(config, "top_k_experts"),
        intermediate_size=integer(config, "moe_intermediate_size"),
        is_normalized=True,
        has_expert_scale=True,
        activation=activation(config, "gelu_pytorch_tanh", ("hidden_activation",)),
    )


def describe(config: Config) -> DecoderConfig:
    """Read a Gemma 4 configuration, or the text part of a multimodal one."""
    if config.get("use_bidirectional_attention") == "all":
        raise UnsupportedModelError(
            "the model attends to later tokens too: a new token changes old ones, "
            "so nothing can be cached"
        )
    count = integer(config, "num_hidden_layers")
    usual = [SLIDING if (i + 1) % 6 else FULL for i in range(count - 1)]
    kinds = layer_kinds(config, KINDS, [*usual, FULL])
    by_kind, layers = _layers_by_kind(config), []
    experts = _experts(config) if flag(config, "enable_moe_block") else None
    first_shared = count - int(config.get("num_kv_shared_layers") or 0)
    for index, kind in enumerate(kinds):
        layer = replace(by_kind[kind], experts=experts, has_both=experts is not None)
        owner = owner_of(kinds, index, first_shared)
        if owner is not None:
            width = 2 if flag(config, "use_double_wide_mlp") else 1
            layer = replace(
                layer,
                share_with=owner,
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
    read=describe,
    hf_names=replace(
        SANDWICH_HF_NAMES,
        router=_LAYER + "router.proj.weight",
        router_norm=_LAYER + "router.scale",
        expert_scale=_LAYER + "router.per_expert_scale",
        expert_gate_up=_LAYER + "experts.gate_up_proj",
        expert_gate=_LAYER + "experts.{e}.gate_proj.weight",
        expert_up=_LAYER + "experts.{e}.up_proj.weight",
        expert_down=_LAYER + "experts.down_proj",
        expert_down_each=_LAYER + "experts.{e}.down_proj.weight",
        experts_norm=_LAYER + "pre_feedforward_layernorm_2.weight",
        post_dense_norm=_LAYER + "post_feedforward_layernorm_1.weight",
        post_experts_norm=_LAYER + "post_feedforward_layernorm_2.weight",
        layer_scale=_LAYER + "layer_scalar",
        per_layer_embedding="model.embed_tokens_per_layer.weight",
        per_layer_input="model.per_layer_model_projection.weight",
        per_layer_input_norm="model.per_layer_projection_norm.weight",
        per_layer_gate=_LAYER + "per_layer_input_gate.weight",
        per_layer_output=_LAYER + "per_layer_projection.weight",
        per_layer_output_norm=_LAYER + "post_per_layer_input_norm.weight",
    ),
)
