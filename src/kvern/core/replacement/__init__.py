"""Replacement: which cached block to give up for a new one. One function per policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvern.core.replacement.fifo import fifo
from kvern.core.replacement.gdsf import gdsf
from kvern.core.replacement.lfu import lfu
from kvern.core.replacement.lru import lru
from kvern.core.replacement.queues import (
    Int32,
    Int64,
    RecencyQueue,
    Score,
    ScoredQueue,
    VictimQueue,
)
from kvern.core.replacement.slru import slru
from kvern.errors import UsageError

__all__ = ["POLICIES", "Int64", "VictimQueue", "make_queue"]

POLICIES: Mapping[str, Score] = MappingProxyType(
    {"lru": lru, "lfu": lfu, "fifo": fifo, "slru": slru, "gdsf": gdsf}
)


def make_queue(
    policy: str, num_blocks: int, chain_facts: Callable[[Int32], tuple[Int64, Int32]]
) -> VictimQueue:
    """The queue of a policy.

    Args:
        policy: a key of `POLICIES`.
        num_blocks: blocks in the pool.
        chain_facts: gives the depths and the parent blocks of published blocks.
    """
    if policy not in POLICIES:
        known = ", ".join(POLICIES)
        raise UsageError(f"unknown replacement policy {policy!r}; choose one of {known}")
    if policy == "lru":
        return RecencyQueue(num_blocks)
    return ScoredQueue(num_blocks, POLICIES[policy], chain_facts, notes_storing=policy == "fifo")
