"""Qwen3-Next and Qwen3.5: three gated delta nets, then full attention with a gate on its output."""

from __future__ import annotations

from dataclasses import replace

from kvern.models.config import Config, DecoderConfig, DeltaNetConfig, Family, LayerConfig
from kvern.models.families.common import (
    flag,
    head_dim_of,
    integer,
    layer_kinds,
    rope_of,
    usual_decoder,
    usual_layer,
)
from kvern.models.families.qwen import dense_width, experts_of, with_experts
from kvern.models.names import HF_NAMES

FULL, LINEAR = KINDS = ("full_attention", "linear_attention")


def describe(config: Config) -> DecoderConfig:
    """Read a Qwen3.5 configuration without experts."""
    layers = _layers(config, integer(config, "intermediate_size"))
    return usual_decoder(config, layers, norm_offset=1.0)


def describe_experts(config: Config) -> DecoderConfig:
    """Read a Qwen3-Next or Qwen3.5 configuration with experts."""
    shared = integer(config, "shared_expert_intermediate_size")
    experts = experts_of(config, flag(config, "norm_topk_prob", True), shared)
    layers = with_experts(config, _layers(config, dense_width(config)), experts)
    return usual_decoder(config, layers, norm_offset=1.0)


def _layers(config: Config, inner: int) -> list[LayerConfig]:
    count, period = (
        integer(config, "num_hidden_layers"),
        int(config.get("full_attention_interval") or 4),
    )
    kinds = layer_kinds(config, KINDS, [LINEAR if (i + 1) % period else FULL for i in range(count)])
    partial = {"partial_rotary_factor": 0.25, **config}
    full = usual_layer(
        config,
        intermediate_size=inner,
        rope=rope_of(partial, head_dim_of(config)),
        qk_norm="head",
        has_gate=True,
    )
    linear = LayerConfig(
        intermediate_size=full.intermediate_size,
        activation=full.activation,
        state=DeltaNetConfig(
            num_key_heads=integer(config, "linear_num_key_heads"),
            num_value_heads=integer(config, "linear_num_value_heads"),
            key_dim=integer(config, "linear_key_head_dim"),
            value_dim=integer(config, "linear_value_head_dim"),
            kernel=integer(config, "linear_conv_kernel_dim"),
        ),
    )
    return [linear if kind == LINEAR else full for kind in kinds]


_MIXER = "model.layers.{i}.linear_attn."
_SHARED = "model.layers.{i}.mlp.shared_expert"

_NAMES = replace(
    HF_NAMES,
    state_conv=_MIXER + "conv1d.weight",
    state_decay=_MIXER + "A_log",
    state_step_bias=_MIXER + "dt_bias",
    state_norm=_MIXER + "norm.weight",
    state_output=_MIXER + "out_proj.weight",
    shared_gate=_SHARED + ".gate_proj.weight",
    shared_up=_SHARED + ".up_proj.weight",
    shared_down=_SHARED + ".down_proj.weight",
    shared_router=_SHARED + "_gate.weight",
)

QWEN3_NEXT = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    gguf_architectures=(),
    read=describe_experts,
    hf_names=replace(
        _NAMES,
        state_inputs=(_MIXER + "in_proj_qkvz.weight",),
        state_gates=(_MIXER + "in_proj_ba.weight",),
    ),
)

QWEN3_5 = Family(
    name="qwen3_5",
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    gguf_architectures=(),
    read=describe,
    hf_names=replace(
        _NAMES,
        state_inputs=(_MIXER + "in_proj_qkv.weight", _MIXER + "in_proj_z.weight"),
        state_gates=(_MIXER + "in_proj_b.weight", _MIXER + "in_proj_a.weight"),
    ),
)

QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    gguf_architectures=(),
    read=describe_experts,
    hf_names=replace(
        QWEN3_5.hf_names,
        expert_gate_up="model.layers.{i}.mlp.experts.gate_up_proj",
        expert_down="model.layers.{i}.mlp.experts.down_proj",
        expert_down_each=HF_NAMES.expert_down,
    ),
)
