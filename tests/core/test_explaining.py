"""Every miss has a reason, every figure adds up, every event is told."""

import pytest
from tests.core.simulation import Simulation, full, state, window

from kvern.core.events import BlocksRemoved, BlocksStored, CacheCleared
from kvern.core.hashing import CacheKey
from kvern.core.miss import MissReason
from kvern.core.sequence import Request


def reasons(done):
    return [reason.kind for reason in done.miss.reasons]


def test_never_stored():
    sim = Simulation([full()], 50)
    done = sim.ask("a", list(range(20)))
    assert reasons(done) == ["never_stored"]
    assert str(done.miss) == (
        "0 of 20 prompt tokens were cached; from token 0 on nothing was ever stored"
    )


def test_a_start_is_told_with_its_hit_and_its_waiting_time():
    sim = Simulation([full()], 50, max_num_seqs=1)
    sim.ask("a", list(range(20)), 3)
    sim.add("b", list(range(20)), 3)
    sim.add("c", [1], 1)
    sim.run()
    assert sim.started["b"].num_cached_tokens == sim.finished["b"].num_cached_tokens == 19
    assert sim.started["b"].miss is sim.finished["b"].miss
    assert (sim.started["b"].queue_s, sim.started["c"].queue_s) == (0.0, 3.0)


def test_last_token():
    sim = Simulation([full()], 50)
    sim.ask("a", list(range(20)))
    done = sim.ask("b", list(range(20)))
    assert reasons(done) == ["last_token"]
    assert done.miss.cached_by_tier == ((0, 19),)


def test_text_differs_at_a_token():
    sim = Simulation([full()], 50)
    sim.ask("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    done = sim.ask("b", [1, 2, 3, 4, 5, 6, 70, 8, 9])
    [reason] = done.miss.reasons
    assert (reason.kind, reason.position, reason.stored_token, reason.prompt_token) == (
        "text_differs",
        6,
        7,
        70,
    )
    assert "token 6 differs: 70 in the prompt, 7 in what is stored" in str(done.miss)


def test_thk_001_a_template_that_drops_thinking():
    """The next turn renders history without its thinking: the first differing token is named."""
    sim = Simulation([full(4)], 2000, check=False)
    history: list[int] = list(range(100, 140))
    before: list[int] = []
    for turn in range(6):
        thinking = [7, *[500 + turn] * 20, 8]
        done = sim.ask(f"turn{turn}", [*history, *thinking, 9, 9], 5)
        if turn:
            assert done.num_cached_tokens >= len(before)
            [reason] = done.miss.reasons
            assert reason.kind == "text_differs"
            assert reason.position == len(before)
            assert reason.stored_token == 7
        before = history
        history = [*history, *[600 + turn] * 12]


def test_stored_text_ends():
    sim = Simulation([full()], 50)
    sim.ask("a", list(range(10)), 1)
    done = sim.ask("b", list(range(30)), 1)
    [reason] = done.miss.reasons
    assert (reason.kind, reason.position, reason.stored_token) == ("text_differs", 10, None)


def test_replaced_says_when():
    sim = Simulation([full()], 12)
    sim.ask("a", list(range(20)), 1)
    sim.clock.advance(100.0)
    sim.ask("b", [9] * 40, 1)
    done = sim.ask("c", list(range(20)), 1)
    [reason] = done.miss.reasons
    assert reason.kind == "replaced"
    assert 100.0 <= reason.when <= sim.clock.now
    assert reason.when + reason.age_s <= sim.clock.now
    assert "from token 4 on it was replaced 1.0 s ago" in str(done.miss)
    assert str(MissReason("replaced", 5, when=7.0, age_s=12.3)).endswith("replaced 12 s ago")
    for age, words in ((0.26, "0.3 s"), (119.0, "119 s"), (600.0, "10 min"), (9e3, "2 h")):
        assert str(MissReason("cleared", 5, age_s=age)).endswith(f"cleared {words} ago")


def test_cleared_is_not_replaced():
    sim = Simulation([full()], 50)
    sim.ask("a", list(range(20)), 1)
    assert sim.scheduler.clear() == sim.stats.cleared_blocks == 5
    assert sim.stats.replaced_blocks == 0
    sim.clock.advance(11.0)
    done = sim.ask("b", list(range(20)), 1)
    assert reasons(done) == ["cleared"]
    assert str(done.miss).endswith("from token 0 on it was cleared 11 s ago")
    sim.scheduler.clear()
    sim.ask("c", list(range(8)), 1)
    done = sim.ask("d", list(range(20)), 1)
    assert (reasons(done), done.miss.reasons[0].position) == (["cleared"], 8)
    assert reasons(sim.ask("e", list(range(20)), 1)) == ["last_token"]


@pytest.mark.parametrize("field", ["cache_salt", "adapter", "position_regime"])
def test_another_key(field):
    sim = Simulation([full()], 50)
    sim.ask("a", list(range(20)), 1, **{field: "x"})
    done = sim.ask("b", list(range(20)), 1)
    assert reasons(done) == ["different_key"]
    assert done.miss.reasons[0].fields == (field,)
    assert f"its first 20 tokens are stored under another {field}" in str(done.miss)


def test_another_key_holds_a_prompt_shorter_than_a_block():
    sim = Simulation([full(16)], 50)
    sim.ask("a", list(range(10)), 1, cache_salt="x")
    done = sim.ask("b", list(range(10)), 1, cache_salt="y")
    [reason] = done.miss.reasons
    assert (reason.kind, reason.fields, reason.num_tokens) == ("different_key", ("cache_salt",), 10)


def test_the_explanation_that_reaches_furthest_wins():
    """A chat template: every tenant shares its first tokens, and one holds the whole prompt."""
    sim = Simulation([full(16)], 50)
    prompt = [1, *range(100, 160)]
    sim.ask("a", prompt, 1, cache_salt="x")
    sim.ask("b", [1, 7, 8], 1, cache_salt="y")
    sim.ask("c", prompt[:40], 1, cache_salt="z")
    done = sim.ask("d", prompt, 1, cache_salt="y")
    [reason] = done.miss.reasons
    assert done.num_cached_tokens == reason.position == 1
    assert (reason.kind, reason.fields, reason.num_tokens) == ("different_key", ("cache_salt",), 61)
    # nobody has more than the tenant's own: its own text is what differs
    done = sim.ask("e", [*prompt[:50], 9, 9, 9], 1, cache_salt="y")
    [reason] = done.miss.reasons
    assert (reason.kind, reason.position, reason.stored_token) == ("text_differs", 50, prompt[50])
    # what its own key has lost is said first
    sim.ask("f", [3] * 700, 1, cache_salt="y")
    sim.ask("g", prompt, 1, cache_salt="x")
    done = sim.ask("h", prompt, 1, cache_salt="y")
    assert reasons(done) == ["replaced"]


@pytest.mark.parametrize("field", ["model", "numerics", "kv_format"])
def test_another_model_or_format(field):
    """Synthetic: one index cannot hold two models yet, so the key is planted."""
    sim = Simulation([full()], 50)
    state = sim.scheduler.state
    sim.ask("a", list(range(20)), 1)
    own = state.key_of(Request("x", [1]), 0)
    other = CacheKey(**{name: getattr(own, name) for name in own.__slots__} | {field: "other"})
    key_of = type(state).key_of
    type(state).key_of = lambda self, request, regime: other
    try:
        done = sim.ask("b", list(range(20)), 1)
    finally:
        type(state).key_of = key_of
    assert done.num_cached_tokens == 0
    assert done.miss.reasons[0].fields == (field,)


def test_state_not_held():
    sim = Simulation([full(), state()], 100, state_checkpoint_tokens=0)
    sim.ask("a", list(range(40)), 1)
    done = sim.ask("b", [*range(20), 99], 1)
    assert reasons(done)[0] == "state_not_held"


def test_window_not_held():
    sim = Simulation([full(), window(6)], 100)
    sim.ask("a", list(range(60)), 1)
    index = sim.scheduler.state.index
    column = index.rules[1].first_column
    blocks = index.tree.blocks[1:20, column]
    index.drop(blocks[blocks != 0])
    done = sim.ask("b", [*range(30), 99], 1)
    assert done.num_cached_tokens == 0
    assert reasons(done)[0] == "window_not_held"


def test_caching_off_and_hits_not_wanted():
    sim = Simulation([full()], 50, enable_prefix_caching=False)
    assert reasons(sim.ask("a", [1, 2, 3])) == ["caching_disabled"]
    sim = Simulation([full()], 50, no_cache=True)
    done = sim.ask("a", [1, 2, 3])
    assert str(done.miss) == "0 of 3 prompt tokens were cached; the cache is not used"
    sim = Simulation([full()], 50)
    sim.ask("a", list(range(20)))
    done = sim.ask("b", list(range(20)), ignore_cache=True)
    assert (done.num_cached_tokens, reasons(done)) == (0, ["asked_to_ignore"])


def test_pfx_003_whole_prompt_cached():
    """Block 16, prompt of 32: 0, then 16 to 31 of 32; the extension hits at least 48."""
    sim = Simulation([full(16)], 100)
    prompt = list(range(32))
    found, sizes = [], []
    for number in range(4):
        found.append(sim.ask(f"r{number}", prompt, 20).num_cached_tokens)
        sizes.append(sim.stats.cached_blocks)
    assert found[0] == 0
    assert all(16 <= count <= 31 for count in found[1:])
    assert sizes[1:] == sizes[:1] * 3
    done = sim.ask("more", [*prompt, *sim.answers["r0", 0], 5, 6], 4)
    assert done.num_cached_tokens >= 48


def test_counters_add_up_at_every_step():
    sim = Simulation([full(), window(6)], 40, max_num_seqs=4, max_num_batched_tokens=16)
    for number in range(12):
        sim.add(f"r{number}", [number % 3] * (5 + number), 10, n=1 + number % 2)
    while sim.scheduler.has_work:
        sim.step()
        stats = sim.stats
        total = stats.free_blocks + stats.cached_blocks + stats.in_use_blocks + 1
        assert total == stats.num_blocks
        counters = stats.counters
        assert counters.queries == counters.hits + counters.misses
        assert counters.prompt_tokens == (
            counters.computed_prompt_tokens + counters.cached_prompt_tokens
        )
        assert 0 <= stats.hit_rate <= 1
        assert 0 <= stats.bytes_in_use <= stats.bytes_total
    assert counters.computed_tokens == sim.executor.num_tokens
    assert counters.prompt_tokens == counters.queries == sum(5 + n for n in range(12))
    assert counters.generated_tokens == sum(len(answer) for answer in sim.answers.values())


def test_events_tell_what_is_stored_and_removed():
    sim = Simulation([full()], 12)
    events = []
    stop = sim.scheduler.subscribe(events.append)
    sim.ask("a", list(range(20)), 5)
    stored = [event for event in events if isinstance(event, BlocksStored)]
    tokens = [token for event in stored for token in event.token_ids]
    assert tokens == [*range(20), *sim.answers["a", 0]][:24]
    chain = [stored[0].parent_hash, *(name for event in stored for name in event.hashes)]
    for event in stored:
        place = chain.index(event.hashes[0])
        assert chain[place - 1] == event.parent_hash
    sim.ask("b", [9] * 44, 1)
    told = [event for event in events if isinstance(event, BlocksRemoved)]
    removed = {name for event in told for name in event.hashes}
    assert removed >= set(chain[1:7])
    sim.scheduler.clear()
    assert isinstance(events[-1], CacheCleared)
    stop()
    count = len(events)
    sim.ask("c", list(range(20)), 5)
    assert len(events) == count


def test_dropped_and_stored_events_balance():
    """What a follower of the events believes is what the index holds."""
    sim = Simulation([full(2)], 14)
    held = set()

    def follow(event):
        if isinstance(event, BlocksStored):
            held.update(event.hashes)
        elif isinstance(event, BlocksRemoved):
            held.difference_update(event.hashes)

    sim.scheduler.subscribe(follow)
    for number in range(20):
        sim.ask(f"r{number}", [number % 5] * (3 + number % 7), 3)
    tree = sim.scheduler.state.index.tree
    whole = [n for n in range(len(tree.is_alive)) if tree.is_alive[n] and tree.num_tokens[n] == 2]
    names = {tree.hash_low[n].tobytes() + tree.hash_high[n].tobytes() for n in whole}
    assert held == names


def test_a_subscriber_that_raises_is_dropped_and_harms_nobody(caplog):
    """In a full pool, so that events come from planning, committing and clearing alike."""
    sim = Simulation([full(), window(6)], 30)
    told = []

    def fail(event):
        told.append(type(event).__name__)
        if len(told) == limit:
            raise RuntimeError("a subscriber's own problem")

    for limit in range(1, 8):
        told.clear()
        others = []
        sim.scheduler.subscribe(fail)
        stop = sim.scheduler.subscribe(others.append)
        for number in range(4):
            sim.ask(f"r{limit}.{number}", [limit, number] * 12, 8)
        sim.scheduler.clear()
        sim.scheduler.check_integrity().raise_if_broken()
        assert len(told) == limit < len(others)
        stop()
    assert caplog.text.count("gets no more of them") == 7
    assert "a subscriber's own problem" in caplog.text


def test_a_subscriber_finds_sound_bookkeeping_and_may_call_back():
    sim = Simulation([full(2), window(6, 2)], 24)
    seen = []

    def look(event):
        sim.scheduler.check_integrity().raise_if_broken()
        seen.append(event)
        if len(seen) in (5, 9):
            sim.scheduler.clear()

    def follow(event):
        assert event is seen[len(order)]  # both are told the same, in the same order
        order.append(event)

    order = []
    sim.scheduler.subscribe(look)
    sim.scheduler.subscribe(follow)
    for number in range(12):
        sim.ask(f"r{number}", [number % 5] * (3 + number), 6)
    assert sum(isinstance(event, CacheCleared) for event in seen) == 2
    assert seen == order
