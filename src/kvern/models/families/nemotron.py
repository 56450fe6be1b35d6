"""Nemotron-H: each layer is one part alone: Mamba-2, attention without rotary, feed-forward, or experts."""

from __future__ import annotations

from dataclasses import replace

from kvern.errors import ModelError, UnsupportedModelError
from kvern.models.config import (
    Config,
    DecoderConfig,
    ExpertsConfig,
    Family,
    LayerConfig,
    MambaConfig,
)
from kvern.models.families.common import (
    activation,
    expert_count,
    flag,
    integer,
    number,
    optional_integer,
    refuse,
    usual_decoder,
    usual_layer,
)
from kvern.models.names import TensorNames

LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def _kinds(config: Config) -> list[str]:
    """Each layer's kind, from a list or from a pattern of letters."""
    given = config.get("layers_block_type") or config.get("layer_types")
    if given is None:
        given = [LETTERS.get(c, c) for c in config.get("hybrid_override_pattern") or ""]
    if not given:
        raise ModelError("the configuration lacks layers_block_type, which the decoder needs")
    return [OLD_NAMES.get(kind, kind) for kind in given]


def describe(config: Config) -> DecoderConfig:
    """Read a Nemotron-H configuration."""
    refuse(config, "moe_latent_size", None, "Nemotron-H")
    kinds, kind_of_mlp = _kinds(config), activation(config, "relu2", ("mlp_hidden_act",))
    alone = LayerConfig(activation=kind_of_mlp, has_mixer=False, is_gated=False)
    makers = {
        "linear_attention": lambda: LayerConfig(state=_mamba(config), has_feed_forward=False),
        "full_attention": lambda: replace(
            usual_layer(config, rope=None, activation="silu"),
            intermediate_size=0,
            has_feed_forward=False,
        ),
        "mlp": lambda: replace(alone, intermediate_size=integer(config, "intermediate_size")),
        "moe": lambda: replace(alone, experts=_experts(config, kind_of_mlp)),
    }
    for kind in kinds:
        if kind not in makers:
            raise UnsupportedModelError(
                f"layer kind {kind!r} is not one that this decoder computes ({', '.join(makers)})"
            )
    layers = {kind: makers[kind]() for kind in set(kinds)}
    return usual_decoder(
        config,
        [layers[kind] for kind in kinds],
        norm_eps=number(config, "layer_norm_epsilon", number(config, "rms_norm_eps", 1e-5)),
        qkv_bias=False,
        output_bias=False,
    )


def _mamba(config: Config) -> MambaConfig:
    groups = optional_integer(config, "n_groups", 1)
    return MambaConfig(
        num_heads=integer(config, "mamba_num_heads"),
        head_dim=integer(config, "mamba_head_dim"),
        state_dim=integer(config, "ssm_state_size"),
        num_groups=groups,
        kernel=integer(config, "conv_kernel"),
        num_norm_groups=groups,
        step_limits=(number(config, "time_step_min", 0.001), float("inf")),
        has_bias=flag(config, "use_bias"),
        has_conv_bias=flag(config, "use_conv_bias", True),
    )


def _experts(config: Config, kind_of_mlp: str) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=expert_count(config),
        num_chosen=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "moe_intermediate_size"),
        scoring="sigmoid",
        is_normalized=flag(config, "norm_topk_prob", True),
        routed_scale=number(config, "routed_scaling_factor", 1.0),
        num_groups=optional_integer(config, "n_group", 1),
        num_chosen_groups=optional_integer(config, "topk_group", 1),
        group_score="top2",
        shared_size=integer(config, "moe_shared_expert_intermediate_size"),
        has_score_bias=True,
        is_gated=False,
        activation=kind_of_mlp,
    )


_LAYER = "backbone.layers.{i}."
_MIXER = _LAYER + "mixer."

NEMOTRON_H = Family(
    name="nemotron_h",
    architectures=("NemotronHForCausalLM",),
    gguf_architectures=(),
    read=describe,
    hf_names=TensorNames(
        embedding="backbone.embeddings.weight",
        final_norm="backbone.norm_f.weight",
        head="lm_head.weight",
        attention_norm=_LAYER + "norm.weight",
        q=_MIXER + "q_proj.weight",
        k=_MIXER + "k_proj.weight",
        v=_MIXER + "v_proj.weight",
        output=_MIXER + "o_proj.weight",
        state_inputs=(_MIXER + "in_proj.weight",),
        state_conv=_MIXER + "conv1d.weight",
        state_decay=_MIXER + "A_log",
        state_step_bias=_MIXER + "dt_bias",
        state_skip=_MIXER + "D",
        state_norm=_MIXER + "norm.weight",
        state_output=_MIXER + "out_proj.weight",
        mlp_norm=_LAYER + "norm.weight",
        up=_MIXER + "up_proj.weight",
        down=_MIXER + "down_proj.weight",
        router=_MIXER + "gate.weight",
        score_bias=_MIXER + "gate.e_score_correction_bias",
        expert_up=_MIXER + "experts.{e}.up_proj.weight",
        expert_down=_MIXER + "experts.{e}.down_proj.weight",
        shared_up=_MIXER + "shared_experts.up_proj.weight",
        shared_down=_MIXER + "shared_experts.down_proj.weight",
    ),
)
