"""Counters that add up.

    queries = hits + misses                            prompt tokens asked for at first start
    prompt_tokens = computed_prompt_tokens + cached_prompt_tokens      as they become available
    free + cached + in use + 1 = num_blocks            at every step
    computed_tokens = computed_prompt_tokens + computed_generated_tokens
                      + recomputed_tokens + uncached_recomputed_tokens
                      + regime_recomputed_tokens

What preemption makes a sequence compute or find again is counted apart (`recomputed_tokens`,
`resumed_tokens`), so a hit rate cannot exceed 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Running totals.

    Attributes:
        queries: prompt tokens of requests that started.
        hits: those of them found in the cache.
        misses: those of them not found.
        prompt_tokens: prompt tokens computed or found for the first time.
        computed_prompt_tokens: prompt tokens computed for the first time.
        cached_prompt_tokens: prompt tokens found instead of computed.
        computed_generated_tokens: generated tokens computed for the first time.
        computed_tokens: all tokens that steps computed.
        recomputed_tokens: tokens computed again after a preemption.
        resumed_tokens: tokens found again after a preemption or a change of position regime.
        uncached_recomputed_tokens: tokens computed again because the cache is off.
        regime_recomputed_tokens: tokens computed again because their sequence outgrew its
            position regime.
        copied_tokens: tokens taken over by copying part of a block.
        generated_tokens: tokens chosen.
        preemptions: sequences that lost their blocks.
        steps: committed steps.
        requests_added: requests accepted.
        requests_finished: requests that ended, aborted ones included.
        requests_aborted: requests that were aborted.
    """

    queries: int = 0
    hits: int = 0
    misses: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    computed_generated_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    resumed_tokens: int = 0
    uncached_recomputed_tokens: int = 0
    regime_recomputed_tokens: int = 0
    copied_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    requests_added: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """One moment of the cache.

    Attributes:
        num_blocks: pages of the pool, the null block included.
        free_blocks: pages without content.
        cached_blocks: pages with content that nobody holds.
        in_use_blocks: pages that sequences or pins hold.
        page_bytes: bytes of a page.
        running: sequences that take part in steps.
        waiting: sequences that wait for room.
        replaced_blocks: cached blocks given up for others so far.
        cleared_blocks: cached blocks dropped by clearing so far.
        deduplicated_blocks: sealed blocks that gave way to an equal one.
        hash_collisions: lookups that met other content with the same hash.
        kept_state_pages: pages of kept states.
        pinned_blocks: pages held by pins.
        counters: running totals.
    """

    num_blocks: int
    free_blocks: int
    cached_blocks: int
    in_use_blocks: int
    page_bytes: int
    running: int
    waiting: int
    replaced_blocks: int
    cleared_blocks: int
    deduplicated_blocks: int
    hash_collisions: int
    kept_state_pages: int
    pinned_blocks: int
    counters: Counters

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the cache, 0 before the first request."""
        queries = self.counters.queries
        return self.counters.hits / queries if queries else 0.0

    @property
    def bytes_total(self) -> int:
        """Bytes of the pool."""
        return self.num_blocks * self.page_bytes

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the pages in use."""
        return self.in_use_blocks * self.page_bytes
