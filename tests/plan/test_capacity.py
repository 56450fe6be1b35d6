"""Budgets, boundaries and parallel degrees: the planner's own arithmetic."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.models import deepseek_v3, gemma_4_26b, llama, llama_70b, qwen_hybrid_27b

from kvern.errors import CapacityError, UsageError
from kvern.plan import PlanRequest, find_device, load_devices, plan
from kvern.plan.need import options_for, parse_need
from kvern.plan.prefixes import plan_prefixes
from kvern.spec.groups import make_kv_plan
from kvern.spec.layers import ModelSpec

GIB = 2**30
MODELS = (llama(), deepseek_v3(), gemma_4_26b(), qwen_hybrid_27b())
ENGINES = (("kvern", None), ("vllm", "0.19"), ("vllm", None), ("sglang", None), ("llama.cpp", None))


@given(
    model=st.sampled_from(MODELS),
    engine=st.sampled_from(ENGINES[:4]),
    memory=st.integers(8 * GIB, 60 * GIB),
    context=st.integers(1, 60_000),
)
def test_blocks_fill_the_budget_and_never_exceed_it(
    model: ModelSpec, engine: tuple[str, str | None], memory: int, context: int
) -> None:
    answer = plan(
        PlanRequest(model, *engine, kv_memory=memory, context=context, slots=4, max_num_seqs=4)
    )
    rank = answer.per_rank[0]
    if engine[0] != "sglang":  # its buffers hold a page and a state more than its budget counts
        assert 0 <= rank.unused_bytes < rank.block_bytes
    assert answer.allocation.max_concurrency > 0
    larger = plan(replace(answer.request, kv_memory=memory + GIB))
    assert larger.allocation.capacity_tokens >= answer.allocation.capacity_tokens
    longer = plan(replace(answer.request, context=context + 1000))
    assert longer.allocation.bytes_for_context >= answer.allocation.bytes_for_context
    assert longer.allocation.blocks_per_request >= answer.allocation.blocks_per_request


@given(
    model=st.sampled_from(MODELS),
    engine=st.sampled_from(ENGINES),
    memory=st.integers(2 * GIB, 12 * GIB),
)
def test_the_longest_request_fits_and_one_token_more_does_not(
    model: ModelSpec, engine: tuple[str, str | None], memory: int
) -> None:
    request = PlanRequest(model, *engine, kv_memory=memory, context=1024, slots=1)
    longest = plan(request).allocation.longest_context
    assert plan(replace(request, context=longest)).allocation.fits
    if longest < (model.max_model_len or 0):
        beyond = plan(replace(request, context=longest + 1)).allocation
        assert not beyond.fits
        assert beyond.longest_context == longest


@pytest.mark.parametrize("engine", ["kvern", "vllm"])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_the_exact_need_fits_and_a_byte_less_does_not(engine: str, kv_format: str) -> None:
    request = PlanRequest(llama(), engine, "0.19" if engine == "vllm" else None, context=4096,
                          kv_format=kv_format, kv_memory=8 * GIB, max_num_seqs=1)  # fmt: skip
    a = plan(request).allocation
    blocks = a.blocks_per_request + (engine == "kvern")  # kvern's null block
    need = blocks * a.block_bytes[0] + a.extras.get("open_bytes", 0)
    assert plan(replace(request, kv_memory=need)).allocation.fits
    assert not plan(replace(request, kv_memory=need - 1)).allocation.fits


@pytest.mark.parametrize("model", MODELS, ids=[model.name for model in MODELS])
@pytest.mark.parametrize("kv_format", ["bf16", "int8", "kivi2"])
def test_kvern_s_pool_is_the_engine_s_own_plan(model: ModelSpec, kv_format: str) -> None:
    request = PlanRequest(model, kv_format=kv_format, block_size=32, kv_memory=3 * GIB,
                          max_num_seqs=4)  # fmt: skip
    answer = plan(request)
    own = make_kv_plan(model, kv_format, 32, 3 * GIB, max_num_seqs=4)
    assert answer.num_blocks == own.num_blocks
    assert answer.allocation.block_bytes == (own.page_bytes,)
    assert answer.per_rank[0].kv_used_bytes == own.total_bytes
    assert answer.allocation.extras["waste_bytes"] == own.waste


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_heads_are_split_while_they_divide_and_replicated_above(kv_heads: int, ranks: int) -> None:
    model = llama(num_key_value_heads=kv_heads)
    one = plan(PlanRequest(model, kv_memory=GIB)).allocation.block_bytes[0]
    split = plan(PlanRequest(model, kv_memory=GIB, tp=ranks)).allocation.block_bytes[0]
    assert split == one // min(kv_heads, ranks)


def test_blocks_are_as_long_as_what_a_format_quantises_together() -> None:
    free = plan(PlanRequest(llama(), kv_memory=GIB, kv_format="kivi2"))
    given = plan(PlanRequest(llama(), kv_memory=GIB, kv_format="kivi2", block_size=32))
    assert free.allocation.block_size == 32
    assert free.num_blocks == given.num_blocks
    assert any("--block-size 32" in note for note in free.assumptions)
    assert not any("--block-size 32" in note for note in given.assumptions)
    with pytest.raises(UsageError, match="multiple of 32"):
        plan(PlanRequest(llama(), kv_memory=GIB, kv_format="kivi2", block_size=16))


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="3 does not divide the 32 attention heads"):
        PlanRequest(llama(), tp=3)
    with pytest.raises(UsageError, match="6 KV heads cannot be spread over 4"):
        plan(PlanRequest(llama(num_key_value_heads=6), kv_memory=GIB, tp=4))
    with pytest.raises(UsageError, match="--dcp 3"):
        PlanRequest(llama(), tp=4, dcp=3)
    with pytest.raises(UsageError, match="at most 32"):
        PlanRequest(llama(), pp=33)
    with pytest.raises(UsageError, match="does not spread the 32 layers"):
        PlanRequest(llama(), pp=2, pp_layers=(10, 10))


def test_stages_hold_embedding_and_head_where_they_lie() -> None:
    answer = plan(PlanRequest(llama_70b(), device=find_device("h200"), pp=3))
    first, middle, last = (rank.weights_bytes or 0 for rank in answer.per_rank)
    assert [rank.num_layers for rank in answer.per_rank] == [27, 27, 26]
    embedding = 128256 * 8192 * 2
    assert first - middle == pytest.approx(embedding, abs=8)
    assert last < first
    assert answer.tightest_rank == 0


def test_a_budget_below_the_weights_names_the_gap_and_changes_that_fit() -> None:
    h100 = find_device("h100-sxm")
    request = PlanRequest(llama_70b(), device=h100, context=8192, weights_format="bf16")
    with pytest.raises(
        CapacityError, match=r"60\.1 GiB too little: the smallest change"
    ) as refusal:
        plan(request)
    flags = dict(re.findall(r"--(\S+) ([\w.-]*\w)", str(refusal.value)))
    assert flags == {"weights-format": "fp8", "tp": "2", "device": "b200"}
    for changed in (
        replace(request, weights_format="fp8"),
        replace(request, tp=2),
        replace(request, device=find_device("b200")),
    ):
        assert plan(changed).allocation.fits


def test_memory_minus_weights_minus_reserve_is_the_budget() -> None:
    answer = plan(
        PlanRequest(
            llama(), "vllm", "0.11.x", memory=80 * GIB, utilization=0.9,
            weights_bytes=15 * GIB, reserve=5 * GIB, context=16_000,
        )
    )  # fmt: skip
    assert answer.per_rank[0].kv_budget_bytes == 72 * GIB - 20 * GIB
    assert answer.per_rank[0].weights_bytes == 15 * GIB


def test_what_is_missing_is_named() -> None:
    with pytest.raises(UsageError, match="--device NAME, --memory SIZE"):
        plan(PlanRequest(llama()))
    without = replace(llama(), parameters=None, missing_fields=("intermediate_size",))
    with pytest.raises(UsageError, match="lacks intermediate_size"):
        plan(PlanRequest(without, memory=80 * GIB))
    assert plan(PlanRequest(without, memory=80 * GIB, weights_bytes=15 * GIB)).allocation.fits
    with pytest.raises(UsageError, match="states no context limit"):
        plan(PlanRequest(replace(llama(), max_model_len=None), kv_memory=GIB))


@pytest.mark.parametrize("field", ["memory", "context", "tp", "block_size", "kv_memory", "slots"])
@pytest.mark.parametrize("value", [0, -4])
def test_zero_and_negative_values_are_refused(field: str, value: int) -> None:
    with pytest.raises(UsageError, match="must be positive"):
        PlanRequest(llama(), **{field: value})  # type: ignore[arg-type]


def test_warnings_say_what_people_get_wrong() -> None:
    device = find_device("h100-sxm")
    answer = plan(PlanRequest(llama_70b(), device=device, tp=16, weights_format="fp8",
                              context=200_000))  # fmt: skip
    text = " ".join(answer.warnings)
    assert "do not make the cache narrower" in text
    assert "less than 80 GiB" in text
    assert "each head is stored 2 times" in text
    assert "the model's own limit is 131,072" in text
    latent = plan(PlanRequest(deepseek_v3(), kv_memory=GIB * 40, tp=8))
    assert "latent is replicated on all 8 tensor ranks" in " ".join(latent.warnings)


# ----------------------------------------------------------------------------------------- devices


def test_devices_keep_their_sources_and_never_multiply_marketed_gigabytes() -> None:
    devices = load_devices()
    assert len(devices) > 30
    for device in devices.values():
        assert device.sources
        assert device.confidence in ("high", "medium", "low")
        if device.vendor == "nvidia" and not device.memory_is_estimated:
            assert device.memory_bytes % 2**20 == 0  # a driver's MiB
    assert devices["h100-sxm"].memory_bytes == 81_559 * 2**20
    assert devices["b200"].memory_bytes == 183_359 * 2**20
    assert devices["b200"].cache_bytes == 126_000_000


def test_the_catalogue_agrees_with_its_checked_source(shared_data: Path) -> None:
    rows = json.loads((shared_data / "devices.json").read_text())["devices"]
    devices = load_devices()
    assert [row["id"] for row in rows] == list(devices)
    for row in rows:
        device = devices[row["id"]]
        reported = row["memory_gib_reported"]
        assert device.memory_is_estimated == (reported is None)
        if reported is not None:
            assert round(device.memory_bytes / GIB, 3) == pytest.approx(reported, abs=0.0011)
        else:
            assert device.memory_bytes == int(row["memory_gb_marketed"] * 10**9 * 0.985)
        assert device.bandwidth == row["bandwidth_gbs"] * 1e9
        assert device.confidence == row["confidence"]
        assert len(device.sources) == len(row["sources"])
        for name, rate in row["tflops_dense"].items():
            assert device.flops.get(name) == (None if rate is None else rate * 1e12)


def test_devices_are_found_by_id_or_words_and_nearest_names_are_offered() -> None:
    assert find_device("NVIDIA H200 SXM 141GB").id == "h200"
    assert find_device("mi300x").name == "AMD Instinct MI300X"
    with pytest.raises(UsageError, match="h100-sxm, h100-pcie, h100-nvl"):
        find_device("h100")
    with pytest.raises(UsageError, match="nearest: rtx5090"):
        find_device("rtx 5091")


# --------------------------------------------------------------------------------------- the need


def test_the_smallest_set_up_serves_the_need_and_smaller_ones_do_not() -> None:
    request = PlanRequest(llama(), "vllm", "0.19")
    options = options_for(request, "16x8192")
    best = options[0]
    assert best.concurrency >= 16
    assert all(o.total_memory >= best.total_memory for o in options)
    fixed = options_for(replace(request, device=find_device("h100-sxm")), "16x8192")
    assert fixed[0].tp == 1
    assert not options_for(replace(request, device=find_device("l4"), tp=2), "4000x8192")


@pytest.mark.parametrize("text", ["32", "0x5", "axb", "32x", "32x-4"])
def test_a_malformed_need_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="32x16384"):
        parse_need(text)


# --------------------------------------------------------------------------------------- prefixes


def test_a_shared_prefix_is_stored_once() -> None:
    a = plan(PlanRequest(llama(), kv_memory=8 * GIB, context=2048)).allocation
    shared = plan_prefixes(a.blocks_of, a.shared_blocks_of, a.usable_blocks, 2048, 1500)
    assert shared.shared_blocks == 93  # 1,500 tokens fill 93 blocks; the 94th is each request's own
    assert shared.own_blocks == 128 - 93
    assert shared.requests == (a.usable_blocks - 93) // 35 > shared.requests_without
    kept = plan_prefixes(a.blocks_of, a.shared_blocks_of, a.usable_blocks, 2048, 1500, (10, 800))
    assert kept.retained_blocks == 10 * 50
    assert kept.requests < shared.requests
    with pytest.raises(UsageError, match="leaves nothing"):
        plan_prefixes(a.blocks_of, a.shared_blocks_of, a.usable_blocks, 2048, 2048)
    with pytest.raises(CapacityError, match="retain fewer"):
        plan_prefixes(a.blocks_of, a.shared_blocks_of, a.usable_blocks, 2048, 0, (9999, 800))


def test_a_need_that_cannot_be_weighed_is_no_need_that_nothing_serves() -> None:
    unknown = llama(intermediate_size=None)
    with pytest.raises(UsageError, match=r"lacks intermediate_size.*--weights SIZE"):
        options_for(PlanRequest(unknown), "2x4096")
    assert options_for(PlanRequest(unknown, weights_bytes=16 * GIB), "2x4096")
    assert options_for(PlanRequest(llama_70b(), device=find_device("l4")), "10000x8192") == []


@pytest.mark.parametrize("fixed", [{"memory": GIB}, {"kv_memory": GIB}, {"num_blocks": 9}])
def test_a_need_leaves_the_memory_open(fixed: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="searches for the memory"):
        options_for(PlanRequest(llama(), **fixed), "2x4096")  # type: ignore[arg-type]
