"""Segmented LRU: a block that was found again outlives a whole pool of one-time blocks.

The protected segment is a head start in recency: a block found at least once counts as used
`num_blocks` releases later than it was, so it leaves the segment by itself when it stays unused.
(Karedla, Love, Wherry: Caching strategies to improve disk system performance, 1994, keep two
lists instead.)
"""

from __future__ import annotations

from kvern.core.replacement.queues import BlockFacts, Float64


def slru(blocks: BlockFacts) -> Float64:
    """Recency, with a head start for blocks that were found at least once."""
    is_protected = blocks.num_uses > 1
    return blocks.last_used + is_protected * float(blocks.num_blocks)
