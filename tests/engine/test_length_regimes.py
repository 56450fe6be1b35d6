"""Models whose frequencies change with each length (dynamic NTK): the engine past their original context.

The reference for position p is one forward pass by transformers of exactly p + 1 tokens. transformers
itself mixes regimes in three ways, so its reference is taken from passes that each follow one of a
single token, which puts its frequencies back:

- with its own cache, keys of earlier lengths stay as they were when a longer length turns the query;
- after a longer pass, a shorter one beyond the border keeps the longer one's frequencies;
- so does one that ends exactly at the border: only shorter ones put the frequencies back.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from tests.engine.test_regimes import answer, engine
from tests.models.case_fields import DELTA, FULL, LATENT, SLIDING, SMALL, small
from tests.models.cases import CASES
from tests.models.harness import Case, Saved, assert_agrees

from kvern import SamplingParams
from kvern.errors import CapacityError

BORDER, FACTOR = 32, 4.0
CONTEXT = int(BORDER * FACTOR)


def scaled(cut: float = 1.0, **fields: Any) -> dict[str, Any]:
    """Fields with dynamic scaling; a dict of its own, because transformers writes into it."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": FACTOR}
    rope |= {} if cut == 1.0 else {"partial_rotary_factor": cut}
    return {**small(max_position_embeddings=BORDER, rope_parameters=rope), **fields}


EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
MODELS = [
    Case("llama", "LlamaForCausalLM", scaled()),
    Case("mistral", "MistralForCausalLM", scaled(sliding_window=7)),
    Case("neox", "GPTNeoXForCausalLM", scaled(0.5, num_key_value_heads=4)),
    Case(
        "ministral",
        "MinistralForCausalLM",
        scaled(sliding_window=7, layer_types=[FULL, SLIDING], head_dim=16),
    ),
    Case(
        "latent",
        "DeepseekV3ForCausalLM",
        scaled(
            **{**LATENT, **EXPERTS, "max_position_embeddings": BORDER},
            moe_intermediate_size=40,
            first_k_dense_replace=1,
        ),
    ),
    Case("states", "Qwen3_5ForCausalLM", scaled(0.5, head_dim=16, num_hidden_layers=4, **DELTA)),
]
"""All keys at once, windows, half-turned heads, both, a latent, states."""

IDS = [case.family for case in MODELS]
OTHER = next(case for case in CASES if case.family == "llama-dynamic")


@pytest.fixture(scope="module", params=MODELS, ids=IDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved.of(tmp_path_factory.mktemp(request.param.family), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved.of(tmp_path_factory.mktemp("llama"), MODELS[0])


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def random_prompt(length: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(3, SMALL["vocab_size"], length).tolist()


def logits(model: Saved, ids: list[int]) -> np.ndarray:
    """Of the last position, by one pass of exactly these tokens, whatever came before it."""
    model.logits(np.array(ids[:1]))
    return model.logits(np.array(ids))[-1]


def reference(model: Saved, ids: list[int], first: int) -> np.ndarray:
    return np.stack([logits(model, ids[: p + 1]) for p in range(first, len(ids))])


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("length", [20, BORDER - 1, BORDER, BORDER + 1, 60])
def test_every_logit_is_that_of_a_pass_of_exactly_its_length(
    model: Saved, backend: str, length: int, request: pytest.FixtureRequest
) -> None:
    if backend == "native":
        request.getfixturevalue("require_native")
    prompt, count = random_prompt(length), 18
    with engine(model, backend) as llm:
        assert llm.model.max_model_len == CONTEXT
        [(tokens, rows)] = answer(llm, [prompt], count)
        counters = llm.stats().counters
    assert_agrees(rows, reference(model, [*prompt, *tokens[:-1]], length - 1))
    first = max(length, BORDER)  # passes of first + 1, first + 2, ... tokens, one of them new
    assert counters.regime_recomputed_tokens == sum(range(first, length + count - 1))


def bits_are_those_without_a_cache(model: Saved, variants: list[dict[str, Any]]) -> None:
    prompts = [random_prompt(40)[:n] for n in (5, 24, 31, 32, 33, 40)] + [random_prompt(40)[9:30]]
    with engine(model, no_cache=True) as llm:
        expected = [answer(llm, [each], 12)[0] for each in prompts]
    for options in variants:
        with engine(model, **options) as llm:
            for given in (answer(llm, prompts, 12), answer(llm, prompts, 12)):  # together; warm
                for (tokens, rows), (want_tokens, want_rows) in zip(given, expected, strict=True):
                    assert tokens == want_tokens
                    assert np.array_equal(rows.view(np.uint32), want_rows.view(np.uint32))


def test_cached_equals_uncached_bit_for_bit(model: Saved, require_native: None) -> None:
    """Together and warm; in chunks, in a step of few tokens."""
    bits_are_those_without_a_cache(model, [{"max_chunk_tokens": 3, "max_num_batched_tokens": 9}])


def test_cached_equals_uncached_with_every_setting(llama: Saved, require_native: None) -> None:
    options: list[dict[str, Any]] = [{}, {"max_chunk_tokens": 1}, {"threads": 1}]
    options += [{"enable_prefix_caching": False}, {"block_size": 16}]
    options += [{"kv_memory": 34 * 2048, "max_num_seqs": 8}]
    bits_are_those_without_a_cache(llama, options)


def test_a_tight_pool_preempts_past_the_border(llama: Saved, require_native: None) -> None:
    prompts = [random_prompt(8, seed) for seed in range(5)]
    with engine(llama) as llm:
        expected = [answer(llm, [each], 34)[0] for each in prompts]
    with engine(llama, kv_memory=26 * 2048, max_num_batched_tokens=16) as llm:
        given = answer(llm, prompts, 34)
        assert llm.stats().counters.preemptions > 0
    for (tokens, rows), (want_tokens, want_rows) in zip(given, expected, strict=True):
        assert tokens == want_tokens
        assert np.array_equal(rows.view(np.uint32), want_rows.view(np.uint32))


def test_hits_are_those_of_the_same_length(llama: Saved, require_native: None) -> None:
    ids = random_prompt(60)
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    with engine(llama) as llm:
        for length, found in ((60, 0), (60, 59), (59, 0), (24, 0), (24, 23), (30, 24)):
            (out,) = llm.generate([ids[:length]], one)
            assert out.cached_tokens == found
        (fresh,) = llm.generate([ids[:59]], one)
        assert fresh.cached_tokens == 58


def test_samples_and_beams_go_on_past_the_border(llama: Saved, require_native: None) -> None:
    found = []
    for options in ({}, {"no_cache": True}):
        with engine(llama, **options) as llm:
            kinds = (
                SamplingParams(max_tokens=20, n=3, temperature=1.0, seed=1),
                SamplingParams(max_tokens=20, beam_width=3),
            )
            outs = llm.generate([random_prompt(25)] * 2, kinds)
            found.append([[choice.token_ids for choice in out.choices] for out in outs])
    assert found[0] == found[1]


@pytest.mark.parametrize("length", [20, BORDER, BORDER + 1, 60])
def test_scores_are_those_of_passes_of_their_length(
    model: Saved, length: int, require_native: None
) -> None:
    ids, seen = random_prompt(length), []
    with engine(model, max_num_batched_tokens=25) as llm:
        (scores,) = llm.score([ids], on_progress=lambda *done: seen.append(done))
        (again,) = llm.score([ids])
    rows = reference(model, ids[:-1], 0).astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    logprobs = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(scores, logprobs[np.arange(length - 1), ids[1:]], atol=5e-3)
    np.testing.assert_array_equal(scores, again)
    assert seen == sorted(seen)
    assert seen[-1] == (length - 1, length - 1)


def test_one_warning_says_what_it_costs(llama: Saved) -> None:
    with engine(llama, "reference") as llm, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        llm.generate([random_prompt(20)], SamplingParams(max_tokens=4))
        assert not told
        llm.generate([random_prompt(40)] * 2, SamplingParams(max_tokens=4))
    (warning,) = told
    assert "longer than 32 tokens" in str(warning.message)
    assert "max_model_len=32" in str(warning.message)


def test_the_context_is_the_stretched_one(llama: Saved) -> None:
    with engine(llama, "reference") as llm, pytest.raises(CapacityError, match="128"):
        llm.generate([random_prompt(CONTEXT)])
    with engine(llama, "reference", max_model_len=BORDER) as llm:
        (out,) = llm.generate([random_prompt(20)])
        assert len(out.token_ids) <= BORDER - 20
        assert llm.stats().counters.regime_recomputed_tokens == 0


def test_where_transformers_mixes_regimes(llama: Saved) -> None:
    """What the head of this file says of it, so that a change there is noticed."""
    torch = pytest.importorskip("torch")
    ids = random_prompt(50)
    right = {n: logits(llama, ids[:n]) for n in (BORDER, 40, 50)}
    for length in (BORDER, 40):
        llama.logits(np.array(ids))
        after_longer = llama.logits(np.array(ids[:length]))[-1]
        assert np.abs(after_longer - right[length]).max() > 1e-3
    llama.logits(np.array(ids[:1]))
    with torch.no_grad():
        past = llama.model(torch.tensor([ids[:40]]), use_cache=True).past_key_values
        for token in ids[40:]:
            out = llama.model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
    assert np.abs(out.logits[0, -1].numpy() - right[50]).max() > 1e-3
