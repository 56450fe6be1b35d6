"""From a configuration's fields to a `ModelSpec`: finding the family, its layers, their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

from kvern.errors import UnsupportedModelError
from kvern.spec.configs.absent import ABSENT_FIELDS, unknown_sizes, with_absent_fields
from kvern.spec.configs.dense import DENSE_FAMILIES
from kvern.spec.configs.family import Family
from kvern.spec.configs.hybrid import HYBRID_FAMILIES
from kvern.spec.configs.latent import LATENT_FAMILIES
from kvern.spec.configs.legacy import LEGACY_FAMILIES
from kvern.spec.configs.reader import Config, MissingFieldError
from kvern.spec.configs.refusals import refuse_uncacheable
from kvern.spec.configs.rope import max_model_len, position_regimes
from kvern.spec.configs.weights import expert_spec
from kvern.spec.layers import LayerSpec, ModelSpec, ParameterCount

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (*DENSE_FAMILIES, *LEGACY_FAMILIES, *LATENT_FAMILIES, *HYBRID_FAMILIES)
    }
)
"""Every known `model_type`."""

TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where models with images or sound keep the configuration of their language model."""

OUTER_FACTS = ("torch_dtype", "dtype", "tie_word_embeddings", "quantization_config")
"""What such a configuration may say once, for all its parts."""

WRAPPED_BY = MappingProxyType(
    {
        "phi3_v": "phi3",
        "qwen2_vl": "qwen2",
        "qwen2_5_vl": "qwen2",
        "qwen3_vl": "qwen3",
        "qwen3_vl_text": "qwen3",
        "qwen2_vl_text": "qwen2",
        "qwen2_5_vl_text": "qwen2",
        "qwen3_vl_moe": "qwen3_moe",
        "qwen3_vl_moe_text": "qwen3_moe",
        "mistral3": "mistral",
        "pixtral": "mistral",
        "mllama_text_model": "mllama",
    }
)
"""Model types whose language model is another family's."""

DETAIL_FIELDS = (
    "mamba_ssm_dtype",
    "mamba_ssm_cache_dtype",
    "index_topk",
    "index_topk_blocks",
    "index_kpool",
    "index_n_heads",
    "rope_scaling",
    "rope_parameters",
    "quantization_config",
    "q_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
)
"""Facts that engines treat differently, handed on as the configuration states them."""


def _text_config(values: Mapping[str, Any], source: str) -> tuple[Config, str, str, bool]:
    """The language model's configuration, its family, the architecture, and whether it was nested."""
    outer = Config(values, source)
    family = outer.text("model_type") or ""
    architectures = outer.strings("architectures") or ()
    architecture = architectures[0] if architectures else family
    refuse_uncacheable(outer, family)
    config = outer
    while nested := next((f for f in TEXT_CONFIGS if config.get(f) is not None), None):
        inherited = {key: config.values[key] for key in OUTER_FACTS if key in config.values}
        config = Config({**inherited, **config.table(nested).values}, source)
        family = config.text("model_type") or family
        refuse_uncacheable(config, family)
    return config, family, architecture, config is not outer


def describe(values: Mapping[str, Any], name: str) -> ModelSpec:
    """Describe the layers of a configuration in `config.json` form; see `load_model_spec`."""
    config, family_name, architecture, is_nested = _text_config(values, name)
    family = FAMILIES.get(WRAPPED_BY.get(family_name, family_name))
    if family is None:
        what = f"model_type {family_name!r}" if family_name else "no model_type"
        raise UnsupportedModelError(
            f"{name}: {what} ({architecture or 'no architecture'}) is not among the families whose "
            f"cache is known: {', '.join(sorted(FAMILIES))}"
        )
    is_own = family_name in ABSENT_FIELDS
    stated = {**config.values, "model_type": family_name if is_own else family.name}
    config = family.translate(Config(with_absent_fields(stated, is_nested), name))
    layers = family.layers(config)
    unknown = unknown_sizes(stated, is_nested)
    parameters, counted, missing = _count_parameters(config.without(unknown), family, layers)
    has_heads = config.get("num_attention_heads") is not None
    return ModelSpec(
        name=name,
        architecture=architecture,
        family=family_name,
        num_layers=len(layers),
        layers=counted,
        max_model_len=max_model_len(config, family_name),
        regimes=position_regimes(config, family_name),
        hidden_size=config.optional_integer("hidden_size"),
        vocab_size=config.optional_integer("vocab_size"),
        num_attention_heads=config.num_heads if has_heads else None,
        num_kv_heads=config.num_kv_heads if has_heads else None,
        head_dim=config.optional_integer("head_dim", minimum=0) or None,
        intermediate_size=_intermediate_size(config),
        experts=expert_spec(config, family.block.moe if family.block else None),
        torch_dtype=config.text("torch_dtype", "dtype"),
        tie_word_embeddings=_is_tied(config, family, parameters),
        mtp_layers=family.mtp_layers(config),
        parameters=parameters,
        missing_fields=missing,
        details=_details(config, family, layers),
    )


def _intermediate_size(config: Config) -> int | None:
    value = config.get("intermediate_size", "ffn_dim", "n_inner")
    return value if type(value) is int else None


def _details(config: Config, family: Family, layers: tuple[LayerSpec, ...]) -> Mapping[str, object]:
    stated = {field: config.get(field) for field in DETAIL_FIELDS}
    details = {field: value for field, value in stated.items() if value is not None}
    if family.weight_counter is None:
        details["parameters"] = f"not counted for {family.name}: give the weights' size"
    noted = config.optional_integer("_params")
    if noted is not None:
        details["noted_parameters"] = noted
    if _is_order_unknown(config, layers):
        details["layer_order"] = "not stated: only the number of layers of each kind is"
    return MappingProxyType(details)


def _is_tied(config: Config, family: Family, parameters: ParameterCount | None) -> bool:
    """Whether the output layer is the embedding.

    An incomplete configuration may not say so, and note a total of parameters that does.
    """
    noted, stated = config.get("_params"), config.get("tie_word_embeddings")
    if parameters is not None and stated is None and noted is not None:
        return bool(noted == parameters.total - parameters.lm_head)
    return config.flag("tie_word_embeddings", family.ties_embeddings)


def _is_order_unknown(config: Config, layers: tuple[LayerSpec, ...]) -> bool:
    """Whether only the numbers of layers of each kind are noted, so that they lie kind by kind."""
    has_counts = any(name.startswith("_") and name.endswith("_layers") for name in config.values)
    num_runs = sum(1 for _ in groupby(layers, key=lambda layer: layer.kind))
    return has_counts and num_runs == len({layer.kind for layer in layers})


def _count_parameters(
    config: Config, family: Family, layers: tuple[LayerSpec, ...]
) -> tuple[ParameterCount | None, tuple[LayerSpec, ...], tuple[str, ...]]:
    """Exact counts, or the field whose absence prevents them."""
    count = family.weight_counter
    if count is None:
        return None, layers, ()
    try:
        weighed = [count(config, layer.kind, layer.index) for layer in layers]
        hidden, vocab = config.hidden_size, config.integer("vocab_size")
        embedding = vocab * hidden + family.embedding_norms * hidden
        if family.learned_positions is not None:
            positions = config.integer("max_position_embeddings") + family.learned_positions
            embedding += positions * hidden
    except MissingFieldError as error:
        return None, layers, (error.field,)
    parameters = ParameterCount(
        embedding=embedding,
        lm_head=vocab * hidden + (vocab if family.head_bias else 0),
        final_norm=family.final_norm * hidden,
        layers=sum(weights.total for weights in weighed),
        active_layers=sum(weights.active for weights in weighed),
    )
    if _is_tied(config, family, parameters):
        parameters = replace(parameters, lm_head=parameters.lm_head - vocab * hidden)
    counted = tuple(
        LayerSpec(layer.index, layer.kind, layer.caches, weights)
        for layer, weights in zip(layers, weighed, strict=True)
    )
    return parameters, counted, ()
