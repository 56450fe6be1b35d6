"""Gemma 3n: parallel residual streams, a low-rank residual, sparse gates, shared caches, per-layer inputs."""

from __future__ import annotations

from dataclasses import replace

from kvern.errors import ModelError
from kvern.models.config import Config, DecoderConfig, Family, LayerConfig
from kvern.models.families.common import (
    activation,
    flag,
    head_dim_of,
    integer,
    layer_kinds,
    optional_integer,
    optional_number,
    owner_of,
    refuse,
    rope_of,
    usual_decoder,
    usual_layer,
)
from kvern.models.families.gemma import FULL, KINDS, SLIDING
from kvern.models.families.gemma4 import GEMMA4

SPARSE_LAYERS = 10
"""Layers whose gates are cut to `SPARSITY`, where the configuration does not say."""
SPARSITY = 0.95


def _per_layer(config: Config, field: str, default: float | list[float], count: int) -> list[float]:
    """A field that holds one number for all layers, or one for each."""
    value: float | list[float] = config[field] if config.get(field) is not None else default
    values = list(value) if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise ModelError(f"{field} has {len(values)} numbers, and there are {count} layers")
    return values


def describe(config: Config) -> DecoderConfig:
    """Read a Gemma 3n configuration, or the text part of a multimodal one."""
    refuse(config, "altup_active_idx", 0, "Gemma 3n")
    refuse(config, "altup_correct_scale", True, "Gemma 3n")
    count = integer(config, "num_hidden_layers")
    kinds = layer_kinds(config, KINDS, [SLIDING if (i + 1) % 5 else FULL for i in range(count)])
    widths = _per_layer(config, "intermediate_size", 16384, count)
    num_sparse = SPARSE_LAYERS if count > SPARSE_LAYERS else 0
    cut = [SPARSITY if i < num_sparse else 0.0 for i in range(count)]
    sparsities = _per_layer(config, "activation_sparsity_pattern", cut, count)
    by_kind = {kind: _layer(config, kind) for kind in KINDS}
    first_shared = count - int(config.get("num_kv_shared_layers") or 0)
    layers: list[LayerConfig] = []
    for index, kind in enumerate(kinds):
        owner = owner_of(kinds, index, first_shared)
        layers.append(
            replace(
                by_kind[kind],
                intermediate_size=int(widths[index]),
                sparsity=float(sparsities[index]),
                share_with=owner,
                has_value_norm=owner is None,
            )
        )
    return usual_decoder(
        config,
        layers,
        embedding_scale=integer(config, "hidden_size") ** 0.5,
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        logit_softcap=optional_number(config, "final_logit_softcapping", 30.0),
        per_layer_size=optional_integer(config, "hidden_size_per_layer_input", 256),
        per_layer_vocab_size=optional_integer(config, "vocab_size_per_layer_input", 262144),
        per_layer_activation=layers[0].activation,
        num_streams=optional_integer(config, "altup_num_inputs", 4),
        laurel_rank=optional_integer(config, "laurel_rank", 64),
    )


def _layer(config: Config, kind: str) -> LayerConfig:
    is_full = kind == FULL
    return usual_layer(
        config,
        intermediate_size=1,
        activation=activation(config, "gelu_pytorch_tanh", ("hidden_activation",)),
        scale=1.0,
        qk_norm="head",
        rope=rope_of(config, head_dim_of(config), kind, theta=1e6 if is_full else 10000.0),
        window=None if is_full else optional_integer(config, "sliding_window", 512),
    )


_LAYER = "model.layers.{i}."

GEMMA3N = Family(
    name="gemma3n",
    architectures=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    gguf_architectures=(),
    read=describe,
    hf_names=replace(
        GEMMA4.hf_names,
        stream_router=_LAYER + "altup.modality_router.weight",
        stream_router_norm=_LAYER + "altup.router_norm.weight",
        stream_predict=_LAYER + "altup.prediction_coefs.weight",
        stream_correct=_LAYER + "altup.correction_coefs.weight",
        stream_scale=_LAYER + "altup.correct_output_scale",
        stream_in="model.altup_projections.{e}.weight",
        stream_out="model.altup_unembed_projections.{e}.weight",
        laurel_down=_LAYER + "laurel.linear_left.weight",
        laurel_up=_LAYER + "laurel.linear_right.weight",
        laurel_norm=_LAYER + "laurel.post_laurel_norm.weight",
    ),
)
