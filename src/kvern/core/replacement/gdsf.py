"""Greedy-dual size-frequency: length-aware, keeps what is used often and dear to recompute.

Score = age + uses * cost, where a block's cost grows with its depth: recomputing a token far into
a prompt attends to all tokens before it. `age`, the latest victim's score, lets unused blocks sink.
(Cherkasova: Improving WWW proxies performance with greedy-dual-size-frequency caching, 1998; the
size is the same for all blocks.)
"""

from __future__ import annotations

from kvern.core.replacement.queues import BlockFacts, Float64

BLOCKS_PER_DOUBLING = 256
"""Depth at which a block's attention costs as much as the rest of its computation."""


def gdsf(blocks: BlockFacts) -> Float64:
    """Age of the cache plus uses times the cost of computing the block again."""
    return blocks.age + blocks.num_uses * (1.0 + blocks.depth / BLOCKS_PER_DOUBLING)
