"""Qwen: Qwen2 and 2.5 (biases on q, k, v), Qwen3 (norms on q and k), and their experts."""

from __future__ import annotations

from dataclasses import replace

from kvern.models.config import Config, DecoderConfig, ExpertsConfig, Family, LayerConfig
from kvern.models.families.common import (
    expert_count,
    flag,
    integer,
    layer_kinds,
    optional_integer,
    usual_decoder,
    usual_layer,
)
from kvern.models.names import GGUF_NAMES, HF_NAMES

KINDS = ("full_attention", "sliding_attention")


def _windows(config: Config) -> list[int | None]:
    """Each layer's window: none, unless ``use_sliding_window`` is set, then in the later layers."""
    count = integer(config, "num_hidden_layers")
    if not flag(config, "use_sliding_window") or config.get("sliding_window") is None:
        return [None] * count
    window, first = integer(config, "sliding_window"), int(config.get("max_window_layers") or 0)
    kinds = layer_kinds(config, KINDS, [KINDS[index >= first] for index in range(count)])
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _layers(config: Config, layer: LayerConfig) -> list[LayerConfig]:
    return [replace(layer, window=window) for window in _windows(config)]


def describe_qwen2(config: Config) -> DecoderConfig:
    """Llama with biases on q, k and v."""
    layers = _layers(config, usual_layer(config))
    return usual_decoder(config, layers, qkv_bias=True, output_bias=False)


def describe_qwen3(config: Config) -> DecoderConfig:
    """Llama with an RMS norm on every head of q and k."""
    return usual_decoder(config, _layers(config, usual_layer(config, qk_norm="head")))


def with_experts(
    config: Config, dense: list[LayerConfig], experts: ExpertsConfig
) -> list[LayerConfig]:
    """Experts in every ``decoder_sparse_step``-th layer not in ``mlp_only_layers``."""
    return [
        replace(layer, experts=experts, intermediate_size=0) if is_sparse else layer
        for layer, is_sparse in zip(dense, _sparse_layers(config), strict=True)
    ]


def _sparse_layers(config: Config) -> list[bool]:
    step = optional_integer(config, "decoder_sparse_step", 1)
    excepted = config.get("mlp_only_layers") or []
    count = integer(config, "num_hidden_layers")
    return [i not in excepted and (i + 1) % step == 0 for i in range(count)]


def dense_width(config: Config) -> int:
    """Width of the layers without experts; a configuration in which all have some need not say it."""
    if all(_sparse_layers(config)):
        return optional_integer(config, "intermediate_size", 1)
    return integer(config, "intermediate_size")


def experts_of(config: Config, is_normalized: bool, shared_size: int = 0) -> ExpertsConfig:
    """The experts of a Qwen configuration, with a gated shared one unless ``shared_size`` is 0."""
    return ExpertsConfig(
        num_experts=expert_count(config),
        num_chosen=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "moe_intermediate_size"),
        is_normalized=is_normalized,
        shared_size=shared_size,
        has_shared_gate=bool(shared_size),
    )


def describe_qwen2_moe(config: Config) -> DecoderConfig:
    """Qwen2 with experts, and a shared expert behind a learned gate."""
    shared = integer(config, "shared_expert_intermediate_size")
    experts = experts_of(config, flag(config, "norm_topk_prob"), shared)
    dense = usual_layer(config, intermediate_size=dense_width(config))
    layers = with_experts(config, _layers(config, dense), experts)
    return usual_decoder(config, layers, qkv_bias=flag(config, "qkv_bias", True), output_bias=False)


def describe_qwen3_moe(config: Config) -> DecoderConfig:
    """Qwen3 with experts."""
    inner = dense_width(config)
    dense = _layers(config, usual_layer(config, qk_norm="head", intermediate_size=inner))
    is_folder = "Qwen3MoeForCausalLM" in (config.get("architectures") or ())
    experts = experts_of(
        config, flag(config, "norm_topk_prob", not is_folder)
    )  # GGUF files do not say
    return usual_decoder(config, with_experts(config, dense, experts))


QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    gguf_architectures=("qwen2",),
    read=describe_qwen2,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
)

QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    gguf_architectures=("qwen3",),
    read=describe_qwen3,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
)

_SHARED = "model.layers.{i}.mlp.shared_expert"

QWEN2_MOE = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    gguf_architectures=("qwen2moe",),
    read=describe_qwen2_moe,
    hf_names=replace(
        HF_NAMES,
        shared_gate=_SHARED + ".gate_proj.weight",
        shared_up=_SHARED + ".up_proj.weight",
        shared_down=_SHARED + ".down_proj.weight",
        shared_router=_SHARED + "_gate.weight",
    ),
    gguf_names=replace(GGUF_NAMES, shared_router="blk.{i}.ffn_gate_inp_shexp.weight"),
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    gguf_architectures=("qwen3moe",),
    read=describe_qwen3_moe,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
)
