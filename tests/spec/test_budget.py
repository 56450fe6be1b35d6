"""Worked examples of cache arithmetic, without tolerance."""

from __future__ import annotations

import pytest
from tests.spec import samples

from kvern.errors import UsageError
from kvern.spec import (
    All,
    KVCacheSpec,
    Latent,
    blocks_for,
    bytes_for_context,
    format_size,
    make_kv_plan,
    parse_size,
)  # fmt: skip
from kvern.spec.budget import kv_heads_per_rank, kv_matrix, sequences_that_fit

GIB = 2**30


def llama_8b(num_kv_heads: int = 8):
    return samples.model_of(*[samples.heads(num_kv_heads, 128)] * 32)


def test_32_layers_of_8_heads_at_8192_tokens_take_one_gib() -> None:
    assert bytes_for_context(llama_8b(), 8192) == GIB
    assert bytes_for_context(llama_8b(), 8192, batch_size=8) == 8 * GIB
    assert bytes_for_context(llama_8b(32), 8192) == 4 * GIB
    assert kv_matrix(llama_8b(), [4096, 8192], [1, 8]) == ((GIB // 2, 4 * GIB), (GIB, 8 * GIB))


def test_blocks_of_four_slots() -> None:
    blocks = [blocks_for(n, 4) for n in (5, 3, 8)]
    assert sum(blocks) == 5
    assert sum(blocks) * 4 == 20
    assert sum(blocks) * 4 - (5 + 3 + 8) == 4


def test_two_sequences_that_share_their_first_block() -> None:
    shared, own = 1, 2 * (blocks_for(8, 4) - 1)
    assert shared + own == 3
    assert (shared + own) * 4 == 12


def test_sequences_beside_the_weights() -> None:
    budget = 24 * GIB - 7_000_000_000 * 2 - 4 * GIB
    assert sequences_that_fit(llama_8b(), budget, 8192) == 6
    assert sequences_that_fit(llama_8b(), budget, 16384) == 3


def test_one_head_on_eight_ranks_is_copied_eight_times() -> None:
    assert 8 * kv_heads_per_rank(1, 8) == 8
    assert kv_heads_per_rank(8, 8) == 1
    assert kv_heads_per_rank(8, 2) == 4
    assert 16 * kv_heads_per_rank(8, 16) == 16
    with pytest.raises(UsageError, match="6 KV heads cannot be spread over 4 ranks"):
        kv_heads_per_rank(6, 4)


def test_bytes_per_token_of_known_geometries() -> None:
    assert samples.model_of(*[samples.heads(8, 128)] * 80).kv_bytes_per_token == 327_680
    assert samples.smollm2().kv_bytes_per_token == 23_040
    deepseek_v3 = samples.model_of(*[KVCacheSpec(Latent(512, 64), All())] * 61)
    assert deepseek_v3.kv_bytes_per_token == 70_272


def test_windows_and_states_stop_growing() -> None:
    assert bytes_for_context(samples.gemma3_27b(), 32_768) == 2.90625 * GIB
    qwen3_next = samples.qwen3_next()
    assert qwen3_next.kv_bytes_per_token == 24_576
    assert qwen3_next.kv_fixed_bytes == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert bytes_for_context(qwen3_next, 32_768) == 24_576 * 32_768 + qwen3_next.kv_fixed_bytes


def test_a_plan_holds_what_the_arithmetic_says() -> None:
    plan = make_kv_plan(llama_8b(), "bf16", 16, 6 * GIB)
    assert plan.pages_for(8192) * plan.page_bytes == GIB
    assert (plan.num_blocks - 1) // plan.pages_for(8192) == 5  # the null block takes one page


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512MiB", 2**29), ("2GiB", 2**31), ("1.5GB", 1_500_000_000), ("4096", 4096),
        ("1 KiB", 1024), ("0.1KiB", 102), ("1.25TiB", 5 * 2**38), ("7b", 7), (4096, 4096),
    ],
)  # fmt: skip
def test_sizes_are_parsed(text, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "12 parsecs", "-1GiB", "1,5GB", "0", "1e9", "0.1B", 0])
def test_wrong_sizes_are_refused(text) -> None:
    with pytest.raises(UsageError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"), (1023, "1,023 B"), (368_640, "360 KiB"), (2.90625 * GIB, "2.906 GiB"),
        (2**50, "1,024 TiB"), (1536, "1.5 KiB"),
    ],
)  # fmt: skip
def test_sizes_are_written(num_bytes, expected: str) -> None:
    assert format_size(num_bytes) == expected
