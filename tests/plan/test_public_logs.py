"""Start-up lines that people published: all must come out.

No rule was made from them, except that the first line of the sparse hybrid confirmed its layout.
Each case names its source. Memory printed with two decimals stands for an interval.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.plan.models import (
    deepseek_v4,
    gemma_4_12b,
    gemma_4_26b,
    gpt_oss,
    kimi_linear,
    nemotron_30b,
    qwen_hybrid_27b,
    qwen_hybrid_35b,
    qwen_sparse_hybrid,
)

from kvern.plan import ExtraCache, PlanRequest, plan
from kvern.spec.layers import ModelSpec

GIB = 2**30
MIB = 2**20

FULL_DRAFTER = ExtraCache("full", 8, num_kv_heads=4, key_dim=128, value_dim=128)
DRAFTER = ExtraCache("sliding", 5, num_kv_heads=8, key_dim=128, value_dim=128, window=2048)

CASES: dict[str, tuple[ModelSpec, dict[str, Any], int, float]] = {
    # vllm-project/vllm#28228: 2.30 GiB on two ranks, "Add 1 padding layers"
    "kimi-linear, KDA and MLA over two ranks": (
        kimi_linear(),
        {"engine_version": "0.11.1", "gib": 2.30, "tp": 2, "context": 120_000},
        75_840,
        2.48,
    ),
    # noonghunna/club-3090#612: 5.98 GiB
    "qwen 35B with fp8 keys and values": (
        qwen_hybrid_35b(),
        {"engine_version": "0.24.0", "gib": 5.98, "context": 131_072, "kv_format": "fp8"},
        567_978,
        4.33,
    ),
    # noonghunna/club-3090#295: three draft tokens, two ranks; 424 blocks follow from both figures
    "qwen 27B with its own draft layer": (
        qwen_hybrid_27b(),
        {
            "engine_version": "0.22",
            "num_blocks": 424,
            "tp": 2,
            "context": 262_144,
            "kv_format": "fp8_e5m2",
            "speculative_tokens": 3,
        },
        620_944,
        2.37,
    ),
    # vllm-project/vllm#49011: nvfp4 keys and values; "Add 3 padding layers"
    "qwen 27B in nvfp4": (
        qwen_hybrid_27b(),
        {
            "engine_version": "0.25",
            "num_blocks": 666,
            "context": 1_048_576,
            "kv_format": "nvfp4",
            "speculative_tokens": 2,
        },
        1_823_372,
        1.74,
    ),
    # v0.23.1rc1.dev531, nvidia/Qwen3.6-27B-NVFP4: two draft tokens, 48.6 GiB
    "qwen 27B with two draft tokens in fp8": (
        qwen_hybrid_27b(),
        {
            "engine_version": "0.23.1rc1",
            "gib": 48.6,
            "context": 262_144,
            "kv_format": "fp8",
            "speculative_tokens": 2,
        },
        1_394_129,
        5.32,
    ),
    # v0.22.0, a drafter of 8 layers; "Add 2 padding layers", "Add 6 padding layers"
    "qwen 35B with a drafter": (
        qwen_hybrid_35b(),
        {
            "engine_version": "0.22.0",
            "gib": 71.59,
            "context": 200_000,
            "speculative_tokens": 6,
            "extra_caches": (FULL_DRAFTER,),
        },
        1_470_588,
        7.35,
    ),
    # v0.29, --kv-cache-memory-bytes 7000000000, states in bf16, a drafter with windows
    "qwen 27B with a drafter's windows": (
        qwen_hybrid_27b(),
        {
            "engine_version": "0.29",
            "bytes": 7_000_000_000,
            "context": 71_680,
            "state_dtype": "bf16",
            "speculative_tokens": 7,
            "extra_caches": (DRAFTER,),
        },
        73_315,
        1.02,
    ),
    # a workstation's two boots and two small servers with the same sparse hybrid
    "sparse hybrid, 8.64 GiB": (
        qwen_sparse_hybrid(),
        {
            "engine_version": "0.28",
            "gib": 8.64,
            "context": 262_144,
            "state_dtype": "bf16",
            "speculative_tokens": 3,
        },
        315_039,
        1.20,
    ),
    "sparse hybrid, 9.59 GiB": (
        qwen_sparse_hybrid(),
        {
            "engine_version": "0.28",
            "gib": 9.59,
            "context": 262_144,
            "state_dtype": "bf16",
            "speculative_tokens": 3,
        },
        350_043,
        1.34,
    ),
    "sparse hybrid, 569 blocks": (
        qwen_sparse_hybrid(),
        {
            "engine_version": "0.28",
            "num_blocks": 569,
            "context": 262_144,
            "speculative_tokens": 3,
        },
        806_269,
        3.08,
    ),
    # vllm-project/vllm#39866: 16,384 batched tokens
    "gemma 26B with windows": (
        gemma_4_26b(),
        {
            "engine_version": "0.19.1rc1",
            "num_blocks": 29_346,
            "context": 262_144,
            "kv_format": "fp8",
            "max_batched_tokens": 16_384,
        },
        78_256,
        2.15,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_published_line_comes_out(name: str) -> None:
    model, inputs, tokens, concurrency = CASES[name]
    fields = dict(inputs)
    gib = fields.pop("gib", None)
    sizes = [fields.pop("bytes", None)]
    if gib is not None:
        sizes = [int((gib + d) * GIB) for d in (-0.005, 0.005)]
    answers = [
        plan(PlanRequest(model, "vllm", kv_memory=size, **fields)).allocation for size in sizes
    ]
    assert answers[0].capacity_tokens <= tokens <= answers[-1].capacity_tokens
    assert answers[0].max_concurrency - 0.005 <= concurrency
    assert concurrency <= answers[-1].max_concurrency + 0.005


def test_padding_layers_are_announced_as_the_log_does() -> None:
    request = PlanRequest(kimi_linear(), "vllm", "0.11.1", kv_memory=2 * GIB, tp=2)
    assert sum(group.padding_layers for group in plan(request).allocation.groups) == 1
    request = PlanRequest(
        qwen_hybrid_27b(), "vllm", "0.25", num_blocks=666, kv_format="nvfp4", speculative_tokens=2
    )
    assert sum(group.padding_layers for group in plan(request).allocation.groups) == 3


# Cells and MiB of the window cache, then of the full one, as llama.cpp prints them.
LLAMA_CPP: list[tuple[int, dict[str, Any], list[tuple[int, float]]]] = [
    (24, {"context": 8192, "ubatch": 128, "kv_format": "q8_0"}, [(256, 3.19), (8192, 102.0)]),
    (36, {"context": 65535, "slots": 4, "unified": True}, [(1024, 36.0), (65536, 2304.0)]),
    (24, {"context": 32768, "ubatch": 2048}, [(2304, 54.0), (32768, 768.0)]),
]


@pytest.mark.parametrize(("layers", "fields", "printed"), LLAMA_CPP)
def test_window_and_full_caches_of_llama_cpp(
    layers: int, fields: dict[str, Any], printed: list[tuple[int, float]]
) -> None:
    pools = plan(PlanRequest(gpt_oss(layers), "llama.cpp", **fields)).allocation.pools
    assert [(pool.cells, round(pool.bytes / MIB, 2)) for pool in pools] == printed


def test_keys_and_states_of_sglang() -> None:
    """Four ranks of 2 KV heads: a replicated head each; 8 slots of Mamba-2 states."""
    request = PlanRequest(nemotron_30b(), "sglang", "0.5.9", num_tokens=1_557_504, slots=8, tp=4)
    full, state = plan(request).allocation.pools
    assert round(full.k_bytes / GIB, 2) == 2.23
    assert round(state.parts["ssm"] / GIB, 2) == 0.10


@pytest.mark.parametrize(
    ("model", "fields", "cells", "keys"),
    [
        (
            gemma_4_26b(),
            {"block_size": 256, "num_tokens": 67_584},
            (67_584, 54_016),
            (0.65, 5.18),
        ),
        (
            gemma_4_12b(),
            {"kv_format": "fp4_e2m1", "num_tokens": 765_776},
            (765_776, 612_620),
            (1.64, 26.29),
        ),
    ],
    ids=["pages of 256", "fp4"],
)
def test_window_pool_of_sglang(
    model: ModelSpec, fields: dict[str, Any], cells: tuple[int, int], keys: tuple[float, float]
) -> None:
    """Cells and GB of keys, of the full pool and of the window pool."""
    pools = plan(PlanRequest(model, "sglang", "0.5.13", **fields)).allocation.pools
    assert tuple(pool.cells for pool in pools) == cells
    assert tuple(round(pool.k_bytes / GIB, 2) for pool in pools) == keys


def test_the_bytes_that_one_request_needs_are_the_ones_refused_at_start_up() -> None:
    """ "7.17 GiB KV cache is needed" for one request of 262,144 tokens."""
    request = PlanRequest(
        qwen_sparse_hybrid(),
        "vllm",
        "0.28",
        kv_memory=int(6.74 * GIB),
        context=262_144,
        state_dtype="bf16",
        speculative_tokens=3,
    )
    allocation = plan(request).allocation
    assert not allocation.fits
    assert round(allocation.bytes_for_context / GIB, 2) == 7.17


FLASH = deepseek_v4(2, 21, 20)
PRO = deepseek_v4(0, 30, 31)

# "DSV4 memory calculation": bytes of a full token, GB available, full tokens.
COMPRESSED: list[tuple[ModelSpec, dict[str, Any], float, float, int]] = [
    (FLASH, {"engine_version": "0.5.12"}, 15_955.85, 19.58, 1_317_632),
    (
        FLASH,
        {"engine_version": "0.5.12", "speculative_tokens": 3, "window_ratio": 0.8},
        176_983.05,
        87.26,
        529_408,
    ),
    (
        PRO,
        {"engine_version": "0.5.15", "window_ratio": 0.15, "max_num_seqs": 64},
        13_735.04,
        118.93,
        9_217_792,
    ),
    (
        PRO,
        {"engine_version": "0.5.15", "window_ratio": 0.15, "max_num_seqs": 64},
        13_735.04,
        91.24,
        7_053_056,
    ),
]


@pytest.mark.parametrize(("model", "fields", "token_bytes", "gib", "tokens"), COMPRESSED)
def test_compressed_attention_in_sglang(
    model: ModelSpec, fields: dict[str, Any], token_bytes: float, gib: float, tokens: int
) -> None:
    low, high = (
        plan(PlanRequest(model, "sglang", kv_memory=int((gib + d) * GIB), **fields)).allocation
        for d in (-0.005, 0.005)
    )
    assert low.extras["bytes_per_full_token"] == token_bytes
    assert low.capacity_tokens <= tokens <= high.capacity_tokens


def test_a_draft_layer_makes_a_compressed_token_dearer() -> None:
    request = PlanRequest(FLASH, "sglang", "0.5.15", num_tokens=135_168, speculative_tokens=5)
    allocation = plan(request).allocation
    assert allocation.extras["bytes_per_full_token"] == 9_259.90
    assert allocation.capacity_tokens == 135_168


def test_pools_of_compressed_attention_in_sglang() -> None:
    request = PlanRequest(PRO, "sglang", "0.5.15", num_tokens=9_217_792, window_ratio=0.15)
    cells = {pool.name: pool.cells for pool in plan(request).allocation.pools}
    assert cells["window"] == 1_382_656
    assert cells["1 of 4"] == cells["index"] == 2_304_448
    assert cells["1 of 128"] == 72_014


def test_compressed_attention_in_llama_cpp() -> None:
    """ggml-org/llama.cpp#27680: 64,000 cells, micro-batches of 4,096, bf16."""
    request = PlanRequest(FLASH, "llama.cpp", context=64_000, ubatch=4096, kv_format="bf16")
    pools = {pool.name: pool for pool in plan(request).allocation.pools}
    assert (pools["window"].cells, pools["window"].bytes / MIB) == (4352, 182.75)
    states = {name: round(pool.bytes / MIB, 2) for name, pool in pools.items() if " x " in name}
    assert states["compressor, 8 x 1024"] == 1.31
    assert states["compressor, 128 x 512"] == 10.00
    assert states["compressor, 8 x 256"] == 0.33


@pytest.mark.parametrize(("version", "mib"), [("2026-08", 36.0), ("2026-09", 12.0)])
def test_values_that_nothing_reads_beside_index_keys(version: str, mib: float) -> None:
    """ggml-org/llama.cpp#28296: K 12.00 MiB and V 24.00 MiB for 12 layers; #28330 dropped V."""
    request = PlanRequest(qwen_sparse_hybrid(), "llama.cpp", version, context=4096)
    index = next(p for p in plan(request).allocation.pools if p.name == "index")
    assert index.bytes / MIB == mib
