"""Time bounds against arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.models import deepseek_v3, llama

from kvern.errors import UsageError
from kvern.plan import PlanRequest, find_device
from kvern.plan.roofline import (
    attention_flops,
    decode_bound,
    offload_bound,
    prefill_s,
    read_weight_bytes,
    step_kv_bytes,
    token_flops,
)
from kvern.spec.configs import load_model_spec

H100 = find_device("h100-sxm")


def test_a_decode_step_reads_the_weights_once_and_each_cache_once() -> None:
    model = llama()
    assert model.parameters is not None
    weights = 2 * model.parameters.total
    bound = decode_bound(PlanRequest(model), H100, 8, 4096, weights)
    assert bound.kv_bytes == 8 * 4096 * 131_072
    embedding = 2 * 128_256 * 4096  # a row of it for each request, and the head once
    assert bound.weight_bytes == weights - embedding + 8 * 2 * 4096
    assert bound.memory_s == (bound.weight_bytes + bound.kv_bytes) / 3350e9
    # scores and weighted sum: 4 operations per query head, dimension and token
    attention = 4 * 32 * 128 * 4096 * 32
    assert attention_flops(model, 4096) == attention
    assert bound.flops == 8 * (2 * model.parameters.active + attention)
    assert bound.compute_s == bound.flops / 989e12
    assert bound.bound_by == "bandwidth"
    assert bound.step_s == bound.memory_s
    assert bound.kv_fits_on_chip is False


def test_the_turning_batch_is_the_first_that_arithmetic_bounds() -> None:
    model = llama()
    assert model.parameters is not None
    weights = 2 * model.parameters.total
    request = PlanRequest(model)
    turning = decode_bound(request, H100, 1, 16, weights).turning_batch
    assert turning is not None
    assert 280 < turning < 340  # 989e12 / 3350e9 operations a byte, two bytes and two operations
    assert decode_bound(request, H100, turning, 16, weights).bound_by == "arithmetic"
    assert decode_bound(request, H100, turning - 1, 16, weights).bound_by == "bandwidth"
    assert decode_bound(request, H100, 1, 100_000, weights).turning_batch is None


def test_tensor_ranks_share_the_work() -> None:
    request = PlanRequest(llama(), tp=4)
    assert step_kv_bytes(request, 1000) * 4 == step_kv_bytes(replace(request, tp=1), 1000)
    assert step_kv_bytes(PlanRequest(deepseek_v3(), tp=8), 1000) == 1000 * 70_272  # replicated


def test_experts_are_read_as_far_as_the_batch_chooses_them() -> None:
    model = load_model_spec(
        {
            "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 64,
            "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 100, "num_local_experts": 8,
            "num_experts_per_tok": 2, "max_position_embeddings": 4096,
        }
    )  # fmt: skip
    assert model.parameters is not None
    everything = 2 * model.parameters.total
    one = read_weight_bytes(model, 1, everything)
    embedding = 100 * 64
    assert one / 2 == pytest.approx(
        model.parameters.total - 6 / 8 * _routed(model) - 0.99 * embedding
    )
    assert one < read_weight_bytes(model, 4, everything) < everything
    assert read_weight_bytes(model, 10_000, everything) == pytest.approx(everything, rel=1e-6)


def _routed(model: object) -> int:
    return sum(layer.parameters.experts for layer in model.layers)  # type: ignore[attr-defined]


def test_an_absorbed_latent_costs_more_operations_than_its_heads() -> None:
    model = deepseek_v3(num_hidden_layers=1)
    assert attention_flops(model, 1000) == 2 * 128 * 1000 * (2 * 512 + 64)


def test_prefill_and_offload_bounds_agree_about_the_crossing() -> None:
    request = PlanRequest(llama())
    bound = offload_bound(request, H100, 32_768)
    assert bound.recompute_s == prefill_s(request, H100, 32_768)
    assert bound.kv_bytes == 32_768 * 131_072
    assert bound.load_s["ram"] == bound.kv_bytes / 64e9
    start = bound.faster_from["ssd"]
    assert start
    assert step_kv_bytes(request, start) / 7e9 <= prefill_s(request, H100, start)
    assert step_kv_bytes(request, start - 1) / 7e9 > prefill_s(request, H100, start - 1)


def test_without_an_arithmetic_rate_or_parameters_there_is_no_bound() -> None:
    with pytest.raises(UsageError, match="no arithmetic rate"):
        decode_bound(PlanRequest(llama()), find_device("epyc-9654"), 1, 100, 10**9)
    unknown = replace(llama(), parameters=None, missing_fields=("vocab_size",))
    with pytest.raises(UsageError, match="lacks vocab_size"):
        token_flops(unknown, 100)
