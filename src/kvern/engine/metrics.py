"""The engine's counters in Prometheus' text format (version 0.0.4), for whoever scrapes or prints them.

What adds up in `CacheStats` adds up here: ``queries = hits + misses``, ``prompt = computed + cached``,
``free + cached + in_use + 1 = total``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from kvern.core.stats import CacheStats, Counters
from kvern.engine.runner import WorkCounters

_COUNTER_HELP = {
    "queries": "Prompt tokens of requests that started",
    "hits": "Prompt tokens found in the cache",
    "misses": "Prompt tokens not found in the cache",
    "prompt_tokens": "Prompt tokens computed or found for the first time",
    "computed_prompt_tokens": "Prompt tokens computed for the first time",
    "cached_prompt_tokens": "Prompt tokens found instead of computed",
    "computed_generated_tokens": "Generated tokens computed for the first time",
    "computed_tokens": "All tokens that steps computed",
    "recomputed_tokens": "Tokens computed again after a preemption",
    "resumed_tokens": "Tokens found again after a preemption",
    "uncached_recomputed_tokens": "Tokens computed again because the cache is off",
    "regime_recomputed_tokens": "Tokens computed again because their sequence outgrew its position regime",
    "copied_tokens": "Tokens taken over by copying part of a block",
    "generated_tokens": "Tokens chosen",
    "preemptions": "Sequences that lost their blocks",
    "steps": "Committed steps",
    "requests_added": "Requests accepted",
    "requests_finished": "Requests that ended, aborted ones included",
    "requests_aborted": "Requests that were aborted",
}

_GAUGES = {
    "num_blocks": ("blocks", "Blocks of the pool, the null block included"),
    "free_blocks": ("blocks_free", "Blocks without content"),
    "cached_blocks": ("blocks_cached", "Blocks with content that nobody holds"),
    "in_use_blocks": ("blocks_in_use", "Blocks that sequences or pins hold"),
    "pinned_blocks": ("blocks_pinned", "Blocks held by pins"),
    "running": ("sequences_running", "Sequences that take part in steps"),
    "waiting": ("sequences_waiting", "Sequences that wait for room"),
    "bytes_total": ("pool_bytes", "Bytes of the pool"),
    "bytes_in_use": ("pool_bytes_in_use", "Bytes of the blocks in use"),
}

_TOTALS = {
    "replaced_blocks": "Cached blocks given up",
    "cleared_blocks": "Cached blocks dropped by a clear",
    "deduplicated_blocks": "Sealed blocks that gave way to an equal one",
    "hash_collisions": "Lookups that met other content with the same hash",
}


def prometheus_text(stats: CacheStats, work: WorkCounters) -> str:
    """All counters and gauges, one metric family after the other."""
    lines: list[str] = []
    for name, kind, text, value in _metrics(stats, work):
        lines += [
            f"# HELP kvern_{name} {text}.",
            f"# TYPE kvern_{name} {kind}",
            f"kvern_{name} {value}",
        ]
    return "\n".join(lines) + "\n"


def _metrics(stats: CacheStats, work: WorkCounters) -> Iterator[tuple[str, str, str, int]]:
    for attribute, (name, text) in _GAUGES.items():
        yield name, "gauge", text, int(getattr(stats, attribute))
    for attribute, text in _TOTALS.items():
        yield f"{attribute}_total", "counter", text, int(getattr(stats, attribute))
    for field in fields(Counters):
        value = int(getattr(stats.counters, field.name))
        yield f"{field.name}_total", "counter", _COUNTER_HELP[field.name], value
    yield (
        "query_key_products_total",
        "counter",
        "Query-key products per head",
        work.query_key_products,
    )
    yield "logits_rows_total", "counter", "Rows for which logits were computed", work.logits_rows
