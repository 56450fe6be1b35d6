"""Position regimes: across a border everything is computed again, once, under another key."""

import pytest
from tests.core.simulation import Simulation, full, right_answer, state, window

from kvern.core.config import SchedulerConfig
from kvern.core.sequence import Request
from kvern.errors import UsageError
from kvern.spec.regimes import PositionRegimes

BORDER = 20


def crossing(sim):
    return sim.counters.regime_recomputed_tokens


@pytest.mark.parametrize("groups", [[full()], [full(), window(6)], [full(), state(2)]])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_crossing_computes_everything_again_once(groups, chunk):
    sim = Simulation(groups, 60, regime_border=BORDER, max_chunk_tokens=chunk)
    request = sim.add("a", list(range(12)), 20)
    regimes = []
    while sim.scheduler.has_work:
        regimes += [piece.seq.regime for piece in sim.step().chunks]
    assert regimes == sorted(regimes)
    assert sim.answers["a", 0] == right_answer(request, 20, 0, BORDER)
    counters = sim.counters
    assert counters.regime_recomputed_tokens == BORDER
    assert counters.computed_tokens == BORDER + 31 == sim.executor.num_tokens
    assert (counters.preemptions, counters.recomputed_tokens) == (0, 0)
    assert (counters.computed_prompt_tokens, counters.computed_generated_tokens) == (12, 19)
    assert sim.finished["a"].num_preemptions == 0


def test_up_to_the_border_nothing_changes():
    sim = Simulation([full()], 60, regime_border=BORDER)
    sim.ask("a", list(range(12)), 9)  # its last token is never computed
    assert crossing(sim) == 0
    sim.ask("b", list(range(12)), 10)
    assert crossing(sim) == BORDER


@pytest.mark.parametrize("length", [BORDER - 1, BORDER, BORDER + 1, 3 * BORDER])
def test_prompts_start_in_their_own_regime(length):
    sim = Simulation([full()], 60, regime_border=BORDER)
    sim.ask("a", list(range(length)), 1)
    assert crossing(sim) == 0
    assert {piece.seq.regime for piece in sim.plans[0].chunks} == {int(length > BORDER)}


def test_blocks_of_one_regime_are_not_found_by_the_other():
    sim = Simulation([full()], 100, regime_border=BORDER)
    sim.ask("long", list(range(40)), 1)
    done = sim.ask("short", list(range(16)), 1)
    assert done.num_cached_tokens == 0
    [reason] = done.miss.reasons
    assert (reason.kind, reason.fields) == ("different_key", ("position_regime",))
    assert sim.ask("short again", list(range(16)), 1).num_cached_tokens == 15
    assert sim.ask("long again", list(range(40)), 1).num_cached_tokens == 39


def test_crossing_takes_what_the_long_regime_has():
    sim = Simulation([full()], 100, regime_border=BORDER)
    sim.ask("first", list(range(12)), 20)
    before = sim.counters
    done = sim.ask("second", list(range(12)), 20)
    assert done.num_cached_tokens == 11
    counters = sim.counters
    assert counters.regime_recomputed_tokens == BORDER
    assert counters.resumed_tokens - before.resumed_tokens == BORDER
    assert counters.computed_tokens - before.computed_tokens == 31 - 11 - 0


@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 2, "beam_width": 3}])
def test_forks_and_beams_cross_together(fields):
    answers = []
    for settings in ({}, {"no_cache": True}, {"max_num_seqs": 1}):
        sim = Simulation([full()], 60, regime_border=BORDER, **settings)
        request = sim.add("a", list(range(15)), 12, **fields)
        sim.run()
        answers.append({key: sample.token_ids for key, sample in sim.samples.items()})
        if "beam_width" not in fields:
            for index in range(3):
                assert sim.answers["a", index] == right_answer(request, 12, index, BORDER)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("settings", [{}, {"no_cache": True}, {"max_num_batched_tokens": 7}])
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_scoring_beyond_the_border_takes_both_passes(settings, max_tokens):
    sim = Simulation([full(), window(6)], 60, regime_border=BORDER, **settings)
    request = sim.add("a", list(range(50)), max_tokens, needs_all_logits=True)
    sim.run()
    assert sim.executor.all_logits["a"] == {p: int(p >= BORDER) for p in range(50)}
    assert sim.answers.get(("a", 0), []) == right_answer(request, max_tokens, 0, BORDER)
    if "no_cache" not in settings:
        assert crossing(sim) == BORDER
    sim.ask("b", list(range(50)), 0, needs_all_logits=True)
    assert sim.executor.all_logits["b"] == sim.executor.all_logits["a"]


def test_scoring_up_to_the_border_takes_one_pass():
    sim = Simulation([full()], 60, regime_border=BORDER)
    sim.ask("a", list(range(BORDER)), 0, needs_all_logits=True)
    assert (crossing(sim), sim.executor.num_tokens) == (0, BORDER)


def test_twins_in_flight_across_the_border():
    """A waiter never waits for a length that the other reaches only in another regime."""
    sim = Simulation([full()], 100, regime_border=BORDER, max_num_batched_tokens=8)
    sim.add("score", list(range(50)), 0, needs_all_logits=True)
    sim.step()
    requests = [sim.add(f"r{n}", list(range(n)), 12) for n in (10, 19, 20, 21, 50)]
    sim.run(200)
    for request in requests:
        assert sim.answers[request.request_id, 0] == right_answer(request, 12, 0, BORDER)


def test_crossing_in_a_tiny_pool_beside_others():
    sim = Simulation([full()], 14, regime_border=BORDER, max_num_seqs=4, max_num_batched_tokens=9)
    requests = [sim.add(f"r{n}", [n] * 10, 30) for n in range(5)]
    sim.run()
    for request in requests:
        assert sim.answers[request.request_id, 0] == right_answer(request, 30, 0, BORDER)
    assert sim.counters.preemptions > 0
    assert crossing(sim) <= 5 * BORDER


def test_pins_hold_the_prompts_own_regime():
    sim = Simulation([full()], 60, regime_border=BORDER)
    sim.ask("a", list(range(40)), 1)
    _, num_tokens = sim.scheduler.pin(Request("p", list(range(40))), 100)
    assert num_tokens == 39
    assert sim.scheduler.pin(Request("q", list(range(16))), 100)[1] == 0


def test_a_border_is_a_length():
    with pytest.raises(UsageError, match="regime_border"):
        SchedulerConfig(regime_border=0)
    with pytest.raises(UsageError, match="regime_step"):
        SchedulerConfig(regime_border=4, regime_step=0)
    with pytest.raises(UsageError, match="regime_border"):
        SchedulerConfig(regime_step=1)


# -- a regime per length, as dynamic NTK has it ---------------------------------------------------------


def test_every_length_has_one_regime_and_every_regime_its_lengths():
    for border, step in ((1, None), (5, 1), (5, 3)):
        regimes = PositionRegimes(border, step)
        for length in range(1, 40):
            regime, last = regimes.of(length), regimes.last(regimes.of(length))
            assert last is None or length <= last
            assert regime == 0 or regimes.first_own(regime) == regimes.last(regime - 1)
            assert regimes.first_own(regime) < length
        assert regimes.is_brief == (step is not None)


def brief(groups=None, num_blocks=100, step=1, **settings):
    return Simulation(
        groups or [full()], num_blocks, regime_border=BORDER, regime_step=step, **settings
    )


@pytest.mark.parametrize("groups", [[full()], [full(), window(6)], [full(), state(2)]])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_each_token_beyond_the_border_computes_its_whole_sequence(groups, chunk):
    sim = brief(groups, max_chunk_tokens=chunk)
    request = sim.add("a", list(range(12)), 20)
    sim.run()
    assert sim.answers["a", 0] == right_answer(request, 20, 0, BORDER, 1)
    counters = sim.counters  # passes of 21, 22, ... 31 tokens, each with one new token
    assert counters.regime_recomputed_tokens == sum(range(BORDER, 31))
    assert counters.computed_tokens == BORDER + sum(range(BORDER + 1, 32))
    assert (counters.preemptions, counters.recomputed_tokens) == (0, 0)
    assert (counters.computed_prompt_tokens, counters.computed_generated_tokens) == (12, 19)


def test_a_regime_of_several_lengths_is_left_at_its_end():
    sim = brief(step=4)
    sim.ask("a", list(range(12)), 20)
    assert crossing(sim) == BORDER + (BORDER + 4) + (BORDER + 8)


def test_what_an_answer_computes_in_passing_is_not_kept():
    sim = brief()
    sim.ask("a", list(range(16)), 20)
    stats = sim.stats
    assert stats.cached_blocks == BORDER // 4
    assert len(sim.scheduler.state.index.roots) == 1
    sim.ask("b", list(range(100, 116)), 1)
    assert sim.ask("a again", list(range(16)), 1).num_cached_tokens == 15


@pytest.mark.parametrize("length", [BORDER - 1, BORDER, BORDER + 1, 3 * BORDER])
def test_prompts_of_one_length_find_each_other(length):
    sim = brief()
    sim.ask("a", list(range(length)), 1)
    assert sim.plans[0].chunks[0].seq.regime == max(length - BORDER, 0)
    assert sim.ask("b", list(range(length)), 5).num_cached_tokens == length - 1
    shorter = sim.ask("c", list(range(length - 1)), 1)
    assert shorter.num_cached_tokens == (length - 2 if length <= BORDER else 0)
    if length > BORDER + 1:
        assert shorter.miss.reasons[0].fields == ("position_regime",)


@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 2, "beam_width": 3}])
@pytest.mark.parametrize("groups", [[full()], [full(), state(2)]])
def test_forks_and_beams_cross_again_and_again(groups, fields):
    answers = []
    for settings in ({}, {"no_cache": True}, {"max_num_seqs": 1}, {"num_blocks": 40}):
        sim = brief(groups, **settings)
        request = sim.add("a", list(range(15)), 12, **fields)
        sim.run()
        answers.append({key: sample.token_ids for key, sample in sim.samples.items()})
        if "beam_width" not in fields:
            for index in range(3):
                assert sim.answers["a", index] == right_answer(request, 12, index, BORDER, 1)
    assert answers[0] == answers[1] == answers[2] == answers[3]


@pytest.mark.parametrize("settings", [{}, {"no_cache": True}, {"max_num_batched_tokens": 7}])
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_scoring_takes_a_pass_per_position_beyond_the_border(settings, max_tokens):
    sim = brief([full(), window(6)], **settings)
    request = sim.add("a", list(range(30)), max_tokens, needs_all_logits=True)
    sim.run()
    assert sim.executor.all_logits["a"] == {p: max(p + 1 - BORDER, 0) for p in range(30)}
    assert sim.answers.get(("a", 0), []) == right_answer(request, max_tokens, 0, BORDER, 1)
    if "no_cache" not in settings:
        assert crossing(sim) == sum(range(BORDER, 30 + max(max_tokens - 1, 0)))


def test_lengths_beyond_the_border_in_a_tiny_pool_beside_others():
    sim = brief(num_blocks=14, max_num_seqs=4, max_num_batched_tokens=9)
    lengths = (10, 11, 12, 13, 14, 19, 20, 21, 30)
    requests = [sim.add(f"r{n}", [n] * n, 20) for n in lengths]
    sim.add("scored", list(range(26)), 0, needs_all_logits=True)
    sim.run()
    for request in requests:
        assert sim.answers[request.request_id, 0] == right_answer(request, 20, 0, BORDER, 1)
    assert sim.executor.all_logits["scored"] == {p: max(p + 1 - BORDER, 0) for p in range(26)}
    assert sim.counters.preemptions > 0
