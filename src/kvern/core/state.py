"""What the parts of the scheduler share."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from kvern.core.book import Rank, RequestRecord
from kvern.core.clock import Clock
from kvern.core.config import SchedulerConfig
from kvern.core.hashing import CacheKey
from kvern.core.index import PrefixIndex
from kvern.core.plan import BlockOp, Chunk, RequestStarted
from kvern.core.pool import BlockPool
from kvern.core.residency import Residency, StateCopy
from kvern.core.rules import GroupRule
from kvern.core.sequence import Int32, Request, Sequence
from kvern.core.stats import Counters


def rank_of(seq: Sequence) -> Rank:
    """The sequence's place in every queue."""
    rank: Rank = seq.book.rank
    return rank


_by_rank: Callable[[Sequence], Rank] = rank_of


@dataclass(slots=True)
class Pin:
    """Blocks held for their own sake until a moment in time."""

    pin_id: int
    expires: float
    blocks: list[Int32]
    num_tokens: int


@dataclass(slots=True)
class Draft:
    """The step being planned.

    Attributes:
        budget: tokens left.
        chunks: by sequence id, in the order of planning.
        ops: operations so far.
        fixed: sequences that operations of this step belong to: they stay.
        held: runs of blocks that the step reads; released at commit.
        copies: states that the step copies, to be published at commit.
        headroom: pages that running sequences need to grow, once it has been counted.
        started: requests that start with this step.
    """

    budget: int
    chunks: dict[int, Chunk] = field(default_factory=dict)
    ops: list[BlockOp] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)
    held: list[Int32] = field(default_factory=list)
    copies: list[StateCopy] = field(default_factory=list)
    headroom: int | None = None
    started: list[RequestStarted] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerState:
    """Everything that `plan` and `commit` look at.

    Attributes:
        config: settings.
        rules: the KV groups.
        index: sealed blocks by content.
        pool: all blocks.
        residency: moves sequences in and out of the pool.
        clock: seconds.
        counters: running totals.
        records: live requests by id.
        running: sequences with blocks, by rank.
        waiting: sequences without, by rank.
        pins: held prefixes by id.
        closing: requests with samples that are to end at the next commit.
        unsettled: running sequences that still have blocks to copy from, in order of forking.
        seats: those that no running sequence has, the next to be given last.
    """

    config: SchedulerConfig
    rules: tuple[GroupRule, ...]
    index: PrefixIndex
    pool: BlockPool
    residency: Residency
    clock: Clock
    counters: Counters = field(default_factory=Counters)
    records: dict[str, RequestRecord] = field(default_factory=dict)
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)
    pins: dict[int, Pin] = field(default_factory=dict)
    closing: list[RequestRecord] = field(default_factory=list)
    unsettled: list[Sequence] = field(default_factory=list)
    next_seq_id: int = 0
    seats: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Every seat is free."""
        self.seats = list(range(self.config.max_num_seqs))[::-1]

    def key_of(self, request: Request, regime: int) -> CacheKey:
        """The cache key of a request in a position regime: everything but its tokens and media."""
        config = self.config
        name = request.position_regime
        if config.regime_border is not None:
            name = f"{name}/{regime}"
        sizes = ",".join(str(rule.block_size) for rule in self.rules)
        return CacheKey(
            model=config.model,
            numerics=config.numerics,
            kv_format=f"{config.kv_format}/{sizes}",
            position_regime=name,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
        )

    def start(self, seq: Sequence) -> None:
        """Move a sequence among the running ones and give it a seat."""
        seq.book.is_running = True
        seq.seat = self.seats.pop()
        insort(self.running, seq, key=_by_rank)

    def enqueue(self, seq: Sequence) -> None:
        """Move a sequence among the waiting ones."""
        seq.book.is_running = False
        insort(self.waiting, seq, key=_by_rank)

    def stop(self, seq: Sequence) -> None:
        """Take a sequence out of both queues; a running one gives its seat back."""
        queue = self.running if seq.book.is_running else self.waiting
        queue.remove(seq)
        if seq.book.is_running:
            self.seats.append(seq.seat)
            seq.seat = -1
        seq.book.is_running = False
        if seq in self.unsettled:
            self.unsettled.remove(seq)

    def preempt(self, seq: Sequence, *, keep: bool = True) -> None:
        """Take a running sequence's blocks away; it will catch up later."""
        self.stop(seq)
        self.residency.leave(seq, keep=keep)
        seq.book.num_preemptions += 1
        seq.book.record.num_preemptions += 1
        self.counters.preemptions += 1
        self.enqueue(seq)

    def expire_pins(self, everything: bool = False) -> bool:
        """Release the pins whose time is over, or the one that ends first; says if any went."""
        now = self.clock()
        gone = [pin for pin in self.pins.values() if pin.expires <= now]
        if everything and not gone and self.pins:
            gone = [min(self.pins.values(), key=lambda pin: pin.expires)]
        for pin in gone:
            self.unpin(pin.pin_id)
        return bool(gone)

    def unpin(self, pin_id: int) -> bool:
        """Release a pin; False if it is gone already."""
        pin = self.pins.pop(pin_id, None)
        if pin is None:
            return False
        for blocks in pin.blocks:
            self.residency.release_run(blocks)
        return True
