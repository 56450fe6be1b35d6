"""The pool, the tables and the prefix tree checked against each other."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from kvern.core.events import CacheCleared
from kvern.core.residency import StateCopy
from kvern.core.sequence import Int32
from kvern.core.state import SchedulerState
from kvern.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    """What a check found.

    Attributes:
        problems: one sentence per broken invariant, with the numbers.
        num_repaired: blocks dropped or recounted.
    """

    problems: tuple[str, ...]
    num_repaired: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether every invariant holds."""
        return not self.problems

    def raise_if_broken(self) -> None:
        """Raise an error with the first problems.

        Raises:
            IntegrityError: something is broken.
        """
        if self.problems:
            raise IntegrityError("; ".join(self.problems[:5]))


def check_integrity(
    state: SchedulerState,
    held: SequenceOf[Int32],
    copies: SequenceOf[StateCopy],
    *,
    repair: bool,
) -> IntegrityReport:
    """Check every invariant; with `repair`, drop what is unreferenced and recount the rest.

    Args:
        state: the scheduler's state.
        held: blocks held by the step in progress.
        copies: state copies of the step in progress.
        repair: whether to repair.
    """
    expected = _expected_refs(state, held, copies)
    problems = [
        *_pool_problems(state, expected),
        *_table_problems(state),
        *_seat_problems(state),
        *_tree_problems(state),
    ]
    num_repaired = _repair(state, expected) if repair and problems else 0
    return IntegrityReport(tuple(problems), num_repaired)


def _expected_refs(
    state: SchedulerState, held: SequenceOf[Int32], copies: SequenceOf[StateCopy]
) -> Int32:
    """References that tables, pending copies, pins and the step in progress account for."""
    refs = np.zeros(state.pool.num_blocks, np.int32)
    for seq in state.running:
        for table in seq.tables:
            np.add.at(refs, table.blocks, 1)
        if seq.book.tail is not None:
            for sources in seq.book.tail.blocks:
                np.add.at(refs, np.array([s for _, s, _ in sources], np.int32), 1)
    for run in held:
        np.add.at(refs, run, 1)
    for _, _, pages in copies:
        np.add.at(refs, pages, 1)
    for pin in state.pins.values():
        for run in pin.blocks:
            np.add.at(refs, run, 1)
    refs[0] = 0
    return refs


def _pool_problems(state: SchedulerState, expected: Int32) -> Iterator[str]:
    pool = state.pool
    wrong = np.flatnonzero(pool.refs != expected)
    for block in wrong[:3].tolist():
        yield (
            f"block {block} counts {pool.refs[block]} references and {expected[block]} are "
            f"accounted for ({len(wrong)} such blocks)"
        )
    free = pool.free_blocks()
    if len(np.unique(free)) != len(free) or (free == 0).any():
        yield f"the free list of {len(free)} blocks names a block twice or the null block"
    if pool.refs[free].any() or pool.node[free].any():
        yield "a free block is held or named"
    num_cached = int(np.count_nonzero((pool.node != 0) & (pool.refs == 0)))
    if num_cached != pool.num_cached:
        yield f"{num_cached} blocks are cached and the pool counts {pool.num_cached}"
    in_use = int(np.count_nonzero(pool.refs))
    if pool.num_free + num_cached + in_use + 1 != pool.num_blocks:
        yield (
            f"{pool.num_free} free + {num_cached} cached + {in_use} in use + the null block "
            f"are not {pool.num_blocks} blocks"
        )


def _table_problems(state: SchedulerState) -> Iterator[str]:
    owners: dict[int, int] = {}
    span = state.index.span
    for seq in state.running:
        book = seq.book
        if book.num_sealed * span > seq.num_computed_tokens:
            yield f"sequence {seq.seq_id} has sealed more than it has computed"
        for rule, table in zip(state.rules, seq.tables, strict=True):
            sealed = 0 if rule.is_state else book.num_sealed * span // rule.block_size
            blocks = table.blocks
            distinct = blocks[blocks != 0]
            if len(np.unique(distinct)) != len(distinct):
                yield f"sequence {seq.seq_id} names a block twice in group {rule.index}"
            for block in blocks[sealed:].tolist():
                if block and owners.setdefault(block, seq.seq_id) != seq.seq_id:
                    yield f"open block {block} is in the tables of two sequences"
            to_copy = book.tail.num_tokens if book.tail else 0
            head, first = rule.kept(seq.num_computed_tokens + to_copy)
            needed = blocks if rule.is_state else np.concatenate((blocks[:head], blocks[first:]))
            if not needed.all():
                yield f"sequence {seq.seq_id} lacks a block that group {rule.index} needs"
    for seq in state.waiting:
        if any(table.num_blocks for table in seq.tables):
            yield f"sequence {seq.seq_id} waits and holds blocks"


def _seat_problems(state: SchedulerState) -> Iterator[str]:
    """Every seat is free or one running sequence's."""
    taken = [seq.seat for seq in state.running]
    if sorted((*taken, *state.seats)) != list(range(state.config.max_num_seqs)):
        yield (
            f"seats {sorted(taken)} are taken and {sorted(state.seats)} free: together they are not "
            f"{state.config.max_num_seqs} seats"
        )
    for seq in state.waiting:
        if seq.seat != -1:
            yield f"sequence {seq.seq_id} waits and has seat {seq.seat}"
    for seq in state.unsettled:
        if seq.seat == -1 or seq.book.tail is None:
            yield f"sequence {seq.seq_id} has blocks to copy and no seat, or nothing to copy"


def _tree_problems(state: SchedulerState) -> Iterator[str]:
    tree, pool = state.index.tree, state.pool
    alive = np.flatnonzero(tree.is_alive)
    if len(alive) != tree.num_nodes:
        yield f"{len(alive)} nodes are alive and the tree counts {tree.num_nodes}"
    inner = alive[tree.depth[alive] >= 0]
    if not tree.is_alive[tree.parent[inner]].all():
        yield "a node of the prefix tree has lost its parent"
    children = np.bincount(tree.parent[inner], minlength=len(tree.is_alive))
    if (children[alive] != tree.num_children[alive]).any():
        yield "a node of the prefix tree miscounts its children"
    states = {rule.first_column for rule in state.rules if rule.is_state}
    named = 0
    for rule in state.rules:
        for column in range(rule.first_column, rule.first_column + rule.num_columns):
            nodes = alive[tree.blocks[alive, column] != 0]
            blocks = tree.blocks[nodes, column]
            named += (
                sum(len(state.index.state_entries[b]) for b in blocks.tolist())
                if (column in states)
                else len(blocks)
            )
            if (pool.node[blocks] != nodes).any() or (pool.column[blocks] != column).any():
                yield f"a node and its block disagree in column {column}"
            if rule.is_full:
                parents = tree.parent[nodes]
                lost = (tree.depth[parents] >= 0) & (tree.blocks[parents, column] == 0)
                if lost.any():
                    yield f"a block of group {rule.index} has outlived its parent"
    if named != int(np.count_nonzero(pool.node)):
        yield f"{np.count_nonzero(pool.node)} blocks claim a node and nodes name {named}"
    if not tree.refs[alive].min(initial=0) >= 0:
        yield "a node has a negative number of references"


def _repair(state: SchedulerState, expected: Int32) -> int:
    """Drop everything unreferenced and rebuild the free list from what is accounted for."""
    pool, index = state.pool, state.index
    tree = index.tree
    wrong = int(np.count_nonzero(pool.refs != expected))
    idle = np.flatnonzero(expected == 0).astype(np.int32)[1:]
    named = idle[pool.node[idle] != 0]
    gone = np.zeros(pool.num_blocks, np.bool_)
    gone[idle] = True
    tree.blocks[gone[tree.blocks]] = 0
    for first in [first for first in index.state_entries if gone[first]]:
        index.num_state_pages -= len(index.state_entries.pop(first))
    pool.reset(expected, idle)
    tree.remove_idle(np.flatnonzero(tree.is_alive).astype(np.int32))
    if index.events:
        index.events.publish(CacheCleared())
    return wrong + len(named)
