"""`live` and `max_visible` against brute force over `sees`, the only definition of a reach."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern.spec.reach import All, Chunk, Last, Reach, Window, num_positions

reaches = st.one_of(
    st.just(All()),
    st.just(Last()),
    st.builds(Window, st.integers(1, 20), st.integers(0, 6)),
    st.builds(Chunk, st.integers(1, 20)),
)


def positions(spans):
    return [position for start, stop in spans for position in range(start, stop)]


@given(reaches, st.integers(0, 60))
def test_live_is_what_any_later_query_sees(reach: Reach, n: int) -> None:
    horizon = n + 60
    needed = {p for q in range(n, horizon) for p in positions(reach.sees(q)) if p < n}
    assert positions(reach.live(n)) == sorted(needed)


@given(reaches, st.integers(1, 60))
def test_max_visible_is_the_largest_view_of_any_query_so_far(reach: Reach, n: int) -> None:
    views = [num_positions(reach.sees(q)) for q in range(n)]
    if isinstance(reach, Last):
        assert reach.max_visible(n) == 1  # one state stands for all it has seen
    else:
        assert reach.max_visible(n) == max(views)


@given(reaches, st.integers(0, 60))
def test_a_query_sees_itself_and_nothing_later(reach: Reach, q: int) -> None:
    seen = positions(reach.sees(q))
    assert q in seen
    assert max(seen) == q
    assert len(seen) == len(set(seen))


@given(reaches, st.integers(0, 60))
def test_spans_are_ascending_apart_and_not_empty(reach: Reach, n: int) -> None:
    for spans in (reach.live(n), reach.sees(n)):
        assert all(start < stop for start, stop in spans)
        assert all(a[1] < b[0] for a, b in pairwise(spans))


def test_window_counts_the_query_itself() -> None:
    assert Window(4).sees(10) == ((7, 11),)
    assert Window(4).live(10) == ((7, 10),)
    assert Window(4, sinks=2).sees(10) == ((0, 2), (7, 11))
    assert Window(1).live(10) == ()


def test_chunk_starts_anew_at_its_border() -> None:
    assert Chunk(8).live(16) == ()
    assert Chunk(8).sees(16) == ((16, 17),)
    assert Chunk(8).live(15) == ((8, 15),)


@pytest.mark.parametrize("build", [lambda: Window(0), lambda: Window(4, -1), lambda: Chunk(0)])
def test_impossible_reaches_are_refused(build) -> None:
    with pytest.raises(ValueError, match="positive"):
        build()
