"""How a sequence moves in and out of the pool: hits, growth, forks, trimming, leaving."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from kvern.core.book import TailSource
from kvern.core.index import PrefixIndex
from kvern.core.matching import Match
from kvern.core.plan import BlockOp, Copy, CopyOpen, Zero
from kvern.core.rules import GroupRule
from kvern.core.sequence import Int32, Sequence

NEVER = 1 << 60

StateCopy = tuple[int, GroupRule, Int32]
"""(node behind whose span the state is, group, pages)."""


class Residency:
    """Changes tables and references together, so that neither is ever without the other."""

    def __init__(self, index: PrefixIndex, *, shares: bool, checkpoint_tokens: int) -> None:
        self.index = index
        self.pool = index.pool
        self.rules = index.rules
        self.span = index.span
        self.shares = shares
        self._trimmed = tuple(r for r in self.rules if not r.is_full and not r.is_state)
        self._attention = tuple(r for r in self.rules if not r.is_state)
        self._states = tuple(r for r in self.rules if r.is_state)
        self._copies_exactly = all(rule.copies_exactly for rule in self.rules)
        interval = -(-checkpoint_tokens // self.span) * self.span
        self._interval = interval if self._states and shares else 0

    # -------------------------------------------------------------------------------- arriving

    def hit_blocks(self, found: Match) -> list[Int32]:
        """Blocks that a hit would hold in its tables, per group; 0 where none is needed."""
        tree = self.index.tree
        taken: list[Int32] = []
        for rule in self.rules:
            if rule.is_state:
                taken.append(np.zeros(0, np.int32))
                continue
            columns = slice(rule.first_column, rule.first_column + rule.num_columns)
            blocks = tree.blocks[found.nodes, columns].reshape(-1)
            head, first = rule.kept(found.num_tokens)
            if first > head:
                blocks[head:first] = 0
            taken.append(blocks)
        return taken

    def source_blocks(self, found: Match) -> list[Int32]:
        """Blocks that a hit would copy from, per group."""
        tree = self.index.tree
        sources: list[Int32] = []
        for rule in self.rules:
            if rule.is_state:
                node = found.tail_node or (int(found.nodes[-1]) if found.num_spans else 0)
                pages = self.index.state_pages(node, rule) if node else np.zeros(0, np.int32)
                sources.append(pages)
            elif found.tail_node:
                wanted = rule.num_blocks(found.tail_tokens)
                start = rule.first_column
                sources.append(tree.blocks[found.tail_node, start : start + wanted].copy())
            else:
                sources.append(np.zeros(0, np.int32))
        return sources

    def arrive(self, seq: Sequence, found: Match) -> None:
        """Fill the tables of a sequence without blocks from a hit, and hold all of it."""
        book = seq.book
        tail: list[list[tuple[int, int, int]]] = []
        has_sources = False
        for rule, blocks, sources in zip(
            self.rules, self.hit_blocks(found), self.source_blocks(found), strict=True
        ):
            table = seq.tables[rule.index]
            self.pool.hold(blocks[blocks != 0])
            self.pool.hold(sources)
            has_sources |= len(sources) > 0
            table.extend(blocks)
            if rule.is_state:
                tail.append([(i, page, 0) for i, page in enumerate(sources.tolist())])
                continue
            table.first_live = min(rule.kept(found.num_tokens)[1], len(blocks))
            tail.append(
                [
                    (
                        len(blocks) + i,
                        source,
                        min(rule.block_size, found.tail_tokens - i * rule.block_size),
                    )
                    for i, source in enumerate(sources.tolist())
                ]
            )
        if found.num_spans:
            node = int(found.nodes[-1])
            self.index.tree.refs[node] += 1
            self.index.tree.refs[book.last_node] -= 1
            book.last_node = node
        book.num_sealed = found.num_spans
        seq.num_computed_tokens = found.num_spans * self.span
        book.capacity = seq.num_computed_tokens
        if has_sources:
            book.tail = TailSource(tail, found.tail_tokens)
        book.checkpointed = found.num_tokens
        self.schedule_events(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give a child what its parent has: sealed blocks shared, open ones to be copied."""
        book, other = child.book, parent.book
        sealed = other.num_sealed * self.span
        computed = parent.num_computed_tokens
        tail: list[list[tuple[int, int, int]]] = []
        for rule in self.rules:
            blocks = parent.tables[rule.index].blocks
            table = child.tables[rule.index]
            num_shared = 0 if rule.is_state else sealed // rule.block_size
            shared, rest = blocks[:num_shared], blocks[num_shared:]
            if not rule.is_state:
                rest = rest[: rule.num_blocks(computed) - num_shared]
            self.pool.hold(shared[shared != 0])
            self.pool.hold(rest[rest != 0])
            table.extend(shared)
            table.first_live = min(parent.tables[rule.index].first_live, num_shared)
            tail.append(
                [
                    (
                        num_shared + i,
                        block,
                        0
                        if rule.is_state
                        else min(rule.block_size, computed - (num_shared + i) * rule.block_size),
                    )
                    for i, block in enumerate(rest.tolist())
                    if block
                ]
            )
        self.index.tree.refs[other.last_node] += 1
        self.index.tree.refs[book.last_node] -= 1
        book.last_node = other.last_node
        book.num_sealed = other.num_sealed
        child.num_computed_tokens = book.capacity = sealed
        book.high_water = computed
        book.checkpointed = other.checkpointed
        if any(tail):
            book.tail = TailSource(tail, computed - sealed, parent.seat)
        self.schedule_events(child)

    # --------------------------------------------------------------------------------- growing

    def pages_needed(self, seq: Sequence, num_tokens: int) -> int:
        """Pages to allocate so that the tables have room for `num_tokens`."""
        total = 0
        for rule in self.rules:
            total += max(rule.num_blocks(num_tokens) - seq.tables[rule.index].num_blocks, 0)
        return total

    def most_tokens(self, seq: Sequence, num_tokens: int, num_pages: int) -> int:
        """The longest length up to `num_tokens` for which `num_pages` more pages suffice."""
        low, high = seq.book.capacity, num_tokens
        if self.pages_needed(seq, low) > num_pages:
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            if self.pages_needed(seq, middle) <= num_pages:
                low = middle
            else:
                high = middle - 1
        return low

    def grow(self, seq: Sequence, num_tokens: int, ops: list[BlockOp]) -> bool:
        """Make room for `num_tokens` in all groups at once, or change nothing.

        A sequence's fresh states are zeroed, and what it has to copy is copied first of all.
        """
        blocks = self.pool.allocate(self.pages_needed(seq, num_tokens))
        if blocks is None:
            return False
        start = 0
        book = seq.book
        for rule in self.rules:
            table = seq.tables[rule.index]
            count = max(rule.num_blocks(num_tokens) - table.num_blocks, 0)
            fresh = blocks[start : start + count]
            start += count
            table.extend(fresh)
            if rule.is_state and count and (book.tail is None or not book.tail.blocks[rule.index]):
                ops.extend(Zero(block, rule.index) for block in fresh.tolist())
        book.capacity = max(book.capacity, num_tokens)
        if self._attention:
            book.capacity = min(
                seq.tables[rule.index].num_blocks * rule.block_size for rule in self._attention
            )
        else:
            book.capacity = NEVER
        return True

    def settle(self, seq: Sequence, ops: list[BlockOp], held: list[Int32]) -> bool:
        """Copy what the sequence has to copy; the sources stay held until the step is over."""
        book = seq.book
        tail = book.tail
        if tail is None:
            return True
        length = seq.num_computed_tokens + tail.num_tokens
        if not self.grow(seq, length, ops):
            return False
        for rule, sources in zip(self.rules, tail.blocks, strict=True):
            table = seq.tables[rule.index]
            for place, source, num_tokens in sources:
                ops.append(Copy(source, table.blocks.item(place), num_tokens, rule.index))
                if rule.is_narrow and num_tokens < rule.block_size:
                    ops.append(CopyOpen(tail.seat, seq.seat, num_tokens, rule.index))
        held.extend(self._sources(tail))
        book.tail = None
        seq.num_computed_tokens = length
        self.schedule_events(seq)
        return True

    def _sources(self, tail: TailSource) -> list[Int32]:
        return [
            np.array([source for _, source, _ in sources], np.int32)
            for sources in tail.blocks
            if sources
        ]

    # -------------------------------------------------------------------------------- committing

    def seal(self, seqs: SequenceOf[Sequence]) -> None:
        """Seal every span that the sequences have completed."""
        single: list[Sequence] = []
        for seq in seqs:
            book = seq.book
            num_spans = seq.num_computed_tokens // self.span
            if num_spans == book.num_sealed:
                continue
            if not self.shares or book.is_private:
                book.num_sealed = num_spans
            elif num_spans == book.num_sealed + 1 and not seq.request.media:
                single.append(seq)
            else:
                self.index.seal(seq, num_spans)
        if single:
            self.index.seal_one_each(single)

    def trim(self, seq: Sequence) -> None:
        """Let go of the blocks that have left their group's reach."""
        for rule in self._trimmed:
            table = seq.tables[rule.index]
            head, first = rule.kept(seq.num_computed_tokens)
            start = max(table.first_live, head)
            stop = min(first, table.num_blocks)
            if stop <= start:
                continue
            gone = table.blocks[start:stop]
            gone = gone[gone != 0][::-1].copy()
            table.forget(start, stop)
            self.pool.release(gone)

    def schedule_events(self, seq: Sequence) -> None:
        """Note at which lengths the sequence's next block is sealed, trimmed or checkpointed."""
        book, length = seq.book, seq.num_computed_tokens
        book.next_seal = (book.num_sealed + 1) * self.span
        book.next_release = min(
            (rule.next_release(length) for rule in self._trimmed), default=NEVER
        )
        book.next_event = min(book.next_seal, book.next_release)
        book.next_checkpoint = self._next_checkpoint(seq, length)

    def _next_checkpoint(self, seq: Sequence, length: int) -> int:
        if not self._interval or seq.book.is_private:
            return NEVER
        if self.wants_checkpoint(seq):
            return length
        places = [(length // self._interval + 1) * self._interval]
        prompt_end = (seq.num_prompt_tokens - 1) // self.span * self.span
        if prompt_end > length:
            places.append(prompt_end)
        return min(places)

    # ---------------------------------------------------------------------------------- states

    def wants_checkpoint(self, seq: Sequence) -> bool:
        """Whether the state at the sequence's present length is to be kept."""
        length = seq.num_computed_tokens
        if not self._interval or seq.book.is_private or length == 0 or length % self.span:
            return False
        if length == seq.book.checkpointed or seq.book.num_sealed * self.span != length:
            return False
        at_end = length == (seq.num_prompt_tokens - 1) // self.span * self.span
        return at_end or length % self._interval == 0

    def kept_until(self, seq: Sequence, length: int) -> int:
        """The last place up to `length` at which the sequence's states will be kept."""
        if not self._interval:
            return 0
        prompt_end = (seq.num_prompt_tokens - 1) // self.span * self.span
        place = length // self._interval * self._interval
        return max(place, prompt_end) if prompt_end <= length else place

    def copy_states(self, seq: Sequence, ops: list[BlockOp], spare_pages: int) -> list[StateCopy]:
        """Copy the sequence's states to fresh pages; they are to be published later.

        Nothing is kept unless `spare_pages` remain available afterwards.
        """
        copies: list[StateCopy] = []
        seq.book.checkpointed = seq.num_computed_tokens
        wanted = sum(rule.pages_per_entry for rule in self._states)
        if wanted + spare_pages > self.pool.num_available:
            return copies
        for rule in self._states:
            pages = self.pool.allocate(rule.pages_per_entry)
            assert pages is not None
            sources = seq.tables[rule.index].blocks.tolist()
            pairs = zip(sources, pages.tolist(), strict=True)
            ops.extend(Copy(source, page, 0, rule.index) for source, page in pairs)
            copies.append((seq.book.last_node, rule, pages))
            self.index.tree.refs[seq.book.last_node] += 1
        return copies

    def publish_states(self, copies: list[StateCopy]) -> None:
        """Publish copied states once they have been written."""
        for node, rule, pages in copies:
            self.index.publish_state(node, rule, pages)
            self.pool.release_entry(pages)
            self.index.release_node(node)

    # --------------------------------------------------------------------------------- leaving

    def leave(self, seq: Sequence, *, keep: bool = True) -> None:
        """Give all blocks back; the tables are empty then.

        With `keep`, the open tail and the states are published for later requests.
        """
        book = seq.book
        node = 0
        is_published = keep and self.shares and not book.is_private
        if is_published and seq.num_computed_tokens and book.tail is None:
            node = self._publish_leaf(seq)
        if book.tail is not None:
            for rule, sources in zip(self.rules, book.tail.blocks, strict=True):
                blocks = np.array([source for _, source, _ in sources], np.int32)
                self._release(rule, blocks)
            book.tail = None
        for rule in self.rules:
            table = seq.tables[rule.index]
            blocks = table.blocks
            self._release(rule, blocks[blocks != 0][::-1] if not rule.is_state else blocks)
            table.clear()
        if node and node != book.last_node:
            self.index.tree.remove_idle(np.array([node], np.int32))
        if book.last_node != book.root:
            self.index.tree.refs[book.root] += 1
            self.index.release_node(book.last_node)
            book.last_node = book.root
        book.num_sealed = book.capacity = book.checkpointed = 0
        seq.num_computed_tokens = 0
        self.schedule_events(seq)

    def _publish_leaf(self, seq: Sequence) -> int:
        """Publish the open tail and the states of a sequence that stops here."""
        index, book = self.index, seq.book
        end = seq.num_computed_tokens
        if end > book.num_sealed * self.span and not self._copies_exactly:
            return 0
        node = index.leaf(seq)
        if not node:
            return 0
        if end > book.num_sealed * self.span:
            for rule in self._attention:
                start = book.num_sealed * rule.num_columns
                blocks = seq.tables[rule.index].blocks[start : rule.num_blocks(end)].tolist()
                for offset, block in enumerate(blocks):
                    if block:
                        index.publish_at(node, rule, offset, block)
        for rule in self._states:
            table = seq.tables[rule.index]
            if table.num_blocks:
                index.publish_state(node, rule, table.blocks)
        return node

    def _release(self, rule: GroupRule, blocks: Int32) -> None:
        if len(blocks) == 0:
            return
        if rule.is_state:
            self.pool.release_entry(blocks)
        else:
            self.pool.release(blocks)

    def release_run(self, blocks: Int32) -> None:
        """Release blocks that were held beside any table, states entry by entry."""
        if len(blocks) and int(blocks[0]) in self.index.state_entries:
            self.pool.release_entry(blocks)
        elif len(blocks):
            self.pool.release(blocks)
