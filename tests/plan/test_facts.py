"""Figures from papers and reports that anybody can check, through the planner."""

from __future__ import annotations

import pytest
from tests.plan.models import deepseek_v3, llama, llama_7b, llama_70b

from kvern.plan import PlanRequest, plan
from kvern.spec.configs import load_model_spec

GIB = 2**30


def opt(layers: int, heads: int) -> object:
    return llama(
        "opt",
        num_hidden_layers=layers,
        hidden_size=heads * 128,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2048,
    )


@pytest.mark.parametrize(
    ("layers", "heads", "gib", "printed"), [(40, 40, 12, "15.7K"), (96, 96, 264, "60.1K")]
)
def test_slots_of_the_paged_attention_paper(
    layers: int, heads: int, gib: int, printed: str
) -> None:
    """SOSP'23, table 1: OPT-13B with 12 GB and OPT-175B with 264 GB for KV."""
    answer = plan(PlanRequest(opt(layers, heads), "vllm", "0.1", kv_memory=gib * GIB))  # type: ignore[arg-type]
    assert f"{answer.allocation.capacity_tokens / 1000:.1f}K" == printed


def test_deepseek_v2_saves_93_3_percent_at_six_bits_against_deepseek_67b() -> None:
    v2 = deepseek_v3(num_hidden_layers=60)
    elements = v2.kv_bytes_per_token / 2
    assert elements == 34_560
    dense = llama("deepseek-67b", num_hidden_layers=95).kv_bytes_per_token
    assert dense == 389_120
    assert f"{1 - elements * 6 / 8 / dense:.1%}" == "93.3%"
    assert f"{1 - v2.kv_bytes_per_token / dense:.1%}" == "82.2%"


@pytest.mark.parametrize(("bits", "gib"), [(16, 64), (4, 16), (3, 12), (2, 8)])
def test_kvquant_sizes_of_llama_7b_at_128k(bits: int, gib: int) -> None:
    in_16_bit = llama_7b().context_bytes(128 * 1024)
    assert in_16_bit * bits // 16 == gib * GIB


def test_kivi2_at_group_32_takes_three_bits_an_element() -> None:
    kivi = llama_7b().with_kv_format("kivi2")
    assert kivi.context_bytes(128 * 1024) == 12 * GIB
    answer = plan(
        PlanRequest(llama_7b(), kv_format="kivi2", block_size=32, kv_memory=GIB, max_num_seqs=4)
    )
    # the block that is still open stays in bf16 for every running sequence
    assert answer.allocation.extras["open_bytes"] == 4 * 32 * llama_7b().kv_bytes_per_token


def test_mla_against_full_heads_at_deepseek_v3_geometry() -> None:
    latent = deepseek_v3().kv_bytes_per_token
    assert latent == 70_272
    stored = plan(
        PlanRequest(deepseek_v3(), "llama.cpp", context=4096, mla="heads", kv_memory=GIB)
    ).allocation.bytes_for_context
    assert 71 < stored / (4096 * latent) < 71.2  # keys of 192, values of 128
    equal = llama("mha", num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128)
    assert 56 < equal.kv_bytes_per_token / latent < 57  # keys and values of 128


def test_llama_2_70b_batch_32_at_4096() -> None:
    assert 32 * llama_70b().context_bytes(4096) == 40 * GIB
    without_groups = llama(
        "mha-70b", num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=64
    )
    assert 32 * without_groups.context_bytes(4096) == 320 * GIB


def test_gpt2_at_its_own_limit() -> None:
    gpt2 = load_model_spec(
        {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": 12,
            "n_head": 12,
            "n_embd": 768,
            "n_positions": 1024,
            "max_position_embeddings": 1024,
            "vocab_size": 50257,
        },
        "gpt2",
    )
    answer = plan(PlanRequest(gpt2, kv_format="fp16", kv_memory=GIB))
    assert answer.context == 1024
    assert answer.allocation.bytes_for_context == 36 * 2**20


def test_llama_405b_at_32k_and_128k() -> None:
    model = llama("405b", num_hidden_layers=126, hidden_size=16384, num_attention_heads=128)
    assert model.kv_bytes_per_token == 516_096
    assert model.context_bytes(32 * 1024) == int(15.75 * GIB)
    assert model.context_bytes(128 * 1024) == 63 * GIB


def test_a_million_tokens_of_a_70b_model() -> None:
    assert llama_70b().kv_bytes_per_token == 327_680
    assert llama_70b().context_bytes(2**20) == 320 * GIB
