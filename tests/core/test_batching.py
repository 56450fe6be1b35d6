"""Chunked prompts, limits, queues, preemption, refusal."""

import numpy as np
import pytest
from tests.core.simulation import Simulation, full, right_answer, state, window

from kvern.core.config import SchedulerConfig
from kvern.core.plan import StepResult, TokenChoice
from kvern.core.sequence import Request
from kvern.errors import CapacityError, InputError, IntegrityError, UsageError


def test_decodes_never_stall_behind_a_long_prompt():
    sim = Simulation([full(16)], 2000, max_num_batched_tokens=64, check=False)
    for number in range(8):
        sim.add(f"d{number}", [number] * 5, 100)
    for _ in range(3):
        sim.step()
    sim.add("long", [token % 50 for token in range(5000)], 2)
    for _ in range(60):
        plan = sim.step()
        decodes = [c for c in plan.chunks if c.seq.request.request_id != "long"]
        assert len(decodes) == 8
        assert plan.num_scheduled_tokens == 64


def test_chunks_respect_their_own_limit():
    sim = Simulation([full()], 100, max_num_batched_tokens=64, max_chunk_tokens=7)
    sim.ask("a", list(range(50)), 3)
    assert max(c.length for plan in sim.plans for c in plan.chunks) == 7


def test_priority_then_arrival():
    sim = Simulation([full()], 100, max_num_seqs=1)
    sim.add("late", [1], 1, arrival=5.0)
    sim.add("early", [2], 1, arrival=1.0)
    sim.add("first", [3], 1, arrival=9.0, priority=-1)
    sim.run()
    assert sorted(sim.started_at, key=sim.started_at.get) == ["first", "early", "late"]


@pytest.mark.parametrize("patience", [0, 1, 5])
def test_a_big_request_holds_small_ones_up_for_a_bounded_time(patience):
    sim = Simulation([full()], 30, max_head_of_line_wait_steps=patience)
    sim.add("running", [1] * 60, 50)
    sim.step()
    sim.add("big", [2] * 80, 4)
    sim.add("small", [3] * 4, 4)
    for _ in range(patience + 2):
        sim.step()
    assert "small" in sim.started_at
    assert "big" not in sim.started_at
    assert sim.started_at["small"] - sim.started_at["running"] == patience + 1
    sim.run()


@pytest.mark.parametrize("patience", [0, 2, 8])
def test_a_big_request_behind_a_long_one_blocks_nobody_for_longer(patience):
    """The big one cannot have its room before the running one ends, so small ones go on passing."""
    sim = Simulation([full()], 130, max_head_of_line_wait_steps=patience, check=False)
    sim.add("running", [1] * 40, 400)
    sim.step()
    sim.add("big", [2] * 500, 4)
    arrived = {}
    for step in range(380):
        if step % 7 == 0:
            name = f"small{step}"
            sim.add(name, [3 + step] * 4, 3)
            arrived[name] = sim.num_steps + 1
        sim.step()
    sim.scheduler.check_integrity().raise_if_broken()
    waits = {name: sim.started_at[name] - first for name, first in arrived.items()}
    assert max(waits.values()) <= patience
    assert "big" not in sim.started_at
    assert all(name in sim.finished for name in list(arrived)[:-2])
    sim.run()
    assert sim.finished["big"].num_preemptions == sim.finished["running"].num_preemptions == 0


@pytest.mark.parametrize("length", [300, 350, 490])
def test_a_big_request_collects_its_room_from_small_ones_only_when_that_suffices(length):
    """A stream of small ones that never ends: the big one starts as soon as it can."""
    sim = Simulation([full()], 130, max_head_of_line_wait_steps=2, max_num_seqs=12, check=False)
    sim.add("running", [1] * 40, 300)
    for number in range(1000, 1008):
        sim.add(f"s{number}", [number % 90 + 5] * 12, 40)
    sim.step()
    sim.add("big", [2] * length, 4)
    for number in range(500):
        sim.add(f"s{number}", [number % 90 + 5] * 12, 40)
        sim.step()
        if "big" in sim.started_at:
            break
    assert 2 < sim.started_at["big"] <= (80 if length < 400 else 330)
    assert sim.counters.preemptions <= 40
    sim.run(6_000)
    assert sim.finished["running"].num_preemptions == 0


def test_a_big_request_does_not_starve():
    sim = Simulation([full()], 30, max_head_of_line_wait_steps=2, max_num_seqs=8)
    sim.add("s0", [1] * 10, 30)
    sim.step()
    sim.add("big", [2] * 100, 4)
    for number in range(1, 200):
        sim.add(f"s{number}", [number % 90 + 5] * 10, 30)
        sim.step()
        if "big" in sim.started_at:
            break
    assert sim.started_at["big"] <= 60
    sim.run()


def test_preemption_recomputes_and_changes_nothing():
    sim = Simulation([full()], 20, max_num_seqs=8)
    requests = [sim.add(f"r{i}", [i] * 8, 30) for i in range(6)]
    sim.run()
    for request in requests:
        assert sim.answers[request.request_id, 0] == right_answer(request, 30)
    counters = sim.counters
    assert counters.preemptions > 0
    assert counters.recomputed_tokens + counters.resumed_tokens > 0
    assert counters.queries == counters.hits + counters.misses == 48
    assert counters.prompt_tokens == 48


def test_resuming_finds_the_finished_blocks():
    sim = Simulation([full()], 24, max_num_seqs=4, enable_prefix_caching=True)
    for number in range(4):
        sim.add(f"r{number}", [number] * 12, 24)
    sim.run()
    assert sim.counters.preemptions > 0
    assert sim.counters.resumed_tokens > 0


def test_pre_001_pool_of_40_blocks_six_requests():
    """Forced preemption: tokens and their order are those of a big pool."""
    small = Simulation([full(16)], 41, max_num_seqs=6, check=False)
    big = Simulation([full(16)], 500, max_num_seqs=6, check=False)
    for sim in small, big:
        for number in range(6):
            sim.add(f"r{number}", [token * number % 97 for token in range(64)], 200)
        sim.run()
    assert small.counters.preemptions > 0
    assert small.answers == big.answers
    assert {n: s.token_ids for n, s in small.samples.items()} == {
        n: s.token_ids for n, s in big.samples.items()
    }


def test_srv_001_overload_makes_progress():
    """64 blocks of 16: 32 requests of 30 + 20 blocks; one too big; 10 after a storm of aborts."""
    sim = Simulation([full(16)], 65, max_num_seqs=32, check=False)
    requests = [sim.add(f"r{i}", [(t * (i + 3)) % 101 for t in range(480)], 320) for i in range(32)]
    last, steps = 0, 0
    while sim.scheduler.has_work:
        sim.step()
        steps += 1
        if len(sim.finished) > last:
            last, steps = len(sim.finished), 0
        assert steps < 1000
    assert all(done.num_preemptions <= 50 for done in sim.finished.values())
    assert sim.answers["r31", 0] == right_answer(requests[31], 320)
    with pytest.raises(CapacityError, match=r"need 65 blocks, and the pool has 64"):
        sim.add("huge", [1] * 65 * 16, 1)


def test_srv_001_after_a_storm_of_aborts():
    rng = np.random.default_rng(0)
    sim = Simulation([full(16)], 65, max_num_seqs=16, check=False)
    for number in range(500):
        sim.add(f"r{number}", rng.integers(0, 9, int(rng.integers(1, 300))).tolist(), 40)
        if number % 3 == 0:
            sim.step()
        if len(sim.scheduler.state.records) > 5:
            name = rng.choice(sorted(sim.scheduler.state.records))
            sim.note(sim.scheduler.abort(str(name)))
    for name in tuple(sim.scheduler.state.records):
        sim.note(sim.scheduler.abort(name))
    assert sim.stats.in_use_blocks == 0
    for number in range(10):
        sim.ask(f"after{number}", [number] * 100, 20)
    sim.scheduler.check_integrity().raise_if_broken()


def test_one_overflow_aborts_nobody():
    sim = Simulation([full()], 20)
    kept = sim.add("kept", [1] * 10, 20)
    sim.step()
    with pytest.raises(CapacityError):
        sim.add("huge", [2] * 200, 4)
    sim.run()
    assert sim.answers["kept", 0] == right_answer(kept, 20)
    assert "huge" not in sim.finished


def test_what_fits_exactly_is_served():
    for groups in ([full()], [full(), window(6)], [full(), state(3)]):
        sim = Simulation(groups, 20, state_checkpoint_tokens=4)
        longest = max(n for n in range(1, 200) if sim.scheduler.pages_for(n) <= 19)
        sim.ask("a", [1] * (longest - 7), 8)
        sim.ask("b", [1] * (longest - 7), 8)
        with pytest.raises(CapacityError, match="blocks"):
            sim.add("c", [1] * (longest - 7), 9)


def test_scoring_may_fill_the_context_and_the_pool():
    """No answer follows, so none needs room."""
    for sim in (Simulation([full()], 100, max_model_len=64), Simulation([full()], 17)):
        with pytest.raises(CapacityError, match="65"):
            sim.add("long", [1] * 65, 0, needs_all_logits=True)
        sim.add("score", [1] * 64, 0, needs_all_logits=True)
        sim.run()
        assert sim.samples["score", 0].reason == "length"
        assert sim.executor.num_tokens == 64
    sim = Simulation([full()], 100, max_model_len=64)
    with pytest.raises(CapacityError, match="so that an answer has room"):
        sim.add("answer", [1] * 64, 1, needs_all_logits=True)


@pytest.mark.parametrize("budget", [1, 4, 7, 64])
def test_scoring_wants_all_logits_and_no_token_however_it_is_cut(budget):
    """Also when one token is left for the last step."""
    sim = Simulation([full()], 60, max_num_batched_tokens=budget)
    sim.ask("score", list(range(29)), 0, needs_all_logits=True)
    assert sorted(sim.executor.all_logits["score"]) == list(range(29))
    assert sim.counters.generated_tokens == 0
    assert sim.samples["score", 0].token_ids == ()


def test_refusals_begin_with_what_is_wrong():
    """The id may be one that the caller has never seen."""
    sim = Simulation([full()], 9, max_model_len=64)
    for prompt, fields in (
        ([], {}),
        ([1] * 64, {}),
        ([1] * 60, {"max_tokens": 10}),
        ([1] * 40, {"max_tokens": 2}),
        ([-1], {}),
        ([1], {"n": 0}),
        ([1], {"max_tokens": 0}),
    ):
        with pytest.raises(InputError) as refusal:
            sim.scheduler.add(Request("request-7", prompt, **fields))
        assert "request" not in str(refusal.value)


def test_an_open_limit_is_clamped_and_an_explicit_one_refused():
    sim = Simulation([full()], 100, max_model_len=64)
    assert sim.scheduler.add(Request("a", [1] * 60)) == 4
    with pytest.raises(CapacityError, match="exceed the context of 64"):
        sim.scheduler.add(Request("b", [1] * 60, 5))
    with pytest.raises(CapacityError, match="prompt has 64 tokens and the context 64"):
        sim.scheduler.add(Request("c", [1] * 64))
    sim = Simulation([full()], 6)
    assert sim.scheduler.add(Request("a", [1] * 10)) == 11
    sim.run()
    assert sim.samples["a", 0].reason == "length"
    assert len(sim.samples["a", 0].token_ids) == 11


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"n": 0}, "n is 0"),
        ({"n": 3, "beam_width": 2}, "beam_width 2"),
    ],
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        Request("a", **{"prompt": [1], **fields})


@pytest.mark.parametrize("prompt", [[1.5], [-1], [2**31], [[1]], ["a"]])
def test_prompts_are_token_ids(prompt):
    with pytest.raises(InputError):
        Simulation([full()], 10).add("a", prompt)


def test_settings_are_checked():
    for field in ("max_num_seqs", "max_num_batched_tokens", "max_chunk_tokens", "max_model_len"):
        with pytest.raises(UsageError, match=field):
            SchedulerConfig(**{field: 0})


def test_a_step_is_committed_once_and_with_its_own_result():
    sim = Simulation([full()], 10)
    sim.add("a", [1, 2], 2)
    scheduler = sim.scheduler
    with pytest.raises(InputError, match="in use"):
        sim.add("a", [1])
    plan = scheduler.plan()
    with pytest.raises(IntegrityError, match="neither committed nor discarded"):
        scheduler.plan()
    with pytest.raises(IntegrityError, match="came for step"):
        scheduler.commit(plan, StepResult(plan.step + 1, []))
    with pytest.raises(IntegrityError, match="asked for"):
        scheduler.commit(plan, StepResult(plan.step, []))
    scheduler.commit(plan, sim.executor.execute(plan))
    with pytest.raises(IntegrityError, match="not the step"):
        scheduler.commit(plan, StepResult(plan.step, []))
    sim.run()


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [[]],
        [[TokenChoice(1, -1.0)] * 2],
        [[TokenChoice(1, -1.0)], [TokenChoice(1, -1.0)]],
        [[TokenChoice(1, -1.0)], [TokenChoice(-1, -1.0)]],
        [[TokenChoice(1, -1.0)], [TokenChoice(1 << 31, -1.0)]],
        [[TokenChoice(1, -1.0)], [TokenChoice(None, -1.0)]],
        [[TokenChoice(1, -1.0)], None],
    ],
)
def test_a_refused_result_changes_nothing_and_its_step_can_be_discarded(samples):
    """Whatever an executor hands in, requests go on afterwards with the right answers."""
    sim = Simulation([full(), window(6)], 40, max_num_batched_tokens=64)
    requests = [sim.add("a", list(range(9)), 6), sim.add("b", list(range(5)), 6, n=2)]
    for _ in range(3):
        plan = sim.scheduler.plan()
        before = [(c.seq.num_tokens, c.seq.num_computed_tokens) for c in plan.chunks]
        counters = sim.counters
        with pytest.raises((IntegrityError, TypeError)):
            sim.scheduler.commit(plan, StepResult(plan.step, samples))
        assert before == [(c.seq.num_tokens, c.seq.num_computed_tokens) for c in plan.chunks]
        assert counters == sim.counters
        sim.scheduler.check_integrity().raise_if_broken()
        assert sim.scheduler.discard(plan) == []
        sim.scheduler.check_integrity().raise_if_broken()
        sim.step()
    sim.run()
    for request in requests:
        for index in range(request.n):
            assert sim.answers[request.request_id, index] == right_answer(request, 6, index)


def test_aborts_during_a_step_wait_for_its_commit():
    sim = Simulation([full()], 50)
    sim.add("a", [1] * 10, 5)
    plan = sim.scheduler.plan()
    assert sim.scheduler.abort("a") == []
    assert sim.stats.in_use_blocks == 3
    events = sim.scheduler.commit(plan, sim.executor.execute(plan))
    assert [event.reason for event in events] == ["abort", "abort"]
    assert sim.stats.in_use_blocks == 0
    assert sim.scheduler.abort("unknown") == []


def test_finish_ends_one_sample():
    sim = Simulation([full()], 50)
    sim.add("a", [1] * 10, 50, n=3)
    for _ in range(5):
        sim.step()
    [event] = sim.scheduler.finish("a", 1, "stop")
    assert (event.sample_index, event.reason, len(event.token_ids)) == (1, "stop", 5)
    sim.run()
    assert len(sim.answers["a", 0]) == len(sim.answers["a", 2]) == 50


def test_counts_without_and_with_cache():
    """N tokens from a prompt of P cost P + N - 1 with the cache, P + (P + 1) + ... without."""
    for no_cache, want in (False, 10 + 5 - 1), (True, sum(range(10, 15))):
        sim = Simulation([full(), window(6)], 50, no_cache=no_cache)
        sim.ask("a", list(range(10)), 5)
        assert sim.executor.num_tokens == sim.counters.computed_tokens == want


def test_no_cache_recomputes_sequences_longer_than_a_step():
    sim = Simulation([full()], 50, no_cache=True, max_num_batched_tokens=8)
    sim.ask("a", list(range(30)), 5)
    assert sim.counters.uncached_recomputed_tokens == sum(range(30, 34))


def test_many_small_requests_start_in_one_step():
    sim = Simulation([full()], 500, max_num_seqs=100, max_num_batched_tokens=1000)
    for number in range(100):
        sim.add(f"r{number}", [number] * 5, 2)
    assert len(sim.step().chunks) == 100
    sim.run()


def test_a_discarded_step_is_carried_out_again():
    """The executor fails behind the writing: nothing counts, and the answer is right in the end."""
    for groups in ([full()], [full(), window(6)], [full(), state(2)]):
        sim = Simulation(groups, 60, max_num_batched_tokens=8, state_checkpoint_tokens=4)
        request = sim.add("a", list(range(30)), 6, n=2)
        for number in range(40):
            if not sim.scheduler.has_work:
                break
            if number % 3 == 2:
                plan = sim.scheduler.plan()
                sim.executor.execute(plan)
                sim.scheduler.abort("unknown")
                assert sim.scheduler.discard(plan) == []
                sim.scheduler.check_integrity().raise_if_broken()
            else:
                sim.step()
        sim.run()
        for index in range(2):
            assert sim.answers["a", index] == right_answer(request, 6, index)


def test_nobody_waits_for_a_prefix_of_lower_priority():
    sim = Simulation([full()], 100, max_num_batched_tokens=16)
    sim.add("low", list(range(40)), 2, priority=5)
    sim.step()
    sim.add("high", list(range(40)), 2)
    plan = sim.step()
    assert [piece.seq.request.request_id for piece in plan.chunks] == ["low", "high"]
    sim.run()


def test_a_short_prompt_does_not_wait_for_a_long_one_to_be_through():
    sim = Simulation([full(16)], 2000, max_num_batched_tokens=64, check=False)
    sim.add("long", [token % 50 for token in range(5000)], 2)
    for _ in range(3):
        assert sim.step().num_scheduled_tokens == 64
    sim.add("short", [7] * 90, 2)
    for number in range(4):
        plan = sim.step()
        if number < 3:
            assert plan.num_scheduled_tokens == 64
    assert "short" in sim.finished
    sim.add("a", [8] * 20, 1)
    sim.add("b", [9] * 10, 1)
    sim.step()
    assert {"a", "b"} <= set(sim.started_at)
    sim.run()
