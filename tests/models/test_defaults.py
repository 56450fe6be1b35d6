"""What a folder's configuration leaves out means what transformers takes it to mean.

Small configurations lose one field after the other; what kvern reads then must be what it reads in the
object that transformers makes of the same reduced file, written out in full.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.models.cases import CASES, IDS
from tests.models.harness import Case, SavedModels
from tests.models.test_spellings import comparable
from tests.spec.test_transformers import small_config

from kvern.errors import ModelError
from kvern.models.caches import require_same_caches
from kvern.models.config import DecoderConfig
from kvern.models.families import family_of
from kvern.spec.configs import FAMILIES, load_model_spec
from kvern.spec.configs.absent import ABSENT_FIELDS, NESTED_FIELDS
from kvern.spec.content import Heads

Config = dict[str, Any]

WIDTHS = frozenset(
    name
    for line in (
        "hidden_size n_embd d_model intermediate_size intermediate_size_mlp ffn_dim vocab_size",
        "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads",
        "n_positions num_experts num_local_experts n_routed_experts moe_intermediate_size",
        "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size",
        "kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim",
        "linear_conv_kernel_dim linear_value_head_dim linear_num_value_heads linear_num_key_heads",
        "linear_key_head_dim linear_num_heads linear_head_dim mamba_d_state mamba_d_conv mamba_n_heads",
        "layers_block_type mamba_d_head mamba_num_heads mamba_head_dim ssm_state_size conv_kernel state_size",
    )
    for name in line.split()
)
"""Without one of these a model has no shape: the decoder refuses by name instead of guessing."""

LEARNED_POSITIONS = frozenset({"opt", "gpt2", "gptj", "gpt_neo", "gpt_bigcode"})
"""Model types in which the context limit is, or is written like, the height of a table of weights."""

OTHER_ORDER = frozenset({"kimi_linear"})
"""Where the class's order of layers is not the published model's, which always states its own."""

UNUSED_IN_ROPE = ("max_position_embeddings",)


def described(config: Config) -> DecoderConfig:
    """The decoder, without what transformers notes in a rope table and nothing reads."""
    decoder = comparable(family_of(config).describe(copy.deepcopy(config)))
    layers = []
    for layer in decoder.layers:
        rope = layer.rope
        if rope is not None:
            scaling = {k: v for k, v in rope.scaling.items() if k not in UNUSED_IN_ROPE}
            rope = dataclasses.replace(rope, scaling=scaling)
        layers.append(dataclasses.replace(layer, rope=rope))
    return dataclasses.replace(decoder, layers=tuple(layers))


def caches(config: Config) -> dict[str, Any]:
    """What the description says of caches, context and experts."""
    spec = load_model_spec(config, "the model")
    has_heads = any(isinstance(c.content, Heads) for layer in spec.layers for c in layer.caches)
    experts = spec.experts
    return {
        "layers": [(layer.kind, layer.caches) for layer in spec.layers],
        "mtp": [(layer.kind, layer.caches) for layer in spec.mtp_layers],
        "context": spec.max_model_len,
        "regimes": spec.regimes,
        "tied": spec.tie_word_embeddings,
        "kv heads": spec.num_kv_heads if has_heads else None,
        "experts": None
        if experts is None
        else (experts.num_experts_per_token, experts.num_shared_experts),
    }


def completed(config_class: Any, config: Config) -> Config:
    """The whole of what transformers takes a file to say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = config_class.from_dict(copy.deepcopy(config))
        kept = {name: config[name] for name in ("model_type", "architectures") if name in config}
        return {**made.to_dict(), **kept}


def reduced(config: Config, model_type: str) -> Iterator[tuple[str, Config]]:
    """The configuration without one field; the same again without the list of layer kinds."""
    kinds = () if model_type in OTHER_ORDER else ("layer_types",)
    for dropped in {(), tuple(name for name in kinds if name in config)}:
        rest = {name: value for name, value in config.items() if name not in dropped}
        for name in rest:
            if name not in ("model_type", "architectures", *dropped):
                if name == "layer_types" and model_type in OTHER_ORDER:
                    continue
                yield name, {other: value for other, value in rest.items() if other != name}


def result_of(read: Callable[[Config], Any], config: Config) -> tuple[Any, str | None]:
    """What is read, or the sentence with which it is refused."""
    try:
        return read(config), None
    except ModelError as refused:
        return None, str(refused)


def require_same(config_class: Any, config: Config, read: Callable[[Config], Any]) -> int:
    """Compare what is read of every reduced configuration; returns how many there were."""
    number = 0
    for name, rest in reduced(config, config["model_type"]):
        try:
            whole = completed(config_class, rest)
        except Exception:  # transformers itself needs the field
            continue
        wanted, misfit = result_of(read, whole)
        if misfit is not None:  # a default that does not fit the small model's other widths
            continue
        may_refuse = name in WIDTHS or config["model_type"] in LEARNED_POSITIONS
        found, refusal = result_of(read, rest)
        if refusal is not None:
            assert may_refuse and "lacks" in refusal, (name, refusal)
            continue
        if name in WIDTHS and isinstance(found, dict):  # the caches do not depend on it, or
            same = found["layers"] == wanted["layers"]  # they are as many as transformers' own
            assert same or config["model_type"] in LEARNED_POSITIONS, name
            continue
        is_table = config["model_type"] in LEARNED_POSITIONS and name == "max_position_embeddings"
        assert found == wanted or is_table, name
        number += 1
    return number


def class_and_fields(case: Case) -> tuple[Any, Config]:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    model_class = getattr(transformers, case.model)
    config_class = getattr(transformers, case.config_class or "", model_class.config_class)
    config = config_class(**case.fields).to_dict()
    return config_class, {
        **config,
        "architectures": [case.model],
        "model_type": config_class.model_type,
    }


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_decoder_and_caches_of_a_reduced_file_are_transformers_own(case: Case) -> None:
    config_class, config = class_and_fields(case)
    assert require_same(config_class, config, described) > 15
    assert require_same(config_class, config, caches) > 15


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_caches_of_a_reduced_file_are_transformers_own(model_type: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers has no class for {model_type}")
    config_class = transformers.CONFIG_MAPPING[model_type]
    if "text_config" in getattr(config_class, "sub_configs", {}):
        pytest.skip(f"the text part of {model_type} is a model type of its own")
    try:
        small = small_config(transformers, model_type)
    except Exception as refused:
        pytest.skip(f"no small configuration of {model_type}: {refused}")
    config = small.to_dict() | {"model_type": model_type}
    assert require_same(config_class, config, caches) > 15


def class_default(config_class: Any, field: str) -> Any:
    """The field's default as the class declares it, or as an object without arguments has it."""
    if field == "rope_theta" and isinstance(config_class.default_theta, float):
        return config_class.default_theta
    declared = config_class.__dataclass_fields__.get(field)
    if declared is not None and declared.default not in (None, dataclasses.MISSING):
        return declared.default
    made = config_class().to_dict()
    if field == "partial_rotary_factor":
        return made["rope_parameters"][field]
    return made.get(field)


@pytest.mark.parametrize("model_type", sorted(ABSENT_FIELDS.keys() | NESTED_FIELDS.keys()))
def test_the_table_of_absent_fields_is_that_of_transformers(model_type: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    config_class = transformers.CONFIG_MAPPING[model_type]
    config_class = config_class.sub_configs.get("text_config", config_class)
    fields = {**ABSENT_FIELDS.get(model_type, {}), **NESTED_FIELDS.get(model_type, {})}
    for field, value in fields.items():
        default = class_default(config_class, field)
        if isinstance(value, dict):
            default = {name: default[name] for name in value}
        assert value == default, field


@pytest.mark.parametrize("family", ["mistral", "ministral"])
def test_a_window_that_is_left_out_is_4096_and_null_is_none(
    saved: SavedModels, family: str
) -> None:
    case = next(case for case in CASES if case.family == family)
    config = json.loads((saved(case).folder / "config.json").read_text())
    for drop in ((), ("layer_types",)):
        rest = {name: value for name, value in config.items() if name not in drop}
        absent = {name: value for name, value in rest.items() if name != "sliding_window"}
        for variant in (absent, {**rest, "sliding_window": 4096}, {**rest, "sliding_window": None}):
            is_none = "sliding_window" in variant and variant["sliding_window"] is None
            if is_none and "layer_types" in variant:
                continue
            decoder = described(variant)
            require_same_caches(decoder, load_model_spec(variant))
            windows = {layer.window for layer in decoder.layers} - {None}
            assert windows == (set() if is_none else {4096})


def test_the_text_part_of_gemma_3_states_only_what_differs() -> None:
    """As published with the 4B model."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    decoder = family_of(config).describe(config)
    layer = decoder.layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.key_dim) == (8, 4, 256)
    assert (layer.scale, layer.window, decoder.layers[5].window) == (256**-0.5, 1024, None)
    assert (decoder.vocab_size, decoder.tie_embeddings) == (262_208, True)


def test_gemma_4_of_more_than_ten_layers_as_transformers_saves_it() -> None:
    """Layer numbers of ``per_layer_config`` are padded with zeros; without layer_types the last is full."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma4TextConfig(
        num_hidden_layers=14, attention_k_eq_v=True, num_global_key_value_heads=2
    ).to_dict()
    config["architectures"] = ["Gemma4ForCausalLM"]
    assert "05" in config["per_layer_config"]
    layers = family_of(config).describe(config).layers
    assert (layers[5].key_dim, layers[5].num_kv_heads) == (512, 2)
    assert (layers[4].key_dim, layers[4].num_kv_heads) == (256, 4)
    untyped = {name: value for name, value in config.items() if name != "layer_types"}
    assert family_of(config).describe(untyped).layers == layers
    require_same_caches(family_of(config).describe(config), load_model_spec(config))
    config["per_layer_config"]["11"] = {"head_dim": 128}
    with pytest.raises(ModelError, match="different things of full layers"):
        load_model_spec(config)
    with pytest.raises(ModelError, match="different things of full layers"):
        family_of(config).describe(config)
