from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern.bench.stats import mean, paired_ratios, spread_of

positive = st.floats(1e-3, 1e6)


def test_median_and_ends() -> None:
    spread = spread_of([3.0, 1.0, 2.0])
    assert (spread.median, spread.low, spread.high) == (2.0, 1.0, 3.0)
    assert spread.values == (3.0, 1.0, 2.0)
    assert spread.relative == 1.0
    assert spread_of([1.0, 2.0]).median == 1.5


def test_no_values_have_no_spread() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        spread_of([])
    assert mean([]) == 0.0


@given(st.lists(positive, min_size=1, max_size=9))
def test_the_median_lies_between_the_ends(values: list[float]) -> None:
    spread = spread_of(values)
    assert spread.low <= spread.median <= spread.high


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=9), st.floats(0.1, 10))
def test_what_slows_the_whole_machine_cancels(
    pairs: list[tuple[float, float]], slower: float
) -> None:
    ours, theirs = zip(*pairs, strict=True)
    quiet = paired_ratios(ours, theirs)
    busy = paired_ratios([slower * a for a in ours], [slower * b for b in theirs])
    assert quiet is not None and busy is not None
    assert busy.median == pytest.approx(quiet.median)


def test_ratios_are_of_the_same_run() -> None:
    ratio = paired_ratios([10.0, 30.0, 20.0], [5.0, 10.0, 20.0])
    assert ratio is not None
    assert ratio.values == (2.0, 3.0, 1.0)
    assert paired_ratios([1.0], [0.0]) is None
    assert paired_ratios([], [1.0]) is None
