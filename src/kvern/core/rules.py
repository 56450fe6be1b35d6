"""What each KV group asks of the bookkeeping: which blocks to keep, to allocate, to have for a hit.

Everything follows from `reach.live(n)`. Groups may have different block sizes; the prefix tree
works in *spans* of `span_tokens`, the least common multiple of the attention groups' block sizes:

    span of 32 tokens      |             node               |
    group of block size 32 |  column 0                      |
    group of block size 16 |  column 1     |  column 2      |
    group of states        |                      column 3 ^ (the state behind the last token)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

from kvern.spec import Chunk, KVGroup, KVPlan, Reach, Window
from kvern.spec.reach import All


@dataclass(frozen=True, slots=True)
class GroupRule:
    """The bookkeeping's view of one KV group.

    Attributes:
        index: the group's place in the plan.
        reach: which past tokens are still needed.
        block_size: tokens per block; of a state group meaningless.
        is_state: one entry per sequence instead of blocks.
        is_full: every past token is needed for ever.
        is_narrow: some layer's blocks are sealed in another form than they are computed in, so open
            blocks lie beside the pool, one per running sequence.
        copies_exactly: the stored form is the open form, so a copied part of a block continues
            exactly as if it had been computed in place.
        pages_per_entry: pages of a state.
        first_column: the group's first column in the prefix tree.
        num_columns: its blocks per span; 1 for states.
    """

    index: int
    reach: Reach
    block_size: int
    is_state: bool
    is_full: bool
    is_narrow: bool
    copies_exactly: bool
    pages_per_entry: int
    first_column: int
    num_columns: int

    def kept(self, num_tokens: int) -> tuple[int, int]:
        """Blocks to keep once `num_tokens` are computed.

        Returns:
            (h, f): blocks `0 .. h - 1` and all blocks from `f` on are needed.
        """
        if self.is_full:
            return 0, 0
        spans = self.reach.live(num_tokens)
        start, head = num_tokens, 0
        if spans and spans[-1][1] == num_tokens:
            start = spans[-1][0]
            spans = spans[:-1]
        if spans:
            head = -(-spans[-1][1] // self.block_size)
        first = start // self.block_size
        return min(head, first), first

    def next_release(self, num_tokens: int) -> int:
        """The smallest length above `num_tokens` at which `kept` may let go of a block."""
        match self.reach:
            case Window(size=size):
                first = max(num_tokens - size + 1, 0) // self.block_size
                return (first + 1) * self.block_size + size - 1
            case Chunk(size=size):
                return (num_tokens // size + 1) * size
            case _:
                return num_tokens + 1

    def num_blocks(self, num_tokens: int) -> int:
        """Table entries that `num_tokens` take."""
        return self.pages_per_entry if self.is_state else -(-num_tokens // self.block_size)

    def most_held(self, num_tokens: int) -> int:
        """Most pages that a sequence growing to `num_tokens` one token at a time holds at once."""
        if self.is_state:
            return self.pages_per_entry
        whole = self.num_blocks(num_tokens)
        if self.is_full:
            return whole
        match self.reach:
            case Window(size=size, sinks=sinks):
                longest = -(-(size - 1) // self.block_size) + 1 - (-sinks // self.block_size)
            case Chunk(size=size):
                longest = -(-size // self.block_size) + 1
            case _:
                longest = whole
        return min(whole, longest)


def make_rules(kv_plan: KVPlan) -> tuple[GroupRule, ...]:
    """One rule per group of the plan."""
    span = span_tokens(kv_plan)
    rules: list[GroupRule] = []
    column = 0
    for index, group in enumerate(kv_plan.groups):
        columns = 1 if group.is_state else span // group.block_size
        rules.append(
            GroupRule(
                index=index,
                reach=group.spec.reach,
                block_size=group.block_size,
                is_state=group.is_state,
                is_full=isinstance(group.spec.reach, All) and not group.is_state,
                is_narrow=group.is_narrow,
                copies_exactly=_copies_exactly(group),
                pages_per_entry=group.pages_per_entry,
                first_column=column,
                num_columns=columns,
            )
        )
        column += columns
    return tuple(rules)


def span_tokens(kv_plan: KVPlan) -> int:
    """Tokens per node of the prefix tree."""
    sizes = [group.block_size for group in kv_plan.groups if not group.is_state]
    return lcm(*sizes) if sizes else min(group.block_size for group in kv_plan.groups)


def _copies_exactly(group: KVGroup) -> bool:
    caches = [cache for layer in group.caches for cache in layer]
    return group.is_state or all(cache.is_wide and cache.stride == 1 for cache in caches)


def cut_at_blocks(rules: Iterable[GroupRule], start: int, length: int, missing: int) -> int:
    """A chunk's length, such that the open blocks of narrow groups are read before they are written over.

    A sequence has one open block per narrow group. A chunk that starts inside a block ends within it
    or at the end of a later one: then nothing of the later block has to be kept while the first is
    still read, and the chunk can be computed twice. One that does not bring the sequence up to date
    ends at a block's end where it can, so that the next one starts at one.

    Args:
        rules: the KV groups.
        start: first position.
        length: tokens that the chunk may have, at least 1.
        missing: tokens that the sequence lacks from `start` on.
    """
    end = start + length
    sizes = sorted({rule.block_size for rule in rules if rule.is_narrow}, reverse=True)
    if length < missing:
        borders = (end // size * size for size in sizes)
        end = next((border for border in borders if border > start), end)
    is_settled = False
    while not is_settled:
        borders = (end // size * size for size in sizes if start % size)
        shortest = min((border for border in borders if border > start), default=end)
        is_settled, end = shortest == end, shortest
    return end - start
