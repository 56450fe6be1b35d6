"""Random traffic on tiny pools: whatever happens, answers are right and blocks are conserved."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.core.simulation import Simulation, chunk, full, right_answer, state, window

from kvern.core.sequence import Media
from kvern.errors import CapacityError

GROUPS = {
    "full": lambda: [full()],
    "full_1": lambda: [full(1)],
    "window": lambda: [window(6)],
    "full_window": lambda: [full(), window(6)],
    "full_sinks": lambda: [full(), window(7, sinks=3)],
    "full_chunk": lambda: [full(), chunk(8)],
    "full_state": lambda: [full(), state(2)],
    "sizes": lambda: [full(4), window(10, 8)],
    "all": lambda: [full(), window(5), chunk(8), state()],
    "narrow": lambda: [full(kv_format="int8")],
    "narrow_1": lambda: [full(1, "int8")],
    "narrow_mixed": lambda: [full(kv_format="int8"), window(6)],
    "narrow_window": lambda: [full(), window(7, sinks=3, kv_format="int8")],
    "narrow_sizes": lambda: [full(4, "int8"), window(10, 8, kv_format="int8")],
    "narrow_odd": lambda: [full(4, "int8"), window(10, 6, kv_format="int8")],
    "narrow_all": lambda: [full(kv_format="int8"), chunk(8, kv_format="int8"), state(2)],
}
POLICIES = ["lru", "lfu", "fifo", "slru", "gdsf"]
PREFIXES = [
    [],
    [1, 1, 1, 1, 2, 2, 2, 2, 3, 3],
    [1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4],
    [0, 1, 2, 3, 4] * 5,
    [0, 1, 2, 3, 4] * 4 + [1, 1],
]


class Traffic(RuleBasedStateMachine):
    """Arrivals, steps, aborts, early ends, pins and failed steps in any order."""

    sim: Simulation

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        num_blocks=st.integers(8, 60),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        max_chunk=st.sampled_from([None, None, 1, 3, 5]),
        patience=st.integers(0, 3),
        replacement=st.sampled_from(POLICIES),
        hash_bits=st.sampled_from([128, 128, 128, 4]),
        caching=st.sampled_from([True, True, True, True, False]),
        no_cache=st.sampled_from([False] * 7 + [True]),
        interval=st.sampled_from([0, 4, 8]),
        border=st.sampled_from([None, None, None, 1, 7, 12, 16, 21]),
        step=st.sampled_from([None, None, 1, 3]),
    )
    def begin(self, groups, num_blocks, max_num_seqs, budget, max_chunk, patience, replacement,
              hash_bits, caching, no_cache, interval, border, step):  # fmt: skip
        self.sim = Simulation(
            GROUPS[groups](),
            num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_chunk_tokens=max_chunk,
            max_head_of_line_wait_steps=patience,
            replacement=replacement,
            hash_bits=hash_bits,
            enable_prefix_caching=caching,
            no_cache=no_cache,
            state_checkpoint_tokens=interval,
            regime_border=border,
            regime_step=None if border is None else step,
        )
        self.requests = {}
        self.closed = set()
        self.pins = []
        self.count = 0

    @rule(
        prefix=st.sampled_from(PREFIXES),
        rest=st.lists(st.integers(0, 4), min_size=1, max_size=12),
        max_tokens=st.integers(1, 10),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        beams=st.sampled_from([0, 0, 0, 0, 2, 3]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, None, "a"]),
        stops=st.sampled_from([(), (), (0,), (1, 2)]),
        logits=st.sampled_from([False] * 5 + [True]),
        media=st.sampled_from([b"", b"", b"", b"x", b"y"]),
    )
    def arrive(self, prefix, rest, max_tokens, n, beams, priority, salt, stops, logits, media):
        name = f"r{self.count}"
        self.count += 1
        prompt = prefix + rest
        items = (Media(min(5, len(prompt) - 1), 1, media),) if media else ()
        try:
            self.requests[name] = self.sim.add(
                name,
                prompt,
                max_tokens,
                n=min(n, beams) if beams else n,
                beam_width=beams,
                priority=priority,
                cache_salt=salt,
                stop_token_ids=frozenset(stops),
                needs_all_logits=logits,
                media=items,
            )
        except CapacityError:
            pages = self.sim.scheduler.pages_for(len(prompt) + max_tokens - 1)
            assert pages > self.sim.stats.num_blocks - 1

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.sim.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), midway=st.booleans(), index=st.sampled_from([None, 0, 1]))
    def close(self, data, midway, index):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        scheduler = self.sim.scheduler
        plan = scheduler.plan() if midway else None
        if index is None:
            self.closed.add((name, None))
            events = scheduler.abort(name)
        else:
            self.closed.add((name, index))
            events = scheduler.finish(name, index)
        self.sim.note(events)
        if plan is not None:
            assert not events
            self.sim.check_plan(plan)
            self.sim.note(scheduler.commit(plan, self.sim.executor.execute(plan)))
        scheduler.check_integrity().raise_if_broken()

    @rule()
    def fail_a_step(self):
        plan = self.sim.scheduler.plan()
        self.sim.executor.execute(plan)
        self.sim.note(self.sim.scheduler.discard(plan))
        self.sim.scheduler.check_integrity().raise_if_broken()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), ttl=st.integers(0, 20))
    def pin(self, data, ttl):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.sim.scheduler.pin(self.requests[name], ttl)
        self.sim.scheduler.check_integrity().raise_if_broken()

    @rule()
    def clear(self):
        self.sim.scheduler.clear()
        self.sim.scheduler.check_integrity().raise_if_broken()

    def teardown(self):
        if not hasattr(self, "sim"):
            return
        sim = self.sim
        sim.run(20_000)
        for name, request in self.requests.items():
            assert name in sim.finished
            self.check_answer(name, request)
            self.check_logits(name, request)
        counters = sim.counters
        assert counters.queries == counters.hits + counters.misses
        assert counters.prompt_tokens == (
            counters.computed_prompt_tokens + counters.cached_prompt_tokens
        )
        assert counters.computed_tokens == (
            counters.computed_prompt_tokens
            + counters.computed_generated_tokens
            + counters.recomputed_tokens
            + counters.uncached_recomputed_tokens
            + counters.regime_recomputed_tokens
        )
        sim.clock.advance(1000.0)
        sim.step()
        assert sim.stats.in_use_blocks == 0
        sim.scheduler.clear()
        stats = sim.stats
        assert stats.cached_blocks == 0
        assert stats.free_blocks == stats.num_blocks - 1
        assert sim.scheduler.state.index.tree.num_nodes == 0
        assert sim.scheduler.state.index.roots == {}

    def check_logits(self, name, request):
        """A scored prompt has logits at every position, each of its own regime."""
        rows = self.sim.executor.all_logits.get(name, {})
        regimes = self.sim.scheduler.config.regimes
        count = len(request.prompt)
        if regimes is None:
            assert not any(rows.values())
        else:
            assert all(regime == regimes.of(place + 1) for place, regime in rows.items())
        if request.needs_all_logits and not any(other == name for other, _ in self.closed):
            assert sorted(rows) == list(range(count))

    def check_answer(self, name, request):
        if request.beam_width:
            return
        for index in range(request.n):
            config = self.sim.scheduler.config
            border, step = config.regime_border, config.regime_step
            want = right_answer(request, request.max_tokens, index, border, step)
            got = self.sim.answers.get((name, index), [])
            if (name, None) in self.closed or (name, index) in self.closed:
                assert got == want[: len(got)]
            elif not any(other == name for other, _ in self.closed):
                assert got == want


Traffic.TestCase.settings = settings(max_examples=160, stateful_step_count=30)
TestTraffic = Traffic.TestCase


class LongTraffic(Traffic):
    """The same for longer."""


LongTraffic.TestCase.settings = settings(max_examples=1000, stateful_step_count=60)
TestLongTraffic = pytest.mark.full(LongTraffic.TestCase)
