"""Configurations that the decoders do not compute are refused by name, never guessed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.models.harness import CONFIGS

from kvern.errors import KvernError, ModelError, UnsupportedModelError
from kvern.models.families import FAMILIES, family_of
from kvern.spec.configs import read_config
from kvern.spec.regimes import PositionRegimes

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "sliding_window": 8}
QWEN3["use_sliding_window"] = True
GEMMA3 = {**LLAMA, "architectures": ["Gemma3ForCausalLM"]}
FALCON = {**LLAMA, "architectures": ["FalconForCausalLM"]}
DEEPSEEK = {
    **LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "kv_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**LLAMA, "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM has no decoder here"),
    ({**LLAMA, "architectures": ["BertModel"], "model_type": "bert"}, "bert is an encoder"),
    ({"architectures": ["T5Model"], "model_type": "t5"}, "t5 is an encoder-decoder"),
    ({**LLAMA, "architectures": []}, "not named in the configuration"),
    ({**LLAMA, "hidden_act": "snake"}, "activation 'snake'"),
    ({**QWEN3, "layer_types": ["full_attention", "windy_attention"]}, "'windy_attention'"),
    ({**GEMMA3, "use_bidirectional_attention": True}, "nothing can be cached"),
    ({**FALCON, "alibi": True}, "alibi True"),
    ({**DEEPSEEK, "topk_method": "by_lot"}, "topk_method 'by_lot'"),
    ({**LLAMA, "quantization_config": {"quant_method": "mxfp4"}}, "quantised (mxfp4)"),
    ({**LLAMA, "rope_scaling": {"rope_type": "spiral", "factor": 2}}, "rope scaling kind 'spiral'"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_is_not_computed_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        family_of(config).describe(config)
    assert message in str(refused.value)


BAD: list[tuple[dict[str, Any], str]] = [
    ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "lacks the field 'hidden_size'"),
    ({**LLAMA, "num_hidden_layers": "two"}, "'num_hidden_layers' is 'two'"),
    ({**LLAMA, "num_attention_heads": 0}, "'num_attention_heads' is 0"),
    ({**LLAMA, "num_key_value_heads": 3}, "4 query heads cannot be shared out over 3 KV heads"),
    ({**LLAMA, "rms_norm_eps": "small"}, "'rms_norm_eps' is 'small'"),
    ({**QWEN3, "layer_types": ["full_attention"]}, "layer_types names 1 layers"),
]


@pytest.mark.parametrize(("config", "message"), BAD, ids=[m for _, m in BAD])
def test_a_bad_field_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refused:
        family_of(config).describe(config)
    assert message in str(refused.value)


def test_the_list_of_known_architectures_is_given() -> None:
    with pytest.raises(KvernError) as refused:
        family_of({"architectures": ["T5ForConditionalGeneration"]})
    for family in FAMILIES:
        assert all(name in str(refused.value) for name in family.architectures)
    with pytest.raises(KvernError, match="t5 has no decoder"):
        family_of({}, "t5")


def test_no_architecture_belongs_to_two_families() -> None:
    for kind in ("architectures", "gguf_architectures"):
        names = [name for family in FAMILIES for name in getattr(family, kind)]
        assert len(names) == len(set(names))


def test_longrope_without_long_factors_ends_the_context_where_it_would_need_them() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 8}
    config = {
        **LLAMA,
        "architectures": ["Phi3ForCausalLM"],
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 256,
        "rope_scaling": scaling,
    }
    decoder = family_of(config).describe(config)
    assert (decoder.max_positions, decoder.regimes) == (256, None)
    config["rope_scaling"] = {**scaling, "long_factor": [2.0] * 8}
    decoder = family_of(config).describe(config)
    assert (decoder.max_positions, decoder.regimes) == (4096, PositionRegimes(256))


@pytest.mark.parametrize("factor", [None, 0.5, "two", True])
def test_dynamic_ntk_needs_its_factor(factor: object) -> None:
    config = {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": factor}}
    with pytest.raises(ModelError, match="factor"):
        family_of(config).describe(config)


def test_layers_that_change_at_different_lengths_are_refused() -> None:
    long = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    ropes = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        "sliding_attention": {**long, "rope_theta": 1e4, "original_max_position_embeddings": 16},
    }
    config = {
        **LLAMA,
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
        "max_position_embeddings": 64,
        "rope_parameters": ropes,
    }
    with pytest.raises(UnsupportedModelError, match=r"\[16, 64\]"):
        family_of(config).describe(config)


def test_every_real_configuration_is_described_or_refused_in_one_sentence() -> None:
    if not CONFIGS.is_dir():
        pytest.skip(f"{CONFIGS.name} is not there: shared/data lies beside the repository")
    described, refusals = 0, []
    for path in sorted(CONFIGS.glob("*.json")):
        config = read_config(path)
        try:
            family_of(config).describe(config)
            described += 1
        except ModelError as refused:
            refusals.append(str(refused))
    assert described > 20
    assert all(refusal and "\n" not in refusal for refusal in refusals)
