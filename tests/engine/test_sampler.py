"""Token choice: what each parameter keeps, ties, seeds, penalties, log-probabilities."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern.engine.params import SamplingParams
from kvern.engine.sampler import Sampling, choose, likeliest, log_softmax, top_tokens, uniform
from kvern.errors import InputError, IntegrityError

NO_TOKENS = np.empty(0, np.int32)


def draw(logits: list[float] | np.ndarray, count: int = 4000, **params: object) -> Counter[int]:
    """How often each token is chosen over many positions with one seed."""
    row = np.array(logits, np.float32)
    sampling = Sampling(SamplingParams(**params), 11)  # type: ignore[arg-type]
    return Counter(
        choose(row, sampling, range(1), position, NO_TOKENS, 0)[0].token_id
        for position in range(count)
    )


def test_greedy_takes_the_highest_and_the_lower_id_of_a_tie() -> None:
    assert draw([0, 3, 1, 3], 5) == {1: 5}


def test_temperature_follows_the_distribution() -> None:
    got = draw(np.log([0.1, 0.2, 0.7]), 8000, temperature=1.0)
    for token, share in enumerate([0.1, 0.2, 0.7]):
        assert abs(got[token] / 8000 - share) < 0.02
    sharp = draw(np.log([0.1, 0.2, 0.7]), 8000, temperature=0.5)
    assert abs(sharp[2] / 8000 - 0.49 / 0.54) < 0.02


def test_top_k_top_p_and_min_p_keep_exactly_what_they_say() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.05, 0.05])
    assert set(draw(logits, temperature=1.0, top_k=2)) == {0, 1}
    assert set(draw(logits, temperature=1.0, top_p=0.7)) == {0, 1}
    assert set(draw(logits, temperature=1.0, top_p=0.71)) == {0, 1, 2}
    assert set(draw(logits, temperature=1.0, min_p=0.45)) == {0, 1, 2}
    assert set(draw(logits, temperature=1.0, top_k=3, top_p=0.5)) == {0, 1}
    assert set(draw(logits, temperature=1.0, top_p=1e-9)) == {0}


@given(st.integers(0, 2**32), st.floats(0.01, 0.999), st.integers(2, 400))
def test_top_p_set_equals_a_full_sort(seed: int, top_p: float, vocab: int) -> None:
    row = np.random.default_rng(seed).normal(size=vocab).astype(np.float32) * 3
    from kvern.engine.sampler import _distribution

    ids, _ = _distribution(row, SamplingParams(temperature=1.0, top_p=top_p))
    weights = np.exp(row.astype(np.float64) - float(row.max()))
    order = np.argsort(-row, kind="stable")
    needed = int(np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum())) + 1
    assert ids.tolist() == order[:needed].tolist()


def test_a_draw_depends_on_seed_sample_and_position_alone() -> None:
    row = np.random.default_rng(0).normal(size=500).astype(np.float32)
    sampling = Sampling(SamplingParams(temperature=1.0), 7)
    together = [c.token_id for c in choose(row, sampling, range(4), 9, NO_TOKENS, 0)]
    alone = [choose(row, sampling, range(i, i + 1), 9, NO_TOKENS, 0)[0].token_id for i in range(4)]
    assert together == alone and len(set(together)) > 1
    values = [uniform(3, 0, p) for p in range(2000)]
    assert min(values) >= 0 and max(values) < 1 and abs(sum(values) / 2000 - 0.5) < 0.02
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_penalties_follow_their_definitions() -> None:
    seen = np.array([1, 2, 2, 3, 3, 3], np.int32)
    row = np.array([5.0, 6.0, -1.0, 6.5], np.float32)

    def greedy(**params: float) -> int:
        return choose(row, Sampling(SamplingParams(**params), 0), range(1), 6, seen, 3)[0].token_id  # type: ignore[arg-type]

    assert greedy() == 3
    assert greedy(repetition_penalty=1.2) == 3  # 6.5 / 1.2 beats 6 / 1.2 and 5
    assert greedy(repetition_penalty=1.4) == 0
    assert greedy(presence_penalty=1.0) == 1  # token 3 is in the answer, token 1 only in the prompt
    assert greedy(frequency_penalty=0.3) == 1  # 6.5 - 3 * 0.3 < 6
    assert greedy(frequency_penalty=0.1) == 3


def test_logprobs_are_those_of_the_untouched_distribution() -> None:
    row = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    sampling = Sampling(SamplingParams(temperature=3.0, top_k=1, logprobs=3), 0)
    (choice,) = choose(row, sampling, range(1), 0, NO_TOKENS, 0)
    assert choice.token_id == 0 and math.isclose(choice.logprob, math.log(0.5), rel_tol=1e-6)
    assert choice.top is not None and [t for t, _ in choice.top] == [0, 1, 2]
    np.testing.assert_allclose([p for _, p in choice.top], np.log([0.5, 0.25, 0.125]), rtol=1e-6)
    assert [c.token_id for c in likeliest(row, 3, 0)] == [0, 1, 2]
    np.testing.assert_allclose(np.exp(log_softmax(row)).sum(), 1.0)


def test_top_tokens_breaks_ties_by_lower_id_also_at_the_border() -> None:
    scores = np.array([1, 5, 5, 5, 0], np.float32)
    assert top_tokens(scores, 2).tolist() == [1, 2]
    assert top_tokens(scores, 9).tolist() == [1, 2, 3, 0, 4]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    row = np.array([0.0, bad, 1.0], np.float32)
    with pytest.raises(IntegrityError, match="position 4"):
        choose(row, Sampling(SamplingParams(), 0), range(1), 4, NO_TOKENS, 0)


def test_values_are_normalised() -> None:
    params = SamplingParams(
        stop=None, stop_token_ids=5, max_tokens=np.int64(7), temperature=np.float32(0.5), seed=-1
    )
    assert params.stop == () and params.stop_token_ids == {5}
    assert type(params.max_tokens) is int and type(params.temperature) is float
    assert SamplingParams(stop="ab").stop == ("ab",)


def test_a_tiny_temperature_is_greedy_without_a_warning() -> None:
    with np.errstate(all="raise", under="ignore"):
        assert draw([0, 3, 1, 2], 5, temperature=5e-324) == {1: 5}


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens is 0: it must be at least 1"),
        ({"temperature": math.nan}, "temperature is nan: it must be a finite number, at least 0"),
        ({"temperature": -1}, "temperature is -1: it must be a finite number, at least 0"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": 0}, "top_p is 0: it must be above 0"),
        ({"top_p": 1.5}, "top_p is 1.5: it must be from 0 to 1"),
        ({"top_k": -1}, "top_k is -1: it must be at least 0"),
        ({"n": 0}, "n is 0: it must be from 1 to 1024"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5: it must be a whole number"),
        ({"logprobs": 101}, "logprobs is 101: it must be from 0 to 100"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"stop": ["x", ""]}, "remove the empty one"),
        ({"beam_width": 2, "temperature": 0.5}, "beam search is deterministic"),
        ({"cache_salt": 5}, "cache_salt is 5"),
        ({"cache_salt": "\ud800"}, "lone surrogate"),
        ({"stop": 5}, "stop holds 5: it takes strings"),
        ({"stop": ["a", 5]}, "stop holds 5"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids holds 'a': it takes token ids"),
        ({"stop_token_ids": [-1]}, "negative token id"),
        ({"ignore_eos": "x"}, "ignore_eos is 'x'"),
        ({"presence_penalty": -1e300}, "it must be from -100 to 100"),
        ({"repetition_penalty": 1e-300}, "it must be from 0.01 to 100"),
        ({"beam_width": 2, "stop": "x"}, "beam search does not take stop strings"),
        ({"beam_width": 2, "logprobs": 1}, "beam search does not take logprobs"),
        ({"beam_width": 2, "presence_penalty": 1.0}, "beam search does not take penalties"),
    ],
)
def test_bad_parameters_are_refused_with_the_value(
    params: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        SamplingParams(**params)  # type: ignore[arg-type]
