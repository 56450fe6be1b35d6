"""Parameter counts: exact from stated widths, absent where one is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.spec.small import llama

from kvern.spec.configs import load_model_spec

# (file, all parameters as the checkpoint's card states them)
PARAMETERS = [
    ("meta-llama--Llama-2-7b-hf", 6_738_415_616),
    ("meta-llama--Llama-3.1-405B", 405_853_388_800),
    ("mistralai--Mistral-7B-v0.1", 7_241_732_096),
    ("mistralai--Mixtral-8x7B-Instruct-v0.1", 46_702_792_704),
    ("Qwen--Qwen2.5-0.5B-Instruct", 494_032_768),
    ("Qwen--Qwen2.5-7B-Instruct", 7_615_616_512),
    ("Qwen--Qwen3-8B", 8_190_735_360),
    ("Qwen--Qwen3-30B-A3B", 30_532_122_624),
    ("Qwen--Qwen3-235B-A22B-FP8", 235_093_634_560),
    ("microsoft--phi-4", 14_659_507_200),
    ("microsoft--Phi-3-mini-4k-instruct", 3_821_079_552),
    ("google--gemma-7b-it", 8_537_680_896),
    ("google--gemma-2-27b-it", 27_227_128_320),
    ("CohereForAI--c4ai-command-r-v01", 34_980_831_232),
    ("bigcode--starcoder2-3b", 3_030_371_328),
    ("openai-community--gpt2", 124_439_808),
    ("EleutherAI--gpt-j-6B", 6_050_882_784),
    ("tiiuae--falcon-7b", 6_921_720_704),
]


@pytest.mark.parametrize(("name", "total"), PARAMETERS, ids=[p[0] for p in PARAMETERS])
def test_parameters_of_real_models(load, name: str, total: int) -> None:
    model = load(name)
    assert model.parameters is not None
    assert model.parameters.total == total
    assert sum(layer.parameters.total for layer in model.layers) == model.parameters.layers


def test_parameters_of_deepseek_v3_with_its_widths(shared_data: Path) -> None:
    file = shared_data / "model_configs" / "deepseek-ai--DeepSeek-V3.json"
    config = json.loads(file.read_text())
    assert load_model_spec(config).missing_fields == ("first_k_dense_replace",)
    widths = {"intermediate_size": 18432, "moe_intermediate_size": 2048}
    model = load_model_spec(config | widths | {"n_shared_experts": 1, "first_k_dense_replace": 3})
    assert model.parameters is not None
    assert model.parameters.total == 671_026_419_200
    assert round(model.parameters.active / 1e9, 1) == 36.6
    assert model.experts is not None
    assert (model.experts.num_experts, model.experts.num_shared_experts) == (256, 1)
    assert [layer.index for layer in model.mtp_layers] == [61]
    assert model.mtp_layers[0].caches == model.layers[0].caches


def test_a_missing_width_leaves_parameters_uncounted() -> None:
    config = llama()
    del config["intermediate_size"]
    model = load_model_spec(config)
    assert model.parameters is None
    assert model.missing_fields == ("intermediate_size",)
    assert model.kv_bytes_per_token == 4 * 2 * 2 * 16 * 2


def test_tied_embeddings_count_once() -> None:
    tied = load_model_spec(llama(tie_word_embeddings=True)).parameters
    untied = load_model_spec(llama()).parameters
    assert tied is not None
    assert untied is not None
    assert untied.total - tied.total == 128 * 64 == untied.lm_head
    assert untied.active == tied.active
