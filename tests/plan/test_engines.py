"""Representative allocations of other engines, with the model's fields in the test itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.models import (
    deepseek_v3,
    gemma_3_270m,
    gemma_4_26b,
    llama,
    llama_70b,
    minicpm_3,
    qwen_hybrid_27b,
)

from kvern.errors import UsageError
from kvern.plan import ExtraCache, PlanRequest, find_device, plan
from kvern.plan.result import Allocation
from kvern.plan.versions import parse_version
from kvern.spec.layers import ModelSpec

GIB = 2**30
MIB = 2**20


def vllm(model: ModelSpec, version: str, **fields: object) -> Allocation:
    return plan(PlanRequest(model, "vllm", version, **fields)).allocation  # type: ignore[arg-type]


def test_v0_prints_cpu_blocks_from_swap_space() -> None:
    a = vllm(llama_70b(), "0.2.2", tp=2, num_blocks=2593, context=4096)
    assert a.block_bytes[0] == 2_621_440
    assert a.extras["cpu_blocks"] == 1638


def test_the_printed_tokens_of_equal_layers_are_blocks_times_block_size() -> None:
    a = vllm(llama(num_hidden_layers=48, num_key_value_heads=4), "0.11", num_blocks=3310,
             context=16384)  # fmt: skip
    assert a.capacity_tokens == 52_960
    assert round(a.max_concurrency, 2) == 3.23


@pytest.mark.parametrize(("version", "tokens"), [("0.19", 451_040), ("0.22", 4_380_565)])
def test_the_meaning_of_the_printed_tokens_changed(version: str, tokens: int) -> None:
    """Window layers dominate the page; the later print is concurrency times length."""
    a = vllm(gemma_4_26b(), version, kv_format="fp8", num_blocks=169_144, context=131_072,
             max_batched_tokens=2048)  # fmt: skip
    assert a.blocks_per_request == 4096 + 5 * 193
    assert a.capacity_tokens == tokens
    assert round(a.max_concurrency, 2) == 33.42


def test_hybrid_block_grows_until_a_page_holds_a_state() -> None:
    a = vllm(qwen_hybrid_27b(), "0.28.0", num_blocks=469, context=4096)
    assert (a.block_size, a.blocks_per_request, a.capacity_tokens) == (784, 12, 160_085)
    user = vllm(qwen_hybrid_27b(), "0.28.0", num_blocks=469, context=4096, block_size=816)
    assert user.block_size == 816
    assert vllm(qwen_hybrid_27b(), "0.19", num_blocks=9, kv_format="fp8").block_size == 1568


@pytest.mark.parametrize(
    ("version", "device", "fields", "tokens"),
    [
        ("0.25", None, {}, 2048),
        ("0.25", "a100-80", {}, 2048),
        ("0.25", "h100-sxm", {}, 8192),
        ("0.27", "b200", {}, 2 * 8192),
        ("0.28", "b200", {}, 2 * 16384),
        ("0.28", None, {"max_batched_tokens": 1000}, 2 * 1000),
        ("0.28", None, {"max_batched_tokens": 1000, "tp": 1, "pp": 3}, 3 * 1000),
    ],
)
def test_a_window_holds_the_tokens_in_flight(
    version: str, device: str | None, fields: dict[str, int], tokens: int
) -> None:
    found = find_device(device) if device else None
    a = vllm(gemma_4_26b(), version, kv_memory=20 * GIB, device=found, context=262144, **fields)
    windows = [group for group in a.groups if group.kind.startswith("sliding")]
    assert {group.blocks_per_request for group in windows} == {-(-(1023 + tokens) // 16) + 1}


def test_draft_tokens_add_columns_states_and_the_model_s_own_layer() -> None:
    a = vllm(qwen_hybrid_27b(), "0.29", tp=2, num_blocks=4263, context=184_320,
             speculative_tokens=2)  # fmt: skip
    assert a.block_bytes[0] == 27_852_800
    assert (a.blocks_per_request, a.capacity_tokens) == (243, 3_233_564)


def test_a_drafter_forces_its_own_group_size() -> None:
    drafter = ExtraCache("sliding", 5, num_kv_heads=8, key_dim=128, value_dim=128, window=2048)
    a = vllm(qwen_hybrid_27b(), "0.28.0", num_blocks=1018, context=4096, speculative_tokens=7,
             extra_caches=(drafter,))  # fmt: skip
    assert {g.num_layers + g.padding_layers for g in a.groups} == {5}
    assert len(a.groups) == 4 + 10 + 1
    assert (a.block_size, a.blocks_per_request, a.capacity_tokens) == (832, 116, 35_945)


def test_hidden_states_take_a_divisor_of_the_common_block() -> None:
    hidden = ExtraCache("hidden", token_bytes=10_240)
    a = vllm(qwen_hybrid_27b(), "0.28.0", num_blocks=458, context=4096, speculative_tokens=1,
             extra_caches=(hidden,))  # fmt: skip
    group = next(g for g in a.groups if g.kind == "hidden")
    assert (group.block_size, group.blocks_per_request) == (200, 21)
    assert group.page_waste_bytes / group.page_bytes == 0.375


def test_a_latent_is_replicated_until_context_parallelism_divides_it() -> None:
    one = vllm(deepseek_v3(), "0.11.2", kv_memory=40 * GIB, context=8192)
    eight = vllm(deepseek_v3(), "0.11.2", kv_memory=40 * GIB, context=8192, tp=8)
    split = vllm(deepseek_v3(), "0.11.2", kv_memory=40 * GIB, context=8192, tp=8, dcp=8)
    assert one.block_size == 64
    assert eight.capacity_tokens == one.capacity_tokens
    assert split.capacity_tokens == 8 * one.capacity_tokens
    assert split.blocks_per_request == one.blocks_per_request / 8


@pytest.mark.parametrize("engine", ["kvern", "vllm"])
def test_context_parallelism_divides_what_tensor_ranks_hold_in_common(engine: str) -> None:
    """8 KV heads on 16 ranks lie twice: shared by two ranks each, the pool holds twice as much."""
    request = PlanRequest(llama(), engine, kv_memory=GIB, context=8192, tp=16)
    one, two = (plan(replace(request, dcp=n)).allocation for n in (1, 2))
    assert two.capacity_tokens == 2 * one.capacity_tokens
    assert two.max_concurrency == 2 * one.max_concurrency
    latent = PlanRequest(deepseek_v3(), engine, kv_memory=GIB, context=8192, tp=8)
    one, eight = (plan(replace(latent, dcp=n)).allocation for n in (1, 8))
    assert eight.capacity_tokens == 8 * one.capacity_tokens


def test_context_parallelism_is_refused_where_nothing_is_held_twice() -> None:
    with pytest.raises(UsageError, match="8 KV heads of model 1 times: choose --dcp 1, or --tp 16"):
        PlanRequest(llama(), tp=2, dcp=2)
    with pytest.raises(UsageError, match="choose --dcp 2"):
        PlanRequest(llama(), tp=16, dcp=4)
    with pytest.raises(UsageError, match="SGLang"):
        plan(PlanRequest(deepseek_v3(), "sglang", kv_memory=GIB, tp=8, dcp=8))


def test_heads_below_the_tensor_degree_are_replicated() -> None:
    two_heads = llama(num_key_value_heads=2)
    sizes = [vllm(two_heads, "0.11", kv_memory=GIB, tp=tp).block_bytes[0] for tp in (1, 2, 4, 8)]
    assert sizes == [sizes[0], sizes[0] // 2, sizes[0] // 2, sizes[0] // 2]


def test_the_smallest_stage_decides_for_all_ranks() -> None:
    answer = plan(PlanRequest(llama(), "vllm", "0.11", pp=2, pp_layers=(12, 20), kv_memory=GIB))
    assert answer.tightest_rank == 1
    assert answer.per_rank[0].num_blocks > answer.per_rank[1].num_blocks
    assert answer.num_blocks == answer.per_rank[1].num_blocks


def test_admission_charged_all_stages_in_one_range_of_versions() -> None:
    request = PlanRequest(
        llama(num_hidden_layers=48, num_key_value_heads=4), "vllm", "0.15.2rc1", pp=2,
        kv_memory=int(3.181 * GIB), context=131_072,
    )  # fmt: skip
    buggy = plan(request).allocation
    fixed = plan(replace(request, engine_version="0.17")).allocation
    assert buggy.bytes_for_context == 2 * fixed.bytes_for_context == 12 * GIB
    assert buggy.longest_context == 34_736
    reserved = plan(replace(request, engine_version="0.33")).allocation
    assert reserved.longest_context == fixed.longest_context - 16


def test_sglang_holds_a_page_more_than_it_counts() -> None:
    request = PlanRequest(
        deepseek_v3(), "sglang", "0.5.8", tp=8, num_tokens=2_454_421, context=8192
    )
    answer = plan(request)
    pool = answer.allocation.pools[0]
    assert pool.k_bytes == (2_454_421 + 1) * 70_272
    assert f"{pool.bytes / GIB:.2f}" == "160.63"


def test_sglang_counts_states_by_slots() -> None:
    request = PlanRequest(
        qwen_hybrid_27b(), "sglang", "0.5.1x", num_tokens=330_323, slots=124, context=8192
    )
    pools = {pool.name: pool for pool in plan(request).allocation.pools}
    assert f"{pools['full'].k_bytes / GIB:.2f}" == "10.08"
    assert f"{pools['state'].parts['ssm'] / GIB:.2f}" == "17.58"
    assert f"{pools['state'].parts['conv'] / GIB:.2f}" == "0.34"


@pytest.mark.parametrize(
    ("context", "slots", "mib"), [(8192, 1, 39), (8192, 2, 54), (8192, 4, 84), (1024, 3, 27)]
)
def test_llama_cpp_pads_every_stream(context: int, slots: int, mib: int) -> None:
    """Three slots of 1,024 tokens take more than four: each stream is padded to 256 cells."""
    request = PlanRequest(gemma_3_270m(), "llama.cpp", "b10107", context=context, slots=slots)
    assert sum(pool.bytes for pool in plan(request).allocation.pools) == mib * MIB


@pytest.mark.parametrize(
    ("version", "mib"), [("2025-03", 305_000), ("2025-06", 4148), ("2026-09", 2196)]
)
def test_llama_cpp_stores_mla_three_ways(version: str, mib: int) -> None:
    request = PlanRequest(deepseek_v3(), "llama.cpp", version, context=32768)
    size = plan(request).allocation.bytes_for_context / MIB
    assert size == pytest.approx(mib, rel=0.5 if mib > 10**5 else 0)


@pytest.mark.parametrize("family", ["mistral", "phi3", "starcoder2"])
def test_llama_cpp_stores_every_token_of_families_whose_window_it_does_not_read(
    family: str,
) -> None:
    """A 7B at 32,768 cells prints 4,096 MiB, as it did before window caches came."""
    model = llama(model_type=family, sliding_window=4096, max_window_layers=0)
    for version in ("2025-03", None):
        request = PlanRequest(model, "llama.cpp", version, context=32768)
        (pool,) = plan(request).allocation.pools
        assert (pool.name, pool.cells, pool.bytes) == ("full", 32768, 4096 * MIB)


@pytest.mark.parametrize("version", ["2025-03", "2025-06", None])
def test_llama_cpp_expands_the_latent_of_families_without_an_absorbed_graph(
    version: str | None,
) -> None:
    """Keys of 40 heads of 64 + 32 elements, values of 40 heads of 64."""
    request = PlanRequest(minicpm_3(), "llama.cpp", version, context=4096)
    (pool,) = plan(request).allocation.pools
    assert pool.k_bytes == 4096 * 62 * 40 * 96 * 2
    assert pool.v_bytes == 4096 * 62 * 40 * 64 * 2


def test_llama_cpp_quantised_rows_are_exact() -> None:
    model = llama(num_hidden_layers=64)
    q8 = plan(PlanRequest(model, "llama.cpp", "2025-01", context=32768, kv_format="q8_0"))
    assert q8.allocation.bytes_for_context == 4352 * MIB
    mixed = plan(PlanRequest(model, "llama.cpp", context=32768, kv_format="q8_0/q4_0"))
    pool = mixed.allocation.pools[0]
    assert (pool.k_bytes, pool.v_bytes) == (2176 * MIB, 1152 * MIB)


def test_unknown_formats_are_refused_with_the_known_ones() -> None:
    for engine in ("kvern", "vllm", "sglang", "llama.cpp"):
        with pytest.raises(UsageError, match="q9"):
            plan(PlanRequest(llama(), engine, kv_format="q9", kv_memory=GIB))


@pytest.mark.parametrize(
    ("text", "release", "date", "build"),
    [
        ("v0.11", (0, 11), (), None),
        ("v0.2x", (0, 29), (), None),
        ("v0.2.x", (0, 2, 99), (), None),
        ("v0.15.2rc1", (0, 15, 2), (), None),
        ("v0.19-0.20", (0, 19), (), None),
        ("fork of v0.2x (someone)", (0, 29), (), None),
        ("b6xxx", (), (), 6999),
        ("b10107", (), (), 10107),
        ("2026-0x Vulkan", (), (2026, 9), None),
        ("2025-02 (PR)", (), (2025, 2), None),
        ("2024", (), (2024,), None),
    ],
)
def test_versions_are_read_as_people_write_them(
    text: str, release: tuple[int, ...], date: tuple[int, ...], build: int | None
) -> None:
    version = parse_version(text)
    assert (version.release, version.date, version.build) == (release, date, build)
    assert version.is_pull_request == ("(PR)" in text)


def test_no_version_means_the_newest_rules() -> None:
    assert parse_version(None).is_latest
    assert parse_version("main").is_latest
