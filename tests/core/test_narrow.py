"""Narrow groups: seats, chunks that end where open blocks allow it, hits of whole blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.simulation import Simulation, full, kv_plan, window

from kvern.core.config import SchedulerConfig
from kvern.core.plan import CopyOpen
from kvern.core.rules import cut_at_blocks, make_rules
from kvern.core.scheduler import Scheduler
from kvern.errors import UsageError

INT8 = {"kv_format": "int8"}


@given(
    sizes=st.lists(st.sampled_from([1, 4, 6, 8, 16]), min_size=1, max_size=3),
    start=st.integers(0, 60),
    missing=st.integers(1, 80),
    data=st.data(),
)
def test_a_chunk_never_needs_two_open_blocks(sizes, start, missing, data) -> None:
    rules = make_rules(kv_plan([full(size, **INT8) for size in sizes], 10))
    length = data.draw(st.integers(1, missing))
    cut = cut_at_blocks(rules, start, length, missing)
    assert 1 <= cut <= length
    end = start + cut
    for size in sizes:
        assert start % size == 0 or start // size == end // size or end % size == 0
    if length == missing and all(start % size == 0 for size in sizes):
        assert cut == length
    if length < missing and len(set(sizes)) == 1 and length >= 2 * sizes[0]:
        assert end % sizes[0] == 0


def test_wide_groups_cut_nothing() -> None:
    rules = make_rules(kv_plan([full(4), window(6)], 10))
    assert cut_at_blocks(rules, 3, 9, 20) == 9


def test_hits_end_at_block_borders_and_say_why() -> None:
    sim = Simulation([full(4, **INT8)], 40)
    sim.ask("a", [1, 2, 3, 4, 0, 1, 2, 3, 4, 0])
    done = sim.ask("b", [1, 2, 3, 4, 0, 1, 2, 2])
    assert done.num_cached_tokens == 4
    assert [reason.kind for reason in done.miss.reasons][:1] == ["tail_not_copyable"]
    again = sim.ask("c", [1, 2, 3, 4, 0, 1, 2, 3])  # two whole blocks, and the last token is needed
    assert again.num_cached_tokens == 4


def test_a_fork_copies_the_open_block_of_its_parents_seat() -> None:
    sim = Simulation([full(4, **INT8)], 40)
    sim.add("a", [1, 2, 3, 4, 0, 1], 4, n=3)
    sim.step()
    plan = sim.scheduler.plan()
    copies = [op for op in plan.ops if isinstance(op, CopyOpen)]
    assert [(op.num_tokens, op.group) for op in copies] == [(2, 0), (2, 0)]
    seats = {piece.seq.seat for piece in plan.chunks}
    assert len(seats) == 3
    assert {op.dst_seat for op in copies} | {copies[0].src_seat} == seats
    sim.note(sim.scheduler.commit(plan, sim.executor.execute(plan)))
    sim.run()


def test_a_fork_at_a_block_border_has_nothing_to_copy() -> None:
    sim = Simulation([full(4, **INT8)], 40)
    sim.add("a", [1, 2, 3, 4, 0, 1, 2, 3], 4, n=3)
    sim.step()
    assert not any(isinstance(op, CopyOpen) for op in sim.step().ops)
    sim.run()


def test_seats_are_given_back_and_lost_ones_are_found() -> None:
    sim = Simulation([full(4, **INT8)], 40, max_num_seqs=3)
    for name in "abcd":
        sim.add(name, [1, 2, 3], 6)
    sim.step()
    state = sim.scheduler.state
    assert sorted(seq.seat for seq in state.running) == [0, 1, 2]
    assert [seq.seat for seq in state.waiting] == [-1]
    sim.run()
    assert sorted(state.seats) == [0, 1, 2]
    state.seats.pop()
    (problem,) = sim.scheduler.check_integrity().problems
    assert "together they are not 3 seats" in problem


def test_a_pool_with_too_few_open_blocks_is_refused() -> None:
    plan = replace(kv_plan([full(4, **INT8)], 40), num_open_blocks=2)
    with pytest.raises(
        UsageError, match="planned for 2 open blocks per group and max_num_seqs is 3"
    ):
        Scheduler(plan, SchedulerConfig(max_num_seqs=3))
