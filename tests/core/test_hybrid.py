"""Several groups of different reach in one pool."""

import numpy as np
import pytest
from tests.core.simulation import (
    Simulation,
    chunk,
    full,
    kv_plan,
    right_answer,
    state,
    window,
)

from kvern.core.plan import Copy, Zero
from kvern.core.rules import make_rules
from kvern.spec import Chunk, Window

HYBRIDS = {
    "full_window": [full(), window(6)],
    "full_sinks": [full(), window(9, sinks=2)],
    "full_chunk": [full(), chunk(8)],
    "full_state": [full(), state(2)],
    "all": [full(), window(6), chunk(8), state()],
}


def rule_of(group):
    return make_rules(kv_plan([group], 10))[0]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize(
    "reach", [Window(1), Window(5), Window(16), Window(7, 3), Chunk(8), Chunk(5)]
)
def test_kept_blocks_are_those_of_live_positions(reach, block_size):
    group = window(1, block_size)
    rule = rule_of(
        type(group)(group.layers, type(group.spec)(group.spec.content, reach), block_size, 1024)
    )
    before = None
    for length in range(1, 70):
        live = {p // block_size for a, b in reach.live(length) for p in range(a, b)}
        head, first = rule.kept(length)
        existing = set(range(-(-length // block_size)))
        kept = {block for block in existing if block < head or block >= first}
        open_block = {length // block_size} & existing
        assert kept == live | open_block
        if before is not None and (head, first) != before[0]:
            assert length >= before[1]
        if before is None or (head, first) != before[0]:
            before = ((head, first), rule.next_release(length))
        assert rule.next_release(length) > length


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_window_blocks_are_freed_at_once(size):
    sim = Simulation([window(size)], 100, enable_prefix_caching=False)
    sim.add("a", [1], 60)
    while sim.scheduler.has_work:
        sim.step()
        assert sim.stats.in_use_blocks <= -(-(size - 1) // 4) + 1


def test_a_window_model_runs_far_beyond_its_pool():
    sim = Simulation([window(8)], 12, max_num_batched_tokens=8)
    sim.ask("a", list(range(50)), 300)


@pytest.mark.parametrize("name", HYBRIDS)
def test_hyb_001_repeat_extension_and_branch_hit(name):
    """A of 561 tokens; B = A + 30; C = first 400 of A + 50 others; D = A again."""
    sim = Simulation(HYBRIDS[name], 1200, state_checkpoint_tokens=64, check=False)
    a = [(7 * token) % 89 for token in range(561)]
    sim.ask("a", a, 3)
    assert sim.ask("b", [*a, *range(30)], 3).num_cached_tokens >= 512
    c = sim.ask("c", [*a[:400], *range(50)], 3)
    assert 384 <= c.num_cached_tokens <= 400
    d = sim.ask("d", a, 3)
    assert d.num_cached_tokens >= 512
    assert d.miss.reasons


@pytest.mark.parametrize(
    ("prompt_length", "total"),
    [
        (prompt_length, total)
        for prompt_length in (40, 112, 128, 168)
        for total in (127, 128, 129, 144, 256, 257)
        if total > prompt_length
    ],
)
def test_hyb_003_states_at_exact_multiples(prompt_length, total):
    """Interval 128, block 16: six repeats each, all right (the state is verified by the run)."""
    sim = Simulation([full(16), state()], 300, state_checkpoint_tokens=128, check=False)
    prompt = [(5 * token) % 83 for token in range(prompt_length)]
    for number in range(6):
        done = sim.ask(f"r{number}", prompt, total - prompt_length)
        if number:
            assert done.num_cached_tokens >= (prompt_length - 1) // 16 * 16


@pytest.mark.parametrize("groups", [[full(), state()], [full(), window(32)]])
def test_ckp_001_append_only_chat_resumes(groups):
    """Eight turns, the first of 12 tokens, then 100 each; then an edit; then regenerate."""
    interval = 64
    sim = Simulation(groups, 2000, state_checkpoint_tokens=interval, check=False)
    rng = np.random.default_rng(3)
    history = rng.integers(0, 90, 12).tolist()
    known = 0
    for turn in range(8):
        before = sim.executor.num_tokens
        sim.ask(f"turn{turn}", history, 10)
        computed = sim.executor.num_tokens - before
        assert computed <= len(history) - known + 10 + interval
        known = len(history)
        answer = sim.answers[f"turn{turn}", 0]
        previous = history
        history = [*history, *answer, *rng.integers(0, 90, 100).tolist()]
    edited = [*previous[:-40], *rng.integers(0, 90, 40).tolist()]
    done = sim.ask("edit", edited, 10)
    assert done.num_cached_tokens >= len(previous) - 40 - interval
    done = sim.ask("regenerate", edited, 10)
    assert done.num_cached_tokens >= len(edited) - interval


def test_lif_004_states_and_blocks_are_taken_together():
    """Pages run out by states first, then by blocks: everything finishes, nothing is lost."""
    for groups, pages in (([full(), state(9)], 41), ([full(1), state(1)], 60)):
        sim = Simulation(groups, pages, max_num_seqs=64, max_num_batched_tokens=64)
        requests = [sim.add(f"r{i}", [i] * 9, 6) for i in range(64)]
        sim.run()
        for request in requests:
            assert sim.answers[request.request_id, 0] == right_answer(request, 6)
        assert sim.stats.in_use_blocks == 0
        sim.scheduler.clear()
        assert sim.stats.free_blocks == pages - 1


def test_states_stay_within_their_budget():
    sim = Simulation(
        [full(), state(3)], 300, state_checkpoint_tokens=4, max_state_checkpoint_bytes=12 * 1024
    )
    for number in range(6):
        sim.ask(f"r{number}", [number] * 30, 4)
        assert sim.stats.kept_state_pages <= 12
    assert sim.stats.kept_state_pages == 12


def test_states_begin_at_zero_and_are_copied_from_a_checkpoint():
    sim = Simulation([full(), state(2)], 100, state_checkpoint_tokens=8)
    sim.add("a", list(range(17)), 1)
    first = sim.step()
    assert [type(op) for op in first.ops] == [Zero, Zero]
    assert [piece.length for piece in first.chunks] == [8]
    second = sim.step()
    assert [type(op) for op in second.ops] == [Copy, Copy]
    sim.run()
    sim.add("b", [*range(16), 99], 1)
    plan = sim.step()
    assert [op.group for op in plan.ops if isinstance(op, Copy)] == [1, 1]
    assert plan.chunks[0].start == 16


def test_a_model_without_full_reach_keeps_its_index_small():
    sim = Simulation([window(8)], 40, check=False)
    for number in range(30):
        sim.ask(f"r{number}", [number, *range(100)], 2)
    tree = sim.scheduler.state.index.tree
    assert tree.num_nodes <= 40 * 27
    sim.scheduler.clear()
    assert tree.num_nodes == 0


def test_groups_of_several_block_sizes_share_one_pool():
    groups = [full(4), window(10, 8), window(12, 16)]
    sim = Simulation(groups, 200, max_num_batched_tokens=24)
    prompt = [(3 * token) % 71 for token in range(90)]
    sim.ask("a", prompt, 10)
    assert sim.ask("b", prompt, 10).num_cached_tokens == 89
    assert sim.ask("c", [*prompt[:45], 1, 2, 3], 10).num_cached_tokens >= 32


def test_lif_007_sequences_whose_windows_wrapped_at_different_places():
    """Window 64; 10, 64 and 200 tokens in one batch, the middle one leaves, one of 70 joins."""
    sim = Simulation([window(64, 16)], 200)
    lengths = {"a": 10, "b": 64, "c": 200}
    for name, length in lengths.items():
        sim.add(name, [(ord(name) * t) % 61 for t in range(length)], 12)
    for _ in range(6):
        sim.step()
    sim.note(sim.scheduler.abort("b"))
    d = sim.add("d", [(3 * t) % 59 for t in range(70)], 12)
    sim.run()
    assert sim.answers["d", 0] == right_answer(d, 12)


def test_msk_001_a_window_before_it_is_full():
    """Window 32: prefill 5, then chunks of 3, 1, 7, ... up to 80; stale slots are never needed."""
    sim = Simulation([window(32, 8)], 60, max_chunk_tokens=5)
    sim.ask("dirty", [3] * 80, 10)
    for max_chunk in (3, 1, 7):
        sim = Simulation([window(32, 8)], 60, max_chunk_tokens=max_chunk)
        sim.ask("a", list(range(80)), 5)
