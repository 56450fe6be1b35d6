"""First in, first out: the longest stored goes first, however often it was found."""

from __future__ import annotations

from kvern.core.replacement.queues import BlockFacts, Float64


def fifo(blocks: BlockFacts) -> Float64:
    """When a block was stored."""
    return blocks.stored.astype(float)
