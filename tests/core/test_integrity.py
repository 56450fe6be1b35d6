"""The integrity check finds planted faults, and repairs by dropping what nobody holds."""

import numpy as np
import pytest
from tests.core.simulation import Simulation, full, right_answer, state, window

from kvern.errors import IntegrityError


def busy(groups=None):
    sim = Simulation(groups or [full(), window(6)], 80, check=False)
    sim.ask("old", list(range(30)), 4)
    sim.add("a", list(range(50, 70)), 20, n=2)
    sim.add("b", list(range(30, 50)), 20)
    for _ in range(4):
        sim.step()
    sim.scheduler.check_integrity().raise_if_broken()
    return sim


def lose_a_reference(state):
    state.pool.refs[state.running[0].tables[0].blocks[0]] -= 1


def leak_a_block(state):
    state.pool.allocate(1)


def share_an_open_block(state):
    first, other = state.running[0], state.running[-1]
    other.tables[0].replace(other.tables[0].num_blocks - 1, int(first.tables[0].blocks[-1]))


def free_a_block_in_use(state):
    pool = state.pool
    pool._stack[pool.num_free] = state.running[0].tables[0].blocks[0]
    pool.num_free += 1


def forget_a_cached_block(state):
    cached = np.flatnonzero((state.pool.node != 0) & (state.pool.refs == 0))
    state.pool.node[cached[0]] = 0


def point_a_node_elsewhere(state):
    tree = state.index.tree
    node = np.flatnonzero(tree.blocks[:, 0])[0]
    tree.blocks[node, 0] = tree.blocks[node, 0] + 1


def lose_a_parent(state):
    tree = state.index.tree
    node = np.flatnonzero(tree.depth > 0)[0]
    tree.is_alive[tree.parent[node]] = False


def drop_a_needed_block(state):
    state.running[0].tables[0].replace(1, 0)


FAULTS = {
    lose_a_reference: "references",
    leak_a_block: "references",
    share_an_open_block: "tables of two sequences",
    free_a_block_in_use: "free block is held",
    forget_a_cached_block: "cached",
    point_a_node_elsewhere: "disagree",
    lose_a_parent: "alive",
    drop_a_needed_block: "lacks a block",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_found(fault):
    sim = busy()
    fault(sim.scheduler.state)
    report = sim.scheduler.check_integrity()
    assert not report.is_sound
    assert any(FAULTS[fault] in problem for problem in report.problems), report.problems
    with pytest.raises(IntegrityError):
        report.raise_if_broken()


@pytest.mark.parametrize(
    "fault",
    [lose_a_reference, leak_a_block, free_a_block_in_use, forget_a_cached_block],
    ids=lambda fault: fault.__name__,
)
@pytest.mark.parametrize("groups", [[full()], [full(), window(6)], [full(), state(2)]])
def test_repair_in_a_running_engine(fault, groups):
    sim = busy(groups)
    fault(sim.scheduler.state)
    report = sim.scheduler.check_integrity(repair=True)
    assert report.num_repaired > 0
    sim.scheduler.check_integrity().raise_if_broken()
    sim.check = True
    sim.run()
    for name, index in ("a", 0), ("a", 1), ("b", 0):
        request_tokens = list(range(50, 70)) if name == "a" else list(range(30, 50))
        from kvern.core.sequence import Request

        request = Request(name, request_tokens, 20)
        assert sim.answers[name, index] == right_answer(request, 20, index)
    sim.ask("new", list(range(30)), 4)


def test_a_sound_engine_is_not_repaired():
    sim = busy()
    report = sim.scheduler.check_integrity(repair=True)
    assert report.is_sound
    assert report.num_repaired == 0
    assert sim.stats.cached_blocks > 0


def test_check_during_a_step():
    sim = busy()
    plan = sim.scheduler.plan()
    sim.scheduler.check_integrity().raise_if_broken()
    sim.scheduler.commit(plan, sim.executor.execute(plan))
