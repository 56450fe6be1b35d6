"""What each policy keeps, seen through hits."""

import numpy as np
import pytest
from tests.core.simulation import Simulation, full

from kvern.core.replacement import POLICIES, make_queue
from kvern.errors import UsageError


def prompt(number, length=17):
    return [100 + number] * 4 + list(range(length - 4))


def cached(sim, name, number):
    return sim.ask(name, prompt(number), 1).num_cached_tokens


def fill(sim, numbers):
    for number in numbers:
        sim.ask(f"fill{number}/{sim.num_steps}", prompt(number), 1)


def test_unknown_policy_is_refused():
    with pytest.raises(UsageError, match="choose one of lru, lfu"):
        make_queue("magic", 10, lambda blocks: (blocks, blocks))


def test_lru_keeps_what_was_used_last():
    sim = Simulation([full()], 16)
    fill(sim, [1, 2, 3])
    fill(sim, [1])
    fill(sim, [4])
    assert cached(sim, "x", 1) == 16
    assert cached(sim, "y", 2) == 0


def test_fifo_gives_up_what_was_stored_first():
    sim = Simulation([full()], 14, replacement="fifo")
    for name, number in ("a1", 1), ("b2", 2), ("c3", 3), ("d1", 1), ("e4", 4):
        sim.ask(name, prompt(number, 16), 1)
    assert sim.ask("y", prompt(2, 16), 1).num_cached_tokens == 15
    assert sim.ask("x", prompt(1, 16), 1).num_cached_tokens < 8


def test_lfu_keeps_what_was_used_often():
    sim = Simulation([full()], 16, replacement="lfu")
    fill(sim, [1, 1, 1, 1, 2, 3, 4, 5, 6])
    assert cached(sim, "x", 1) == 16


def test_slru_keeps_what_was_used_twice_from_a_scan():
    sim = Simulation([full()], 22, replacement="slru")
    fill(sim, [1, 1, 2, 3, 4, 5])
    assert cached(sim, "x", 1) == 16
    sim = Simulation([full()], 22, replacement="lru")
    fill(sim, [1, 1, 2, 3, 4, 5, 6])
    assert cached(sim, "x", 1) == 0


def test_gdsf_weighs_uses_and_depth():
    sim = Simulation([full()], 22, replacement="gdsf")
    fill(sim, [1, 1, 1, 2, 3, 4])
    assert cached(sim, "x", 1) == 16


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_child_never_outlives_its_parent(policy):
    """Branching prompts under pressure; the integrity check in every step looks at parents."""
    rng = np.random.default_rng(0)
    sim = Simulation([full(2)], 40, replacement=policy)
    stems = [list(rng.integers(0, 3, 20)) for _ in range(4)]
    for number in range(120):
        stem = stems[rng.integers(4)][: rng.integers(1, 20)]
        sim.ask(f"r{number}", [int(t) for t in stem] + [7, number], 1)
    assert sim.stats.replaced_blocks > 50


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_leaves_go_before_stems(policy):
    sim = Simulation([full()], 12, replacement=policy)
    sim.ask("long", list(range(40)), 1)
    sim.ask("other", [9] * 14, 1)
    found = sim.ask("again", list(range(40)), 1).num_cached_tokens
    assert 20 <= found < 39


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"lru"}))
def test_equal_scores_leave_in_order_and_are_selected_in_parts(policy):
    """A selection of the whole pool would cost 20 bytes per block more."""
    count = 10_000
    queue = make_queue(policy, count, lambda blocks: (0 * blocks, 0 * blocks))
    refs = np.zeros(count, np.int32)
    blocks = np.random.default_rng(0).permutation(np.arange(1, count)).astype(np.int32)
    queue.stored(blocks)
    for start in range(0, count, 100):
        queue.push(blocks[start : start + 100])
    taken = []
    while len(victims := queue.pop(7, refs)):
        taken.append(victims)
        queue.forget(victims)
        assert len(queue._ready) <= count // 16
    assert np.array_equal(np.concatenate(taken), blocks)
