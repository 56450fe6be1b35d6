"""From a configuration, wherever it lies, to a `ModelSpec`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvern.errors import FileFormatError, ModelError, UnsupportedModelError
from kvern.spec.configs.dense import DENSE_FAMILIES
from kvern.spec.configs.family import Family
from kvern.spec.configs.gguf_keys import config_from_gguf
from kvern.spec.configs.hybrid import HYBRID_FAMILIES
from kvern.spec.configs.latent import LATENT_FAMILIES
from kvern.spec.configs.legacy import LEGACY_FAMILIES
from kvern.spec.configs.reader import Config, MissingFieldError
from kvern.spec.configs.refusals import refuse_uncacheable
from kvern.spec.configs.rope import max_model_len
from kvern.spec.configs.weights import expert_spec
from kvern.spec.gguf import GGUFHeader, is_gguf, read_header
from kvern.spec.layers import LayerSpec, ModelSpec, ParameterCount

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (*DENSE_FAMILIES, *LEGACY_FAMILIES, *LATENT_FAMILIES, *HYBRID_FAMILIES)
    }
)
"""Every known `model_type`."""

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Where models with images or sound keep the configuration of their language model."""

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
    "index_n_heads",
    "rope_scaling",
    "rope_parameters",
    "quantization_config",
    "q_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
)
"""Facts that engines treat differently, handed on as the configuration states them."""


Source = str | os.PathLike[str] | GGUFHeader | Mapping[str, Any]
"""A path (config.json, model folder, GGUF file), a header already read, or the configuration."""


def load_model_spec(source: Source, name: str | None = None) -> ModelSpec:
    """Describe a model's layers and their caches.

    Args:
        source: where the configuration lies. Catalogue names are resolved by the caller.
        name: what to call the model; the file's or folder's name where not given.

    Raises:
        ModelError: the file cannot be read, or the configuration lacks a field (named).
        FileFormatError: the file is damaged.
        UnsupportedModelError: the family or a layer kind is unknown (named, with the known ones),
            or the model's computed positions do not stay as they are (with the reason).
    """
    return _describe(read_config(source), name or _name_of(source))


def read_config(source: Source) -> dict[str, Any]:
    """The configuration in `config.json` form, wherever it lies.

    GGUF metadata is translated into the same fields; a field that the file lacks is absent.

    Raises:
        ModelError: the file cannot be read.
        FileFormatError: the file is damaged.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, GGUFHeader):
        return config_from_gguf(source)
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ModelError(f"{path} does not exist: give a config.json, a folder or a GGUF file")
    if is_gguf(path):
        return config_from_gguf(read_header(path))
    return _read_json(path)


def _name_of(source: Source) -> str:
    if isinstance(source, Mapping):
        return "the configuration"
    path = source.path if isinstance(source, GGUFHeader) else Path(source)
    return path.parent.name if path.name == "config.json" else path.stem or str(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is neither GGUF nor valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise FileFormatError(f"{path} holds a {type(values).__name__}, not a configuration")
    return values


def _text_config(values: Mapping[str, Any], source: str) -> tuple[Config, str, str]:
    """The language model's configuration, its family, and the architecture's name."""
    outer = Config(values, source)
    family = outer.text("model_type") or ""
    architectures = outer.strings("architectures") or ()
    architecture = architectures[0] if architectures else family
    refuse_uncacheable(outer, family)
    for field in TEXT_CONFIGS:
        if outer.get(field) is not None:
            inner = outer.table(field)
            outer_facts = ("torch_dtype", "dtype", "tie_word_embeddings", "quantization_config")
            inherited = {key: values[key] for key in outer_facts if key in values}
            config = Config({**inherited, **inner.values}, source)
            family = config.text("model_type") or family
            refuse_uncacheable(config, family)
            return config, family, architecture
    return outer, family, architecture


def _describe(values: Mapping[str, Any], name: str) -> ModelSpec:
    config, family_name, architecture = _text_config(values, name)
    family = FAMILIES.get(WRAPPED_BY.get(family_name, family_name))
    if family is None:
        what = f"model_type {family_name!r}" if family_name else "no model_type"
        raise UnsupportedModelError(
            f"{name}: {what} ({architecture or 'no architecture'}) is not among the families whose "
            f"cache is known: {', '.join(sorted(FAMILIES))}"
        )
    config = family.translate(config)
    layers = family.layers(config)
    parameters, counted, missing = _count_parameters(config, family, layers)
    has_heads = config.get("num_attention_heads") is not None
    return ModelSpec(
        name=name,
        architecture=architecture,
        family=family_name,
        num_layers=len(layers),
        layers=counted,
        max_model_len=max_model_len(config, family_name),
        hidden_size=config.optional_integer("hidden_size"),
        vocab_size=config.optional_integer("vocab_size"),
        num_attention_heads=config.num_heads if has_heads else None,
        num_kv_heads=config.num_kv_heads if has_heads else None,
        head_dim=config.optional_integer("head_dim", minimum=0) or None,
        intermediate_size=_intermediate_size(config),
        experts=expert_spec(config, family.block.moe if family.block else None),
        torch_dtype=config.text("torch_dtype", "dtype"),
        tie_word_embeddings=config.flag("tie_word_embeddings", family.ties_embeddings),
        mtp_layers=family.mtp_layers(config),
        parameters=parameters,
        missing_fields=missing,
        details=_details(config, family),
    )


def _intermediate_size(config: Config) -> int | None:
    value = config.get("intermediate_size", "ffn_dim", "n_inner")
    return value if type(value) is int else None


def _details(config: Config, family: Family) -> Mapping[str, object]:
    stated = {field: config.get(field) for field in DETAIL_FIELDS}
    details = {field: value for field, value in stated.items() if value is not None}
    if family.weight_counter is None:
        details["parameters"] = f"not counted for {family.name}: give the weights' size"
    if config.get("_params") is not None:
        details["noted_parameters"] = config.get("_params")
    return MappingProxyType(details)


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
    tied = config.flag("tie_word_embeddings", family.ties_embeddings)
    head = 0 if tied else vocab * hidden
    parameters = ParameterCount(
        embedding=embedding,
        lm_head=head + (vocab if family.head_bias else 0),
        final_norm=family.final_norm * hidden,
        layers=sum(weights.total for weights in weighed),
        active_layers=sum(weights.active for weights in weighed),
    )
    counted = tuple(
        LayerSpec(layer.index, layer.kind, layer.caches, weights)
        for layer, weights in zip(layers, weighed, strict=True)
    )
    return parameters, counted, ()
