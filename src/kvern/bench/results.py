"""The document's parts: engines, and items with medians, spreads, ratios and bottlenecks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvern.bench.figures import RunFigures
from kvern.bench.limits import Limits
from kvern.bench.peers import Engine
from kvern.bench.stats import Spread, paired_ratios, spread_of
from kvern.bench.works import METRICS, Item

SPREAD_FIELDS = (
    "headline",
    "wall_s",
    "ttft_s",
    "ttft_max_s",
    "tpot_s",
    "queue_s",
    "prefill_tokens_per_s",
    "new_tokens_per_s",
    "peak_rss_bytes",
)
BOUND_PHASE = {"decode": "decode", "prefill": "prefill", "throughput": "all", "wall": "all"}


def engine_document(engine: Engine, loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Who was measured: what its adapter told, and the seconds from process start to first token."""
    return {
        "label": engine.label,
        "peer": engine.peer,
        "model_file": engine.model.name,
        "same_file": engine.same_file,
        **loaded,
    }


def item_document(
    item: Item,
    runs: Mapping[str, Sequence[RunFigures]],
    errors: Mapping[str, str],
    profiles: Mapping[str, Mapping[str, Any]],
    engines: Sequence[Engine],
    limits: Limits,
) -> dict[str, Any]:
    """One line of the results.

    Args:
        item: the work.
        runs: figures by engine label, in the order of the runs.
        errors: a sentence for each engine that failed.
        profiles: of our own engines, as their ``profile`` answered.
        engines: all that were loaded.
        limits: the best that were measured; profiles were taken with the first measurement.
    """
    what, more_is_better = METRICS[item.metric]
    measured = [e for e in engines if runs.get(e.label) and e.label not in errors]
    return {
        "key": item.key,
        "case": item.case,
        "title": item.title,
        "work": {**asdict(item), "prompt_tokens": item.prompt_tokens},
        "metric": {"name": item.metric, "unit": what, "more_is_better": more_is_better},
        "engines": [
            {
                "label": engine.label,
                **_spreads(runs[engine.label]),
                "cached_tokens": runs[engine.label][-1].cached_tokens,
                "kv": _kv_document(runs[engine.label][-1], profiles.get(engine.label)),
                "profile": _profile_document(item, runs[engine.label], profiles.get(engine.label)),
                "ratios": _ratios(item, engine, measured, runs),
            }
            for engine in measured
        ],
        "errors": dict(errors),
    }


def _spreads(figures: Sequence[RunFigures]) -> dict[str, Any]:
    spreads: dict[str, Any] = {}
    for name in SPREAD_FIELDS:
        values = [getattr(each, name) for each in figures]
        spreads[name] = None if None in values else spread_document(spread_of(values))
    return spreads


def spread_document(spread: Spread) -> dict[str, Any]:
    """As JSON."""
    return {**asdict(spread), "values": list(spread.values)}


def _kv_document(figures: RunFigures, profile: Mapping[str, Any] | None) -> dict[str, Any]:
    if profile is not None:
        return dict(profile["kv"])
    return {"bytes_used": figures.kv_bytes_used, "bytes_total": figures.kv_bytes_total}


def _ratios(
    item: Item,
    engine: Engine,
    measured: Sequence[Engine],
    runs: Mapping[str, Sequence[RunFigures]],
) -> dict[str, Any]:
    """An engine of ours over every other engine, and over the best peer; run by run."""
    if engine.peer != "kvern":
        return {}
    ours = [each.headline for each in runs[engine.label]]
    others = {
        other.label: paired_ratios(ours, [each.headline for each in runs[other.label]])
        for other in measured
        if other.label != engine.label
    }
    found = {label: spread_document(ratio) for label, ratio in others.items() if ratio}
    peers = [other.label for other in measured if other.peer != "kvern" and other.label in found]
    if peers:
        choose = min if METRICS[item.metric][1] else max  # the peer that is hardest to beat
        best = choose(peers, key=lambda label: float(found[label]["median"]))
        found["best peer"] = {**found[best], "label": best}
    return found


def _profile_document(
    item: Item, figures: Sequence[RunFigures], profile: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Phases, and how much of the machine's limit the unrecorded runs reached."""
    if profile is None:
        return None
    phases = profile["phases"]
    phase = phases[BOUND_PHASE[item.metric]]
    measured_s = spread_of([_phase_seconds(item, each) for each in figures]).median
    queued = spread_of([(each.queue_s or 0.0) / each.wall_s for each in figures]).median
    return {
        "phases": phases,
        "phase": BOUND_PHASE[item.metric],
        "bottleneck": phase["bottleneck"],
        "shares": phase["shares"],
        "python_share": phase["python_share"],
        "queue_share_of_wall": queued,
        "measured_s": measured_s,
        "bound_s": phase["bound_s"],
        "share_of_limit": phase["bound_s"] / measured_s if measured_s else 0.0,
        "recorded_wall_s": profile["wall_s"],
    }


def _phase_seconds(item: Item, figures: RunFigures) -> float:
    """Measured seconds of the part that the headline is about."""
    if item.metric == "decode":
        return (figures.tpot_s or 0.0) * (item.new_tokens - 1)
    return figures.ttft_s if item.metric == "prefill" else figures.wall_s
