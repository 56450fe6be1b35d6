"""Faults that other engines had, as tests of the bookkeeping. More of them stand beside the parts
they belong to; the case's number is in the test's name."""

import numpy as np
import pytest
from tests.core.simulation import Simulation, full, right_answer, state, window

from kvern.errors import CapacityError


def text(rng, length):
    return rng.integers(0, 36, length).tolist()


def test_pfx_001_hits_and_misses_in_one_batch():
    """16 prompts of 512 tokens with and without cache; then 8 repeats beside 8 new ones."""
    rng = np.random.default_rng(0)
    first = [text(rng, 512) for _ in range(16)]
    fresh = [text(rng, 512) for _ in range(8)]
    second = [prompt for pair in zip(first[:8], fresh, strict=True) for prompt in pair]
    cached = Simulation([full(16)], 1200, max_num_batched_tokens=2048, check=False)
    plain = Simulation(
        [full(16)], 1200, max_num_batched_tokens=2048, check=False, enable_prefix_caching=False
    )
    for sim in cached, plain:
        for round_number, prompts in enumerate((first, second)):
            for number, prompt in enumerate(prompts):
                sim.add(f"{round_number}/{number}", prompt, 32)
            sim.run()
    assert cached.answers == plain.answers
    found = [cached.finished[f"1/{number}"].num_cached_tokens for number in range(16)]
    assert found[::2] == [511] * 8
    assert max(found[1::2]) <= 2  # chance: the first letters may agree


@pytest.mark.parametrize("num_new", [1, 2, 15, 16, 17])
def test_pfx_011_chunks_that_start_behind_cached_tokens(num_new):
    """For every cached length the new chunk starts at its true position and sees what it needs."""
    prompt = [(11 * token) % 97 for token in range(256 + 17)]
    for num_cached in range(16, 256, 48):
        sim = Simulation([full(16)], 60)
        sim.ask("warm", prompt[:num_cached], 1)
        sim.add("a", prompt[: num_cached + num_new], 3)
        plan = sim.step()
        start = min(num_cached, num_cached + num_new - 1)
        assert [(c.start, c.length) for c in plan.chunks] == [(start, num_new)]
        sim.run()


def test_det_001_cold_warm_batched_and_after_replacement():
    prompt = [(13 * token) % 89 for token in range(600)]
    sim = Simulation([full(16)], 150, max_num_batched_tokens=256, check=False)
    sim.ask("cold", prompt, 128)
    sim.ask("warm", prompt, 128)
    for number in range(8):
        sim.add(f"n{number}", [number] * 60, 20)
    sim.ask("batched", prompt, 128)
    sim.ask("filler", [7] * 1900, 1)
    assert 0 < sim.ask("half replaced", prompt, 128).num_cached_tokens < 599


def test_lif_001_pages_shared_by_several_branches_are_counted_once():
    """Pages of 32, prefixes of 40 and 50 tokens, lengths 33, 65 and 70, forks; 2,500 operations."""
    rng = np.random.default_rng(1)
    sim = Simulation([full(32)], 40, max_num_seqs=8, max_num_batched_tokens=96, check=False)
    stem = text(rng, 50)
    for number in range(400):
        length = int(rng.choice([33, 65, 70]))
        common = int(rng.choice([0, 40, 50]))
        prompt = [*stem[:common], *text(rng, 70)][:length]
        sim.add(f"r{number}", prompt, int(rng.integers(1, 30)), n=int(rng.choice([1, 1, 3])))
        for _ in range(int(rng.integers(0, 6))):
            sim.step()
            stats = sim.stats
            total = stats.free_blocks + stats.cached_blocks + stats.in_use_blocks + 1
            assert total == stats.num_blocks
        if number % 7 == 0:
            names = sorted(sim.scheduler.state.records)
            sim.note(sim.scheduler.abort(str(rng.choice(names))) if names else [])
        if number % 20 == 0:
            sim.scheduler.check_integrity().raise_if_broken()
    sim.run()
    assert sim.stats.in_use_blocks == 0


@pytest.mark.parametrize("midway", [False, True])
@pytest.mark.parametrize("groups", [[full(16)], [full(16), window(64, 16)], [full(16), state()]])
def test_lif_003_an_aborted_prompt_is_found_as_far_as_it_was_computed(midway, groups):
    """Prompt of 4096, chunk 512, abort behind or inside a chunk; unwritten slots are never read."""
    prompt = [(17 * token) % 101 for token in range(4096)]
    sim = Simulation(
        groups, 700, max_num_batched_tokens=512, state_checkpoint_tokens=512, check=False
    )
    sim.add("a", prompt, 4)
    sim.step()
    sim.step()
    if midway:
        plan = sim.scheduler.plan()
        sim.scheduler.abort("a")
        sim.note(sim.scheduler.commit(plan, sim.executor.execute(plan)))
    else:
        sim.note(sim.scheduler.abort("a"))
    computed = sim.executor.num_tokens
    assert sim.finished["a"].reason == "abort"
    done = sim.ask("b", prompt, 4)
    assert computed - 16 <= done.num_cached_tokens <= computed


@pytest.mark.parametrize("in_prefill", [False, True])
@pytest.mark.parametrize("groups", [[full(16)], [full(16), window(64, 16)], [full(16), state()]])
def test_srv_003_an_interrupted_conversation_goes_on(in_prefill, groups):
    """3000 tokens, abort after 50 generated ones or in the prefill, then the next message."""
    history = [(19 * token) % 103 for token in range(3000)]
    sim = Simulation(groups, 500, max_num_batched_tokens=512, check=False)
    sim.add("a", history, 500)
    while sim.executor.num_tokens < (1500 if in_prefill else 3050):
        sim.step()
    computed = sim.executor.num_tokens
    sim.note(sim.scheduler.abort("a"))
    partial = sim.answers.get(("a", 0), [])
    done = sim.ask("b", [*history, *partial, 5, 6, 7], 4)
    assert done.num_cached_tokens >= computed // 16 * 16 - 16
    if not in_prefill:
        assert done.num_cached_tokens >= 2944


def test_shf_001_moved_runs_are_not_reused():
    """'a b e f h j' against 'a b c d ...': exactly the common prefix is found."""
    run = {letter: [ord(letter) * 7 + i for i in range(64)] for letter in "abcdefghj"}
    sim = Simulation([full(16)], 100)
    sim.ask("a", [token for letter in "abcdefghj" for token in run[letter]], 2)
    done = sim.ask("b", [token for letter in "abefhj" for token in run[letter]], 2)
    assert done.num_cached_tokens == 128


def test_con_001_many_clients_get_their_own_answers():
    """16 clients, 500 requests of 1 to 300 tokens with a nonce, random arrivals and aborts."""
    rng = np.random.default_rng(2)
    sim = Simulation(
        [full(16), window(48, 16)], 260, max_num_seqs=16, max_num_batched_tokens=256, check=False
    )
    requests, aborted = [], set()
    stems = [text(rng, 300) for _ in range(12)]
    for number in range(500):
        stem = stems[int(rng.integers(12))][: int(rng.integers(1, 300))]
        requests.append(sim.add(f"r{number}", [*stem, 40 + number], int(rng.integers(1, 12))))
        while len(sim.scheduler.state.records) >= 16:
            sim.step()
        if rng.random() < 0.1:
            name = str(rng.choice(sorted(sim.scheduler.state.records)))
            aborted.add(name)
            sim.note(sim.scheduler.abort(name))
    sim.run()
    sim.scheduler.check_integrity().raise_if_broken()
    for request in requests:
        want = right_answer(request, request.max_tokens)
        got = sim.answers.get((request.request_id, 0), [])
        assert got == want[: len(got)]
        assert len(got) == len(want) or request.request_id in aborted


def test_sta_001_a_pool_is_as_new_after_it_was_cleared():
    """Batches of other sizes one after another; exactly full; one token more is refused."""
    sim = Simulation([full(4)], 101)
    for batch, length in (4, 90), (2, 10), (1, 397):
        for number in range(batch):
            sim.add(f"{batch}/{number}", [number] * length, 4)
        sim.run()
        sim.scheduler.clear()
        assert sim.stats.free_blocks == 100
    with pytest.raises(CapacityError, match="room for 400 tokens"):
        sim.add("more", [1] * 398, 4)


def test_nan_001_stale_slots_are_never_needed():
    """Lengths 1, 15, 16, 17, 33 in blocks full of another tenant's content; forks, reuse."""
    for groups in ([full(16)], [full(16), window(20, 16)]):
        sim = Simulation(groups, 60, check=False)
        for number in range(6):
            sim.ask(f"dirty{number}", [number] * 150, 2, cache_salt="other")
        for length in (1, 15, 16, 17, 33):
            sim.add(f"r{length}", list(range(length)), 40, n=2)
        sim.run()


def test_det_003_neighbours_change_nothing():
    """Alone, beside others, beside a long prompt, after preemption, beside forks."""
    prompt = list(range(30))
    want = None
    for neighbours in ([], [(4, 1)], [(6, 1)] * 31, [(300, 1)], [(9, 4)], [(40, 1)] * 4):
        sim = Simulation([full(4)], 120 if neighbours != [(40, 1)] * 4 else 30, check=False)
        for number, (length, n) in enumerate(neighbours):
            sim.add(f"n{number}", [50 + number] * length, 20, n=n)
        sim.ask("target", prompt, 40, priority=1)
        want = want or sim.answers["target", 0]
        assert sim.answers["target", 0] == want
