"""``weights_format`` through the engine: whatever a product rounds, the cache changes no bit of an answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.engine.test_regimes import answer
from tests.models.cases import CASES
from tests.models.harness import Saved

from kvern import LLM
from kvern.check.lab import CheckOptions, Lab
from kvern.engine.settings import WEIGHTS_AS

FAMILIES = ("qwen3", "qwen3-moe")  # dense products, and products of experts' groups


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    case = next(case for case in CASES if case.family == request.param)
    return Saved.of(tmp_path_factory.mktemp(request.param), case)


def engine(model: Saved, weights_format: str, **options: object) -> LLM:
    given: dict[str, Any] = {
        "kv_format": "fp32",
        "kv_memory": "4MiB",
        "block_size": 4,
        "threads": 2,
    }
    given |= options
    return LLM(model.folder, weights_format=weights_format, **given)


def some_prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    shared = rng.integers(0, 50, 23).tolist()
    return [[*shared[:n], *rng.integers(0, 50, 6).tolist()] for n in (0, 7, 16, 23)]


@pytest.mark.parametrize("weights_format", sorted(WEIGHTS_AS))
def test_cached_equals_uncached_bit_for_bit(
    model: Saved, weights_format: str, require_native: None
) -> None:
    prompts = some_prompts()
    with engine(model, weights_format, no_cache=True) as llm:
        assert llm.model.weights.weights_format == weights_format
        expected = [answer(llm, [each], 12)[0] for each in prompts]
    for options in ({}, {"max_chunk_tokens": 1}, {"max_num_batched_tokens": 9}, {"threads": 1}):
        with engine(model, weights_format, **options) as llm:
            for given in (answer(llm, prompts, 12), answer(llm, prompts, 12)):  # together; warm
                for (tokens, rows), (want_tokens, want_rows) in zip(given, expected, strict=True):
                    assert tokens == want_tokens
                    assert np.array_equal(rows.view(np.uint32), want_rows.view(np.uint32))


def test_bf16_rounds_and_no_more_than_that(model: Saved, require_native: None) -> None:
    prompts = some_prompts()
    first = {}
    for weights_format in ("fp32", "bf16"):
        with engine(model, weights_format) as llm:
            first[weights_format] = np.stack([rows[0] for _, rows in answer(llm, prompts, 1)])
            assert llm.model.backend.numerics_tag(weights_format).endswith(f"/{weights_format}")
    exact, rounded = first["fp32"], first["bf16"]
    assert not np.array_equal(exact, rounded)
    rms = np.sqrt(np.mean((rounded - exact) ** 2)) / exact.std()
    assert 1e-5 < rms < 0.03  # 2^-9 per factor, over some layers


def test_the_check_knows_which_weights_round(model: Saved, require_native: None) -> None:
    for weights_format, backend, rounds in (
        ("bf16", "native", True),
        ("fp32", "native", False),
        ("auto", "native", False),  # of a file that stores no quantised weights
        ("bf16", "reference", False),
    ):
        with engine(model, weights_format, backend=backend) as llm:
            assert Lab(llm, CheckOptions()).has_quantised_products is rounds, (
                weights_format,
                backend,
            )
