"""Queues that say which cached block to give up next.

Recency has a queue of its own, since its order is the order of release: pushing and popping are
plain array slices. Every other policy is a score, fixed when a block is released; the queue gives
up the lowest scores first and never a parent before its children.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


class VictimQueue(Protocol):
    """Cached blocks in the order in which they are to be replaced."""

    def push(self, blocks: Int32) -> None:
        """Blocks of one chain became unheld, children before parents."""

    def pop(self, count: int, refs: Int32) -> Int32:
        """Take up to `count` unheld blocks out, the first to go in front."""

    def used(self, blocks: Int32) -> None:
        """Blocks were found by a request."""

    def stored(self, blocks: Int32) -> None:
        """Blocks were published."""

    def forget(self, blocks: Int32) -> None:
        """Blocks lost their content."""


class RecencyQueue:
    """Least recently released first.

    A ring of block ids; `stamp[block]` is the place of its latest entry, older entries are void.
    Blocks of a chain are released children first, so a child is always older than its parent.
    """

    def __init__(self, num_blocks: int) -> None:
        self._capacity = 1 << max(4, (2 * num_blocks - 1).bit_length())
        self._ring: Int32 = np.zeros(self._capacity, np.int32)
        self._stamp: Int64 = np.full(num_blocks, -1, np.int64)
        self._head = 0
        self._tail = 0

    def push(self, blocks: Int32) -> None:
        """Append at the young end."""
        if self._tail + len(blocks) - self._head > self._capacity:
            self._compact()
        places = np.arange(self._tail, self._tail + len(blocks))
        self._ring[places & (self._capacity - 1)] = blocks
        self._stamp[blocks] = places
        self._tail += len(blocks)

    def pop(self, count: int, refs: Int32) -> Int32:
        """Take from the old end, passing over entries that are void or held again."""
        taken: list[Int32] = []
        while count > 0 and self._head < self._tail:
            places, blocks = self._entries(self._head, min(self._tail, self._head + count + 64))
            valid = np.flatnonzero((self._stamp[blocks] == places) & (refs[blocks] == 0))[:count]
            if len(valid) == count:
                self._head = int(places[valid[-1]]) + 1
            else:
                self._head = int(places[-1]) + 1
            taken.append(blocks[valid])
            count -= len(valid)
        return np.concatenate(taken) if taken else np.zeros(0, np.int32)

    def used(self, blocks: Int32) -> None:
        """Nothing to do: the next release decides."""

    def stored(self, blocks: Int32) -> None:
        """Nothing to do: the next release decides."""

    def forget(self, blocks: Int32) -> None:
        """Void the blocks' entries."""
        self._stamp[blocks] = -1

    def _entries(self, start: int, stop: int) -> tuple[Int64, Int32]:
        places = np.arange(start, stop)
        return places, self._ring[places & (self._capacity - 1)]

    def _compact(self) -> None:
        places, blocks = self._entries(self._head, self._tail)
        blocks = blocks[self._stamp[blocks] == places]
        self._head = self._tail = 0
        self.push(blocks)


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """What a policy may look at, one entry per block.

    Attributes:
        now: the number of releases so far, a clock that moves with use.
        age: the score of the latest victim.
        last_used: `now` of the latest release.
        stored: `now` when the block was published; only noted for policies that ask for it.
        num_uses: times the block was stored or found.
        depth: the block's index in its sequence.
        num_blocks: blocks in the pool.
    """

    now: int
    age: float
    last_used: Int64
    stored: Int64
    num_uses: Int64
    depth: Int64
    num_blocks: int


Score = Callable[[BlockFacts], Float64]


class ScoredQueue:
    """Lowest score first, a parent never before its children.

    A block's effective score is the larger of its own and its released children's. Victims are
    selected in batches: one pass over the columns finds the lowest sixteenth, and blocks released
    meanwhile are merged into it.
    """

    def __init__(
        self,
        num_blocks: int,
        score: Score,
        chain_facts: Callable[[Int32], tuple[Int64, Int32]],
        *,
        notes_storing: bool = False,
    ) -> None:
        self._score_of = score
        self._chain_facts = chain_facts
        self._num_blocks = num_blocks
        self._now = 0
        self._age = 0.0
        self._score: Float64 = np.full(num_blocks, np.inf)
        self._order: Int64 = np.zeros(num_blocks, np.int64)
        self._stored: Int64 | None = np.zeros(num_blocks, np.int64) if notes_storing else None
        self._uses: Int32 = np.zeros(num_blocks, np.int32)
        self._floor: Float64 = np.full(num_blocks, -np.inf)
        self._ready: Int32 = np.zeros(0, np.int32)
        self._ready_order: Int64 = np.zeros(0, np.int64)
        self._ready_score: Float64 = np.zeros(0, np.float64)
        self._bound = -np.inf

    def push(self, blocks: Int32) -> None:
        """Score blocks of one chain, children before parents."""
        order = np.arange(self._now, self._now + len(blocks))
        self._now += len(blocks)
        self._order[blocks] = order
        depth, parents = self._chain_facts(blocks)
        facts = BlockFacts(
            self._now,
            self._age,
            order,
            order if self._stored is None else self._stored[blocks],
            self._uses[blocks].astype(np.int64),
            depth,
            self._num_blocks,
        )
        own = np.maximum(self._score_of(facts), self._floor[blocks])
        score = np.maximum.accumulate(own)
        self._score[blocks] = score
        np.maximum.at(self._floor, parents, score)
        self._floor[0] = -np.inf
        low = blocks[score < self._bound]
        if len(low):
            self._merge(low)

    def pop(self, count: int, refs: Int32) -> Int32:
        """Take the lowest scores out."""
        victims = self._take(count, refs)
        if len(victims) < count:
            self._select(count - len(victims), refs, victims)
            victims = np.concatenate((victims, self._take(count - len(victims), refs)))
        if len(victims):
            self._age = max(self._age, float(self._score[victims[-1]]))
        return victims

    def _take(self, count: int, refs: Int32) -> Int32:
        """Valid blocks from the front of the selection; void entries before them are dropped."""
        taken: list[Int32] = [np.zeros(0, np.int32)]
        while count > 0 and len(self._ready):
            front = slice(0, count + 64)
            blocks = self._ready[front]
            valid = (self._order[blocks] == self._ready_order[front]) & (refs[blocks] == 0)
            places = np.flatnonzero(valid & (self._score[blocks] != np.inf))[:count]
            is_enough = len(places) == count
            used = int(places[-1]) + 1 if is_enough else len(blocks)
            taken.append(blocks[places])
            count -= len(places)
            self._ready = self._ready[used:]
            self._ready_order = self._ready_order[used:]
            self._ready_score = self._ready_score[used:]
        return np.concatenate(taken)

    def used(self, blocks: Int32) -> None:
        """Count a use; held blocks leave the queue."""
        self._uses[blocks] += 1
        self._score[blocks] = np.inf

    def stored(self, blocks: Int32) -> None:
        """Start counting anew."""
        self._uses[blocks] = 1
        if self._stored is not None:
            self._stored[blocks] = self._now

    def forget(self, blocks: Int32) -> None:
        """Void the blocks' scores."""
        self._score[blocks] = np.inf
        self._floor[blocks] = -np.inf

    def _select(self, count: int, refs: Int32, besides: Int32) -> None:
        """Find the lowest sixteenth of all waiting blocks anew, except those just taken."""
        is_waiting = (self._score != np.inf) & (refs == 0)
        is_waiting[besides] = False
        waiting = np.flatnonzero(is_waiting).astype(np.int32)
        wanted = max(count, len(waiting) // 16)
        self._bound = np.inf
        if wanted < len(waiting):
            scores = self._score[waiting]
            self._bound = float(np.partition(scores, wanted)[wanted])
            equal = waiting[scores == self._bound]
            waiting = waiting[scores < self._bound]
            missing = wanted - len(waiting)
            if missing:
                oldest = np.argpartition(self._order[equal], missing - 1)[:missing]
                waiting = np.concatenate((waiting, equal[oldest]))
        self._ready = self._sorted(waiting)
        self._ready_order = self._order[self._ready]
        self._ready_score = self._score[self._ready]

    def _merge(self, blocks: Int32) -> None:
        """Put newly released blocks at their places; their older entries are void by now."""
        blocks = self._sorted(blocks)
        scores = self._score[blocks]
        places = np.searchsorted(self._ready_score, scores, side="right")
        self._ready = np.insert(self._ready, places, blocks)
        self._ready_order = np.insert(self._ready_order, places, self._order[blocks])
        self._ready_score = np.insert(self._ready_score, places, scores)

    def _sorted(self, blocks: Int32) -> Int32:
        ordered: Int32 = blocks[np.lexsort((self._order[blocks], self._score[blocks]))]
        return ordered
