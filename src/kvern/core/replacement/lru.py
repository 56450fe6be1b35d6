"""Least recently used: the default."""

from __future__ import annotations

from kvern.core.replacement.queues import BlockFacts, Float64


def lru(blocks: BlockFacts) -> Float64:
    """When a block was last released (`RecencyQueue` keeps this order without scores)."""
    return blocks.last_used.astype(float)
