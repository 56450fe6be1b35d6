"""Hits, partial tails, prefixes in flight, forks, beams, isolation, pins."""

import itertools

import pytest
from tests.core.simulation import (
    Simulation,
    candidates,
    chunk,
    full,
    group,
    prefix_fingerprints,
    right_answer,
    state,
    window,
)

from kvern.core.plan import Copy
from kvern.core.sequence import Media, Request


def test_pfx_012_the_last_prompt_token_is_always_computed():
    for length, block_size in itertools.product((1, 2, 15, 16, 17, 32), (1, 16)):
        sim = Simulation([full(block_size)], 200)
        prompt = list(range(length))
        first = [sim.ask(f"r{i}", prompt, 1).num_cached_tokens for i in range(3)]
        assert first == [0, length - 1, length - 1]


@pytest.mark.parametrize("shared", range(1, 40, 3))
def test_a_hit_covers_every_common_token(shared):
    sim = Simulation([full(8)], 100)
    sim.ask("a", list(range(40)), 3)
    found = sim.ask("b", [*range(shared), 99, 98, 97], 3)
    assert found.num_cached_tokens == shared


def test_partial_tail_is_copied_in_one_operation():
    sim = Simulation([full(16)], 100)
    sim.ask("a", list(range(30)), 1)
    sim.add("b", [*range(20), 99], 1)
    plan = sim.step()
    [copy] = [op for op in plan.ops if isinstance(op, Copy)]
    assert copy.num_tokens == 4
    assert [(piece.start, piece.length) for piece in plan.chunks] == [(20, 1)]
    assert sim.counters.copied_tokens == 4


def test_longest_branch_is_copied():
    sim = Simulation([full(16)], 100)
    for name, tail in ("a", [1, 2, 3]), ("b", [1, 2, 3, 4, 5, 6]), ("c", [1, 9]):
        sim.ask(name, [*range(50, 66), *tail], 1)
    assert sim.ask("d", [*range(50, 66), 1, 2, 3, 4, 5, 7, 7], 1).num_cached_tokens == 21


def test_narrow_formats_do_not_copy_part_of_a_block():
    from kvern.spec import All

    sim = Simulation([group(All(), 16, "int8")], 100)
    sim.ask("a", list(range(40)), 1)
    done = sim.ask("b", [*range(20), 99], 1)
    assert done.num_cached_tokens == 16
    assert done.miss.reasons[0].kind == "tail_not_copyable"


def test_generated_tokens_are_found_by_the_next_turn():
    sim = Simulation([full(16)], 100)
    sim.ask("a", list(range(20)), 30)
    history = [*range(20), *sim.answers["a", 0]]
    done = sim.ask("b", [*history, 7, 7, 7], 5)
    assert done.num_cached_tokens == len(history) - 1  # the last token was never computed


def test_twins_in_flight_compute_once():
    sim = Simulation([full(4)], 200, max_num_batched_tokens=16)
    prompt = list(range(64))
    for number in range(5):
        sim.add(f"r{number}", [*prompt, 90 + number], 2)
    sim.run()
    assert sim.executor.num_tokens <= 64 + 5 * 3
    assert sim.counters.misses <= 64 + 5


def test_con_003_prefix_in_flight_is_shared():
    """A has done half its prefill when B, C and D arrive with the same prefix of 2000 tokens."""
    sim = Simulation([full(16)], 800, max_num_batched_tokens=500, check=False)
    prefix = [token % 97 for token in range(2000)]
    sim.add("a", [*prefix, 1, 2, 3], 4)
    sim.step()
    sim.step()
    for name in "bcd":
        sim.add(name, [*prefix, ord(name), 5, 6], 4)
    sim.run()
    tails = 4 * (3 + 4)
    assert sim.executor.num_tokens <= 1.3 * 2000 + tails
    for name in "abcd":
        assert sim.finished[name].num_cached_tokens >= (0 if name == "a" else 2000)


@pytest.mark.parametrize("abort_at", range(1, 6))
def test_no_deadlock_when_the_first_of_twins_is_aborted(abort_at):
    sim = Simulation([full(4)], 200, max_num_batched_tokens=8)
    prompt = list(range(32))
    sim.add("a", [*prompt, 1], 2)
    b = sim.add("b", [*prompt, 2], 2)
    for _ in range(abort_at):
        sim.step()
    sim.note(sim.scheduler.abort("a"))
    sim.run()
    assert sim.answers["b", 0] == right_answer(b, 2)
    assert sim.executor.num_tokens <= 34 + 8


def test_twin_does_not_wait_when_caching_is_off():
    sim = Simulation([full(4)], 200, max_num_batched_tokens=64, enable_prefix_caching=False)
    for name in "ab":
        sim.add(name, list(range(20)), 1)
    assert len(sim.step().chunks) == 2


@pytest.mark.parametrize("length", [1, 3, 4, 5, 33])
@pytest.mark.parametrize(
    "groups", [[full()], [full(), window(6)], [full(), state(2)], [full(), chunk(8), state()]]
)
def test_forks_share_the_prompt(length, groups):
    sim = Simulation(groups, 120)
    request = sim.add("a", list(range(length)), 8, n=4)
    sim.run()
    assert sim.counters.computed_prompt_tokens == length
    for index in range(4):
        assert sim.answers["a", index] == right_answer(request, 8, index)


def test_frk_001_four_samples_one_prompt():
    """Four choices with indices 0..3, one ends early, the prompt's blocks are shared and freed."""
    prompt = list(range(33))
    probe = Request("a", prompt, 64, n=4)
    firsts = [right_answer(probe, 64, index) for index in range(4)]
    stop = next(t for t in range(5) if 0 < min(a.index(t) for a in firsts if t in a) < 60)
    sim = Simulation([full(16)], 100)
    request = sim.add("a", prompt, 64, n=4, stop_token_ids=frozenset([stop]))
    peak = 0
    while sim.scheduler.has_work:
        sim.step()
        peak = max(peak, sim.stats.in_use_blocks)
    assert {key[1] for key in sim.samples} == {0, 1, 2, 3}
    answers = [sim.answers["a", index] for index in range(4)]
    assert answers == [right_answer(request, 64, index) for index in range(4)]
    assert len({tuple(answer) for answer in answers}) == 4
    assert peak <= 2 + 4 * 5
    done = sim.finished["a"]
    assert done.num_prompt_tokens == 33
    assert done.num_generated_tokens == sum(map(len, answers))
    assert sim.stats.in_use_blocks == 0


def naive_beam_search(request, max_tokens):
    """The same search without any cache or table."""
    width, penalty = request.beam_width, request.beam_length_penalty
    prompt = list(request.prompt)
    beams, finished = [(0.0, [])], []

    def keep(logprob, tokens):
        finished.append((logprob / len(tokens) ** penalty, tokens))
        finished.sort(key=lambda item: -item[0])
        del finished[width:]

    while True:
        pool = []
        for order, (logprob, tokens) in enumerate(beams):
            value = prefix_fingerprints(request, prompt + tokens)[-1]
            for choice in candidates(value, 2 * width):
                pool.append((logprob + choice.logprob, order, tokens, choice.token_id))
        pool.sort(key=lambda item: -item[0])
        beams = []
        for place, (logprob, _, tokens, token) in enumerate(pool):
            if token in request.stop_token_ids:
                if place < width:
                    keep(logprob, [*tokens, token])
            elif len(beams) < width:
                beams.append((logprob, [*tokens, token]))
        length = len(beams[0][1])
        best = beams[0][0] / length**penalty
        if length >= max_tokens or (len(finished) == width and finished[-1][0] >= best):
            for logprob, tokens in beams if length >= max_tokens else ():
                keep(logprob, tokens)
            return finished[: request.n]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("stops", [(), (0,), (1, 3)])
@pytest.mark.parametrize(
    ("groups", "num_blocks"),
    [
        ([full()], 200),
        ([full()], 14),
        ([full(), window(6)], 200),
        ([full(), state(2)], 200),
        ([full(), state()], 22),
    ],
)
def test_beam_001_beam_search_equals_a_search_without_cache(width, stops, groups, num_blocks):
    """Scores of the returned beams, on full, sliding and recurrent caches, with and without room."""
    sim = Simulation(groups, num_blocks, max_num_seqs=8)
    request = sim.add(
        "a", list(range(13)), 9, n=width, beam_width=width, stop_token_ids=frozenset(stops)
    )
    sim.add("b", list(range(20)), 9)
    sim.run()
    want = naive_beam_search(request, 9)
    got = [sim.samples["a", index] for index in range(len(want))]
    assert [list(sample.token_ids) for sample in got] == [tokens for _, tokens in want]
    assert [sample.score for sample in got] == pytest.approx([score for score, _ in want])


def test_beams_move_tables_not_blocks():
    """Only open tails are copied: at most one block per fork."""
    sim = Simulation([full(4)], 200)
    sim.add("a", list(range(40)), 12, beam_width=4, n=1)
    copies = 0
    while sim.scheduler.has_work:
        plan = sim.step()
        copies += len(plan.ops)
        assert all(op.num_tokens < 4 for op in plan.ops)
    assert copies <= 4 * 12
    assert sim.counters.computed_prompt_tokens == 40


TRIPLES = list(itertools.product([None, "a", "ab"], [None, "a", "b"], [b"", b"a", b"b"]))


def ask(sim, name, triple, length=12):
    salt, adapter, digest = triple
    media = (Media(0, 1, digest),) if digest else ()
    return sim.ask(name, [9] * length, 1, cache_salt=salt, adapter=adapter, media=media)


def test_pfx_005_pfx_007_no_hit_between_tenants_adapters_and_media():
    sim = Simulation([full(4)], 400, check=False)
    for round_number in range(2):
        for number, triple in enumerate(TRIPLES):
            done = ask(sim, f"r{round_number}/{number}", triple)
            assert done.num_cached_tokens == (11 if round_number else 0)


def test_pfx_008_hits_end_where_media_differ():
    """The same placeholder ids with other media, and the pure text before them."""
    sim = Simulation([full(4)], 400)
    text = list(range(10, 24))
    sim.ask("text", text, 1)

    def found(name, digest, length):
        prompt = [*text, *[999] * length, 5]
        media = (Media(14, length, digest),)
        return sim.ask(name, prompt, 1, media=media).num_cached_tokens

    assert found("e1", b"1", 32) == 14
    assert found("e2", b"2", 32) == 14
    assert found("e1 again", b"1", 32) >= 44
    assert found("e3", b"3", 20) == 14


def test_hsh_001_colliding_hashes_never_give_a_wrong_hit():
    """200 prompts under a hash of four bits: answers right, collisions counted."""
    import numpy as np

    rng = np.random.default_rng(0)
    sim = Simulation([full(2)], 300, hash_bits=4, check=False)
    for number in range(200):
        prompt = rng.integers(0, 3, int(rng.integers(1, 12))).tolist()
        sim.ask(f"r{number}", prompt, 2, cache_salt=[None, "x"][number % 2])
    assert sim.stats.hash_collisions > 100
    sim.scheduler.check_integrity().raise_if_broken()


def test_pins_hold_until_their_time_is_over():
    sim = Simulation([full()], 20)
    prompt = list(range(16))
    request = Request("p", prompt, 1)
    sim.ask("a", prompt, 1)
    _, num_tokens = sim.scheduler.pin(request, ttl_s=50.0)
    assert num_tokens == 15
    for number in range(6):
        sim.ask(f"f{number}", [50 + number] * 20, 1)
    assert sim.ask("b", prompt, 1).num_cached_tokens == 15
    sim.clock.advance(100.0)
    for number in range(6):
        sim.ask(f"g{number}", [70 + number] * 20, 1)
    assert sim.ask("c", prompt, 1).num_cached_tokens == 0
    assert sim.stats.pinned_blocks == 0


def test_pins_yield_to_a_request_that_could_not_run_otherwise():
    sim = Simulation([full()], 12)
    sim.ask("a", list(range(32)), 1)
    pin_id, _ = sim.scheduler.pin(Request("p", list(range(32)), 1), ttl_s=1e9)
    sim.ask("b", [7] * 40, 4)
    assert not sim.scheduler.unpin(pin_id)


def test_pfx_009_all_logits_take_no_hit_and_say_so():
    """Prompt log-probabilities of a cached prompt: every position is computed again."""
    for length in (15, 16, 17, 31, 32, 33, 48):
        sim = Simulation([full(16)], 100)
        for name in "ab":
            sim.add(name, list(range(length)), 1, needs_all_logits=True)
            plan = sim.step()
            assert [(c.start, c.length, c.logits) for c in plan.chunks] == [(0, length, "all")]
            sim.run()
        assert sim.finished["b"].num_cached_tokens == 0
        assert sim.finished["b"].miss.reasons[0].kind == "all_logits_needed"


def test_scoring_needs_no_token():
    sim = Simulation([full(4)], 100, max_num_batched_tokens=8)
    sim.add("a", list(range(20)), 0, needs_all_logits=True)
    sim.run()
    assert [c.logits for plan in sim.plans for c in plan.chunks] == ["all"] * 3
    assert sim.finished["a"].num_generated_tokens == 0
    assert sim.samples["a", 0].reason == "length"
