"""The doctor's instruments, each by itself."""

from __future__ import annotations

import numpy as np
import pytest

from kvern.check.compare import INFINITE, NO_DIFFERENCE, compare, divergence, tolerance_of
from kvern.check.contexts import Contexts
from kvern.check.dense import Replay, Swap, visible
from kvern.check.hypotheses import Other, Suspect, common_length, hypotheses
from kvern.check.lab import CheckOptions, Lab
from kvern.check.names import TITLES, Fault, Finding, causes, rank_of
from kvern.errors import UsageError
from kvern.kernels.protocol import AttendParams

PARAMS = AttendParams(scale=1.0)


def test_equal_rows_have_no_difference_unless_they_are_not_finite() -> None:
    row = np.array([1.0, 2.0, 3.0], np.float32)
    assert compare(row, row.copy()) == NO_DIFFERENCE
    spoilt = np.array([1.0, np.nan, 3.0], np.float32)
    endless = np.array([1.0, np.inf, 3.0], np.float32)
    for bad in (spoilt, endless):
        assert compare(bad, bad.copy()) == INFINITE
        assert compare(bad, row) == compare(row, bad) == INFINITE
    assert not INFINITE.is_within(1.0)


def test_a_difference_is_measured_by_the_range_of_the_uncached_row() -> None:
    difference = compare(np.array([0.0, 4.5], np.float32), np.array([0.0, 5.0], np.float32))
    assert difference.largest == 0.5
    assert difference.relative == 0.1
    assert 0 < difference.kl < 0.01


def test_divergence_is_that_of_the_distributions() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    logits = [np.log(x).astype(np.float32) + 3 for x in (p, q)]
    assert divergence(*logits) == pytest.approx(float(np.sum(p * np.log(p / q))), abs=1e-6)
    assert divergence(logits[0], logits[0]) == 0


@pytest.mark.parametrize(
    ("row_invariant", "dtypes", "tolerance"),
    [(True, {"bf16"}, 0.0), (False, {"fp32"}, 1e-4), (False, {"fp32", "bf16"}, 3e-3)],
)
def test_tolerances(row_invariant: bool, dtypes: set[str], tolerance: float) -> None:
    assert tolerance_of(row_invariant, dtypes) == tolerance


def test_contexts_are_equal_exactly_when_all_tokens_are() -> None:
    contexts = Contexts()
    first, second = contexts.path([5, 6, 7]), contexts.path([5, 6, 8, 7])
    assert first[:2].tolist() == second[:2].tolist()
    assert len({*first.tolist(), *second.tolist()}) == 5
    assert contexts.tokens(int(second[-1])) == [5, 6, 8, 7]
    assert contexts.extend(int(first[1]), [7]).tolist() == first[2:].tolist()


def test_masks_of_replays() -> None:
    tokens = tuple(range(5))
    causal = np.tril(np.ones((5, 5), bool))
    assert (visible(Replay(tokens), PARAMS) == causal).all()
    top_left = visible(Replay(tokens, mask_end=(0, 1, 0, 1, 2)), PARAMS)
    assert top_left.sum(axis=1).tolist() == [1, 2, 1, 2, 3]
    own_chunk = visible(Replay(tokens, mask_start=(0, 0, 2, 2, 2)), PARAMS)
    assert own_chunk.sum(axis=1).tolist() == [1, 2, 1, 2, 3]
    window = visible(Replay(tokens), AttendParams(scale=1.0, window=2, num_sink_tokens=1))
    assert window[4].tolist() == [True, False, False, True, True]


def test_the_dense_pass_is_the_engines_full_pass(engine) -> None:
    llm = engine(backend="reference", kv_format="fp32")
    lab = Lab(llm, CheckOptions())
    tokens = lab.tokens(50)
    lab.uncached.prepare(tokens)
    own = np.stack([lab.uncached.find(int(node)).logits for node in lab.contexts.path(tokens)])
    dense = lab.dense.logits(Replay(tokens), list(range(50)))
    assert np.abs(own - dense).max() < 1e-3


def test_a_swap_changes_rows_from_its_first_query_on(engine) -> None:
    lab = Lab(engine(backend="reference", kv_format="fp32"), CheckOptions())
    tokens, other = lab.tokens(20), lab.tokens(20, 1)
    plain = lab.dense.logits(Replay(tokens), list(range(20)))
    swap = Swap(first_query=12, start=4, stop=8, source=other, source_start=4)
    swapped = lab.dense.logits(Replay(tokens, swap=swap), list(range(20)))
    assert (plain[:12] == swapped[:12]).all()
    assert (plain[12:] != swapped[12:]).any(axis=1).all()
    same = Swap(first_query=12, start=4, stop=8, source=tokens, source_start=4)
    assert np.abs(lab.dense.logits(Replay(tokens, swap=same), [19]) - plain[19]).max() < 1e-4


def test_hypotheses_cover_every_fault_that_shows_in_logits_alone() -> None:
    suspect = Suspect(
        tokens=tuple(range(40)),
        num_prompt_tokens=30,
        chunks=((29, 1), (30, 1), (20, 12), (32, 1)),
        first_wrong=29,
        block_size=8,
        others=(
            Other("request b", (*range(20), *range(90, 110)), is_sibling=False),
            Other("sample 1", (*range(30), *range(60, 70)), is_sibling=True),
        ),
        was_resumed=False,
    )
    named = {hypothesis.fault for hypothesis in hypotheses(suspect)}
    assert named == {
        Fault.MASK,
        Fault.POSITIONS,
        Fault.LAST_TOKEN,
        Fault.TAIL_TOO_FAR,
        Fault.WRONG_PREFIX,
        Fault.FORK,
        Fault.UNWRITTEN,
    }


def test_common_length() -> None:
    assert common_length((1, 2, 3), (1, 2, 4, 5)) == 2
    assert common_length((1, 2), (1, 2, 4)) == 2
    assert common_length((9,), (1,)) == 0


def test_consequences_give_way_to_causes() -> None:
    findings = [
        Finding(fault, "", "comparison")
        for fault in (Fault.NOT_FINITE, Fault.INVARIANT, Fault.SALT)
    ]
    assert [finding.fault for finding in causes(findings)] == [Fault.SALT]
    assert [finding.fault for finding in causes(findings[:2])] == [Fault.INVARIANT]
    assert [finding.fault for finding in causes(findings[:1])] == [Fault.NOT_FINITE]
    assert causes([]) == ()


def test_every_fault_has_a_title_and_a_rank() -> None:
    assert set(TITLES) == set(Fault)
    assert {rank_of(fault) for fault in Fault} == {0, 1, 2, 3}


def test_a_context_too_short_for_the_cases_is_refused(engine) -> None:
    from kvern.check.doctor import check

    with pytest.raises(UsageError, match="sequences of up to 240 tokens in blocks of 64"):
        check(engine(block_size=64, max_model_len=200))
