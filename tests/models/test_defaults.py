"""What a folder's configuration leaves out means what transformers takes it to mean."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from tests.models.cases import CASES
from tests.models.harness import SavedModels
from tests.models.test_spellings import comparable

from kvern.errors import ModelError
from kvern.models.caches import require_same_caches
from kvern.models.config import DecoderConfig
from kvern.models.families import family_of
from kvern.spec.configs import load_model_spec
from kvern.spec.configs.absent import ABSENT_FIELDS

Config = dict[str, Any]
FIELDS = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_epsilon",
    "partial_rotary_factor",
    "rotary_dim",
    "logit_scale",
    "n_shared_experts",
    "first_k_dense_replace",
    "norm_topk_prob",
    "attention_bias",
    "tie_word_embeddings",
    "hidden_act",
    "hidden_activation",
    "final_logit_softcapping",
    "attn_logit_softcapping",
)
"""Fields whose weights would fit a wrong guess as well: only the answers would be wrong."""
FAMILIES = [
    "mixtral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3n",
    "phi3",
    "olmo2",
    "olmo3",
    "olmoe",
    "smollm3",
    "granite",
    "gpt2",
    "pythia",
    "falcon-7b",
    "llama4",
    "gpt-oss",
    "minicpm3",
    "ministral3",
    "glm-4.5",
    "minimax-m2",
    "command-r",
    "starcoder2",
]


def described(config: Config) -> DecoderConfig:
    return comparable(family_of(config).describe(copy.deepcopy(config)))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_field_has_transformers_default(saved: SavedModels, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    case = next(case for case in CASES if case.family == family)
    config = json.loads((saved(case).folder / "config.json").read_text())
    model_class = getattr(transformers, case.model)
    config_class = getattr(transformers, case.config_class or "", model_class.config_class)
    default = config_class().to_dict()
    for field in FIELDS:
        if field in config and field in default:
            stated = {**config, field: default[field]}
            absent = {name: value for name, value in config.items() if name != field}
            assert described(absent) == described(stated), field
    rope = default.get("rope_parameters")
    if rope is not None and family != "gpt-oss" and "yarn" not in rope.values():
        absent = {name: value for name, value in config.items() if name != "rope_parameters"}
        assert described(absent) == described({**config, "rope_parameters": rope})


@pytest.mark.parametrize("model_type", sorted(ABSENT_FIELDS))
def test_the_table_of_absent_fields_is_that_of_transformers(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    default = transformers.CONFIG_MAPPING[model_type]().to_dict()
    assert {name: default[name] for name in ABSENT_FIELDS[model_type]} == ABSENT_FIELDS[model_type]


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
