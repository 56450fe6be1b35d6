import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvern.core.pool import BlockPool
from kvern.core.replacement import POLICIES, make_queue
from kvern.core.replacement.queues import RecencyQueue


def blocks(*ids):
    return np.array(ids, np.int32)


def make_pool(num_blocks, policy="lru"):
    pool = BlockPool(
        num_blocks,
        make_queue(policy, num_blocks, lambda b: (np.zeros(len(b), np.int64), np.zeros_like(b))),
    )
    pool.on_replace(lambda gone: blocks())
    return pool


def cache(pool, ids):
    """Publish held blocks and let go of them."""
    pool.publish(ids, ids.copy(), 0)
    pool.release(ids)


def test_the_null_block_is_never_handed_out():
    pool = make_pool(8)
    assert sorted(pool.allocate(7).tolist()) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.allocate(1) is None
    assert pool.allocate(0).tolist() == []


def test_allocation_is_all_or_nothing():
    pool = make_pool(6)
    pool.allocate(3)
    assert pool.allocate(3) is None
    assert (pool.num_free, pool.num_in_use) == (2, 3)


def test_free_blocks_go_before_cached_ones():
    pool = make_pool(6)
    first = pool.allocate(2)
    cache(pool, first)
    assert not set(pool.allocate(3).tolist()) & set(first.tolist())
    assert set(pool.allocate(2).tolist()) == set(first.tolist())


def test_the_least_recently_released_goes_first():
    pool = make_pool(5)
    a, b, c, d = pool.allocate(4).tolist()
    for block in (c, a, d, b):
        cache(pool, blocks(block))
    pool.hold(blocks(a))
    pool.release(blocks(a))
    assert [pool.allocate(1).item() for _ in range(4)] == [c, d, b, a]


@pytest.mark.parametrize("num_needed", range(7))
@pytest.mark.parametrize("num_hit", range(7))
def test_lif_006_held_hits_are_never_handed_out(num_hit, num_needed):
    """A pool of six cached blocks; hold k of them, then ask for more or fewer than remain."""
    pool = make_pool(7)
    everything = pool.allocate(6)
    cache(pool, everything)
    hits = everything[:num_hit]
    pool.hold(hits)
    fresh = pool.allocate(num_needed)
    if num_needed > 6 - num_hit:
        assert fresh is None
        pool.release(hits)
        assert pool.num_cached == 6
    else:
        assert not set(fresh.tolist()) & set(hits.tolist())
        assert (pool.refs[hits] == 1).all()


def test_the_ring_survives_many_turns():
    queue = RecencyQueue(4)
    refs = np.zeros(4, np.int32)
    for turn in range(1000):
        queue.push(blocks(1 + turn % 3))
    queue.push(blocks(1, 2))
    assert queue.pop(5, refs).tolist() == [3, 1, 2]


class PoolMachine(RuleBasedStateMachine):
    """The pool against a dictionary of reference counts."""

    def __init__(self):
        super().__init__()
        self.pool = make_pool(24)
        self.refs = {}
        self.named = set()

        def forget(gone):
            for block in gone.tolist():
                assert block not in self.refs
                self.named.remove(block)
            return blocks()

        self.pool.on_replace(forget)

    @rule(count=st.integers(0, 9))
    def allocate(self, count):
        fits = count <= 23 - len(self.refs)
        fresh = self.pool.allocate(count)
        assert (fresh is not None) == fits
        for block in fresh.tolist() if fits else ():
            assert block not in self.refs
            self.refs[block] = 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def publish(self, data):
        block = data.draw(st.sampled_from(sorted(self.refs)))
        self.named.add(block)
        self.pool.publish(blocks(block), blocks(block), 0)

    @precondition(lambda self: self.refs or self.named)
    @rule(data=st.data())
    def hold(self, data):
        block = data.draw(st.sampled_from(sorted({*self.refs, *self.named})))
        self.refs[block] = self.refs.get(block, 0) + 1
        self.pool.hold(blocks(block))

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True, max_size=5))
        for block in ids:
            self.refs[block] -= 1
            if not self.refs[block]:
                del self.refs[block]
        self.pool.release(blocks(*ids))

    @invariant()
    def conserved(self):
        pool = self.pool
        assert pool.num_in_use == len(self.refs)
        assert pool.num_cached == len(self.named - set(self.refs))
        assert pool.num_free + pool.num_cached + pool.num_in_use + 1 == pool.num_blocks
        for block, count in self.refs.items():
            assert pool.refs[block] == count


PoolMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_gives_up_every_block_once(policy):
    pool = make_pool(65, policy)
    everything = pool.allocate(64)
    for start in range(0, 64, 8):
        cache(pool, everything[start : start + 8][::-1])
    pool.hold(everything[:8])
    pool.release(everything[:8][::-1])
    assert pool.num_cached == 64
    seen = [pool.allocate(5).tolist() for _ in range(12)]
    assert len({block for five in seen for block in five}) == 60
