from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvern.bench.figures import figures_of
from kvern.bench.works import (
    CASES,
    METRICS,
    OTHER_CASES,
    Item,
    items_of,
    most_tokens,
    split_fitting,
    work_of,
)
from kvern.errors import KvernError, UsageError

SMALL = Item("x", "d", 3, 4, 5, 6, "throughput", is_warm=True)


def prompts(work: dict[str, Any]) -> list[list[int]]:
    return [request["prompt"] for request in work["requests"]]


@pytest.mark.parametrize("quick", [False, True])
def test_every_case_has_items_and_every_item_a_metric(quick: bool) -> None:
    items = items_of(tuple(CASES), quick)
    assert [*dict.fromkeys(item.case for item in items), *OTHER_CASES] == list(CASES)
    assert all(item.metric in METRICS for item in items)
    assert len({item.key for item in items}) == len(items)


def test_the_sizes_are_the_stated_ones() -> None:
    items = {item.key: item for item in items_of(tuple(CASES))}
    assert (items["a"].prompt_tokens, items["a"].new_tokens) == (64, 128)
    assert items["b-7500"].prompt_tokens == 7500
    assert items["c"].prompt_tokens == 7500
    assert (items["d"].num_requests, items["d"].prompt_tokens, items["d"].new_tokens) == (
        32,
        256,
        128,
    )
    for key in ("e", "e2"):
        item = items[key]
        assert (item.num_requests, item.shared_tokens, item.own_tokens) == (16, 1500, 50)
    assert items["kv-8192"].request_tokens == 8192
    assert most_tokens([items["a"], items["d"]]) == 32 * 384


def test_unknown_case_is_refused() -> None:
    with pytest.raises(UsageError, match="'f' is unknown"):
        items_of(["a", "f"])


def test_what_the_model_cannot_hold_is_left_out_with_the_numbers() -> None:
    fitting, left_out = split_fitting(items_of(("a", "c")), 1024)
    assert [item.key for item in fitting] == ["a"]
    assert left_out == ["c needs a context of 7,564 tokens, the model's limit is 1,024"]
    assert split_fitting(items_of(("c",)), None)[1] == []


def test_prompts_share_exactly_what_they_should() -> None:
    work = work_of(SMALL, 0, 300)
    first, second, third = prompts(work)
    assert first[:4] == second[:4] == third[:4] == work["warm"]
    assert first[4] != second[4] or first[5] != second[5]
    assert {len(p) for p in prompts(work)} == {9}
    assert all(100 <= token < 300 for p in prompts(work) for token in p)


def test_runs_and_items_have_prompts_of_their_own_and_engines_the_same() -> None:
    other = dataclasses.replace(SMALL, key="y")
    assert work_of(SMALL, 0, 300) == work_of(SMALL, 0, 300)
    assert prompts(work_of(SMALL, 0, 300)) != prompts(work_of(SMALL, 1, 300))
    assert prompts(work_of(SMALL, 0, 300)) != prompts(work_of(other, 0, 300))


def test_contexts_of_the_sweep_continue_each_other() -> None:
    items = items_of(("sweep",), quick=True)
    short, long = (prompts(work_of(item, 2, 300))[0] for item in items[:2])
    assert long[: len(short)] == short
    assert work_of(items[0], 0, 300)["keep_cache"]


def record(item: Item, **changes: Any) -> dict[str, Any]:
    one = {"ttft_s": 0.5, "e2e_s": 1.5, "queue_s": 0.1, "cached_tokens": 4, "new_tokens": 6}
    return {
        "wall_s": 2.0,
        "requests": [one | changes] * item.num_requests,
        "kv": {"bytes_used": 10, "bytes_total": 20},
        "peak_rss_bytes": 30,
    }


def test_figures_are_what_their_names_say() -> None:
    figures = figures_of(SMALL, record(SMALL))
    assert figures.tpot_s == pytest.approx(0.2)
    assert figures.new_tokens_per_s == figures.headline == 3 * 6 / 2.0
    assert figures.cached_tokens == 12
    assert figures.prefill_tokens_per_s == (27 - 12) / 0.5
    assert (figures.queue_s, figures.ttft_s, figures.wall_s) == pytest.approx((0.1, 0.5, 2.0))
    assert (figures.kv_bytes_used, figures.kv_bytes_total, figures.peak_rss_bytes) == (10, 20, 30)


@pytest.mark.parametrize(
    ("metric", "expected"), [("decode", 5.0), ("prefill", 30.0), ("wall", 2.0)]
)
def test_headlines(metric: str, expected: float) -> None:
    item = dataclasses.replace(SMALL, metric=metric)
    assert figures_of(item, record(item)).headline == pytest.approx(expected)


def test_what_an_engine_does_not_tell_stays_unknown() -> None:
    figures = figures_of(SMALL, record(SMALL, queue_s=None, cached_tokens=None) | {"kv": None})
    assert figures.queue_s is None and figures.cached_tokens is None
    assert figures.kv_bytes_used is None


def test_an_engine_that_stopped_early_is_not_measured() -> None:
    with pytest.raises(KvernError, match="5 new tokens instead of 6"):
        figures_of(SMALL, record(SMALL, new_tokens=5))
    with pytest.raises(KvernError, match="is not a measurement"):
        figures_of(SMALL, {"wall_s": 1.0, "requests": [{"new_tokens": 6}]})
