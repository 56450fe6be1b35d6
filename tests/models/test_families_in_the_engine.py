"""Every family through the whole engine: answers after a prefix hit have the bits of answers without.

Small folders, native backend: what is compared are the tokens and every reported
log-probability, with ``==``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models.cases import CASES, IDS
from tests.models.harness import Case, SavedModels, save_model

from kvern import LLM, SamplingParams
from kvern.engine.outputs import RequestOutput

OPTIONS: dict[str, Any] = {
    "backend": "native",
    "kv_format": "fp32",
    "weights_format": "fp32",
    "kv_memory": "4MiB",
    "block_size": 4,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
}
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, logprobs=3)


def bits(outputs: list[RequestOutput]) -> list[tuple[object, ...]]:
    return [(out.token_ids, out.logprobs) for out in outputs]


def prompts() -> list[list[int]]:
    """Three of unequal length that share their first 21 tokens."""
    rng = np.random.default_rng(1)
    shared = rng.integers(3, 140, 21).tolist()
    return [shared + rng.integers(3, 140, count).tolist() for count in (1, 5, 9)]


STORED = ("gemma3", "gpt-oss", "llama4", "deepseek-v2", "qwen3-next", "granite-4-h", "gpt2")
"""Families that are also tried with bfloat16 weights as stored and the default KV format."""


def check_hits(folder: Path, options: dict[str, Any]) -> None:
    """Answers of a cold cache, of a warm one, one by one, and without a cache are the same."""
    with LLM(folder, **options) as llm:
        first = llm.generate(prompts(), GREEDY)
        again = llm.generate(prompts(), GREEDY)
        alone = [llm.generate([prompt], GREEDY)[0] for prompt in prompts()]
    assert min(out.cached_tokens for out in again) >= 20
    with LLM(folder, no_cache=True, **options) as llm:
        plain = llm.generate(prompts(), GREEDY)
    assert max(out.cached_tokens for out in plain) == 0
    assert bits(first) == bits(again) == bits(alone) == bits(plain)


@pytest.mark.usefixtures("require_native")
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_prefix_hit_changes_no_bit(saved: SavedModels, case: Case) -> None:
    check_hits(saved(case).folder, OPTIONS)


@pytest.mark.usefixtures("require_native")
@pytest.mark.parametrize("family", STORED)
def test_stored_weights_and_16_bit_keys_change_no_bit_either(tmp_path: Path, family: str) -> None:
    save_model(tmp_path, next(c for c in CASES if c.family == family), dtype="bfloat16")
    check_hits(tmp_path, {**OPTIONS, "weights_format": "auto", "kv_format": "bf16"})
