"""Least frequently used: the fewest finds go first, the least recent among equals."""

from __future__ import annotations

from kvern.core.replacement.queues import BlockFacts, Float64


def lfu(blocks: BlockFacts) -> Float64:
    """Number of times a block was stored or found."""
    return blocks.num_uses.astype(float)
