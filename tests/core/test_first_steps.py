import pytest
from tests.core.simulation import Simulation, chunk, full, right_answer, state, window

GROUPS = {
    "full": [full()],
    "window": [window(6)],
    "full_window": [full(), window(6)],
    "full_sinks": [full(), window(6, sinks=2)],
    "full_chunk": [full(), chunk(8)],
    "full_state": [full(), state(2)],
    "state": [state()],
    "sizes": [full(4), window(10, 8)],
    "all": [full(), window(5), chunk(8), state()],
}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("settings", [{}, {"enable_prefix_caching": False}, {"no_cache": True}])
def test_answers_are_right_alone_and_together(name, settings):
    sim = Simulation(
        GROUPS[name], 200, max_num_batched_tokens=16, state_checkpoint_tokens=8, **settings
    )
    requests = [
        sim.add(f"r{i}", [1, 2, 3] * i + [i], max_tokens=7, n=1 + i % 3) for i in range(1, 8)
    ]
    sim.run()
    for request in requests:
        for index in range(request.n):
            want = right_answer(request, 7, index)
            assert sim.answers[request.request_id, index] == want
    assert sim.stats.in_use_blocks == 0


@pytest.mark.parametrize("name", GROUPS)
def test_repeats_hit(name):
    sim = Simulation(GROUPS[name], 200, state_checkpoint_tokens=8)
    prompt = list(range(40))
    assert sim.ask("a", prompt, 6).num_cached_tokens == 0
    second = sim.ask("b", prompt, 6)
    assert second.num_cached_tokens >= 24, str(second.miss)
    print(second.miss)
    more = prompt + sim.answers["b", 0] + [7, 8, 9]
    third = sim.ask("c", more, 6)
    print(third.miss)
    assert third.num_cached_tokens >= 40
