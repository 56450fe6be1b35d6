"""From a worker's raw times to the figures that are reported.

A worker's ``run`` answers with

    wall_s            from the first arrival to the last token
    requests          one object each, all arrived at the start:
        ttft_s            from arrival to the first new token
        e2e_s             from arrival to the last one
        new_tokens        how many
        queue_s           from arrival until it was first scheduled; null where the engine does not say
        cached_tokens     prompt tokens found in a cache; null where the engine does not say
    kv                {"bytes_used": ..., "bytes_total": ...}, null where the engine does not say
    peak_rss_bytes    added by `kvern.bench.serve`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvern.bench.stats import mean
from kvern.bench.works import Item
from kvern.errors import KvernError


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run of one engine.

    Attributes:
        headline: the item's own figure, see `kvern.bench.works.METRICS`.
        wall_s: from the arrival of all to the last token.
        ttft_s: mean time to first token.
        ttft_max_s: the slowest request's.
        tpot_s: mean time per token after the first; None with one token each.
        queue_s: mean time before a request was first scheduled; None when not told.
        prefill_tokens_per_s: prompt tokens that were not cached, over the time to the last first token.
        new_tokens_per_s: new tokens over the whole run.
        cached_tokens: prompt tokens found in a cache, all requests; None when not told.
        kv_bytes_used: bytes of keys and values held at most; None when not told.
        kv_bytes_total: bytes of the pool; None when not told.
        peak_rss_bytes: largest resident size during the run.
    """

    headline: float
    wall_s: float
    ttft_s: float
    ttft_max_s: float
    tpot_s: float | None
    queue_s: float | None
    prefill_tokens_per_s: float
    new_tokens_per_s: float
    cached_tokens: int | None
    kv_bytes_used: int | None
    kv_bytes_total: int | None
    peak_rss_bytes: int

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def figures_of(item: Item, record: Mapping[str, Any]) -> RunFigures:
    """The figures of one run.

    Raises:
        KvernError: the record lacks a field, or a request did not generate what it was asked for.
    """
    try:
        return _figures_of(item, record)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise KvernError(
            f"a worker's answer for {item.key} is not a measurement: {type(error).__name__} {error}"
        ) from error


def _figures_of(item: Item, record: Mapping[str, Any]) -> RunFigures:
    requests = record["requests"]
    for request in requests:
        if request["new_tokens"] != item.new_tokens:
            raise KvernError(
                f"{item.key}: a request has {request['new_tokens']} new tokens instead of {item.new_tokens}"
            )
    ttfts = [float(request["ttft_s"]) for request in requests]
    queues = [request["queue_s"] for request in requests]
    cached = [request["cached_tokens"] for request in requests]
    num_cached = None if None in cached else sum(cached)
    tpots = [
        (request["e2e_s"] - request["ttft_s"]) / (request["new_tokens"] - 1)
        for request in requests
        if request["new_tokens"] > 1
    ]
    computed = item.num_requests * item.prompt_tokens - (num_cached or 0)
    kv = record.get("kv") or {}
    wall_s = float(record["wall_s"])
    figures: dict[str, Any] = {
        "wall_s": wall_s,
        "ttft_s": mean(ttfts),
        "ttft_max_s": max(ttfts),
        "tpot_s": mean(tpots) if tpots else None,
        "queue_s": None if None in queues else mean(queues),
        "prefill_tokens_per_s": computed / max(ttfts),
        "new_tokens_per_s": item.num_requests * item.new_tokens / wall_s,
        "cached_tokens": num_cached,
        "kv_bytes_used": kv.get("bytes_used"),
        "kv_bytes_total": kv.get("bytes_total"),
        "peak_rss_bytes": int(record["peak_rss_bytes"]),
    }
    return RunFigures(headline=_headline(item, figures), **figures)


def _headline(item: Item, figures: Mapping[str, Any]) -> float:
    if item.metric == "decode":
        return 1.0 / float(figures["tpot_s"])
    if item.metric == "prefill":
        return float(figures["prefill_tokens_per_s"])
    if item.metric == "throughput":
        return float(figures["new_tokens_per_s"])
    return float(figures["wall_s"])
