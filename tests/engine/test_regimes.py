"""A model with two position regimes (Phi-3's longrope): the engine across the border.

The reference for position p is a forward pass of exactly p + 1 tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.models.cases import CASES
from tests.models.harness import Saved, assert_agrees

from kvern import LLM, SamplingParams
from kvern.engine.runner import Observer
from kvern.errors import CapacityError

BORDER, CONTEXT = 64, 256
CASE = next(case for case in CASES if case.family == "phi3-longrope")


class LastRows(Observer):
    """Keeps the logits from which each token is chosen, per request."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, np.ndarray]] = {}

    def on_logits(self, seq: Any, position: int, row: np.ndarray) -> None:
        if position == seq.num_tokens - 1:
            self.rows.setdefault(seq.request.request_id, {})[position] = row.copy()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved.of(tmp_path_factory.mktemp("longrope"), CASE)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return np.random.default_rng(3).integers(0, CASE.fields["vocab_size"], 200).tolist()


@pytest.fixture(scope="module", params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        request.getfixturevalue("require_native")
    return str(request.param)


def engine(model: Saved, backend: str = "native", **options: Any) -> LLM:
    defaults = {"kv_format": "fp32", "kv_memory": "4MiB", "block_size": 4, "threads": 2}
    return LLM(model.folder, backend=backend, weights_format="fp32", **{**defaults, **options})


def answer(
    llm: LLM, prompts: list[list[int]], num_tokens: int = 40
) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Tokens and the logits they were chosen from, ``[num_tokens, vocab]``."""
    watch = llm.model.runner.observer = LastRows()
    outs = llm.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    llm.model.runner.observer = None
    llm.check_integrity().raise_if_broken()
    return [
        (out.token_ids, np.stack([row for _, row in sorted(watch.rows[out.request_id].items())]))
        for out in outs
    ]


def reference(model: Saved, ids: list[int], first: int) -> np.ndarray:
    """Logits after positions `first` and later, each by a forward pass that ends there."""
    return np.stack([model.logits(np.array(ids[: p + 1]))[-1] for p in range(first, len(ids))])


@pytest.mark.parametrize("length", [50, BORDER - 1, BORDER, BORDER + 1, 100])
def test_every_logit_is_that_of_a_pass_of_exactly_its_length(
    model: Saved, prompt: list[int], backend: str, length: int
) -> None:
    with engine(model, backend) as llm:
        assert llm.model.max_model_len == CONTEXT
        [(tokens, rows)] = answer(llm, [prompt[:length]], 20)
        assert_agrees(rows, reference(model, [*prompt[:length], *tokens[:-1]], length - 1))
        crosses = length <= BORDER < length + 19
        assert llm.stats().counters.regime_recomputed_tokens == (BORDER if crosses else 0)


def test_cached_equals_uncached_bit_for_bit(
    model: Saved, prompt: list[int], require_native: None
) -> None:
    prompts = [prompt[:n] for n in (5, 40, 60, 63, 64, 65, 100, 130)] + [prompt[50:90]]
    with engine(model, no_cache=True) as llm:
        expected = [answer(llm, [each])[0] for each in prompts]
        assert llm.stats().counters.regime_recomputed_tokens == 0
    for options in ({}, {"max_chunk_tokens": 1}, {"max_num_batched_tokens": 9}, {"threads": 1},
                    {"enable_prefix_caching": False}, {"block_size": 16},
                    {"kv_memory": 26 * 4 * 1024}):  # fmt: skip
        with engine(model, **options) as llm:
            for given in (answer(llm, prompts), answer(llm, prompts)):  # together; warm
                for (tokens, rows), (want_tokens, want_rows) in zip(given, expected, strict=True):
                    assert tokens == want_tokens
                    assert np.array_equal(rows.view(np.uint32), want_rows.view(np.uint32))
            counters = llm.stats().counters
            assert counters.regime_recomputed_tokens > 0
            assert bool(counters.preemptions) == ("kv_memory" in options)


def test_samples_and_beams_cross_the_border(
    model: Saved, prompt: list[int], require_native: None
) -> None:
    found = []
    for options in ({}, {"no_cache": True}):
        with engine(model, **options) as llm:
            kinds = (
                SamplingParams(max_tokens=30, n=3, temperature=1.0, seed=1),
                SamplingParams(max_tokens=30, beam_width=3),
            )
            outs = llm.generate([prompt[:50]] * 2, kinds)
            found.append([[choice.token_ids for choice in out.choices] for out in outs])
    assert found[0] == found[1]


@pytest.mark.parametrize("length", [40, BORDER, BORDER + 1, 90, CONTEXT])
def test_scores_are_those_of_passes_of_their_length(
    model: Saved, prompt: list[int], backend: str, length: int
) -> None:
    ids = (prompt * 2)[:length]
    with engine(model, backend, max_num_batched_tokens=50) as llm:
        (scores,) = llm.score([ids])
        (again,) = llm.score([ids])
    places = sorted({*range(0, length - 1, 25), *range(58, min(70, length - 1)), length - 2})
    rows = np.stack([model.logits(np.array(ids[: p + 1]))[-1] for p in places]).astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    logprobs = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    theirs = logprobs[np.arange(len(places)), np.array(ids)[np.array(places) + 1]]
    np.testing.assert_allclose(scores[places], theirs, atol=5e-3)
    np.testing.assert_array_equal(scores, again)
    assert np.isfinite(scores).all()


def test_the_context_is_that_of_the_long_regime(model: Saved, prompt: list[int]) -> None:
    with engine(model, "reference") as llm:
        with pytest.raises(CapacityError, match="256"):
            llm.generate([(prompt * 2)[:CONTEXT]])
        (out,) = llm.generate([(prompt * 2)[: CONTEXT - 2]])
        assert len(out.token_ids) == 2
