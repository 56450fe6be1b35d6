"""The prefix index: sealed blocks by content.

Joins the pool (who holds a block) and the prefix tree (what it holds). Sealing is the one moment
at which a block gets a name: its span is hashed, an equal one that exists takes its place in the
table, or it is published itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

import numpy as np

from kvern.core.clock import Clock
from kvern.core.events import BlocksRemoved, BlocksStored, CacheCleared, EventBus
from kvern.core.ghosts import Ghosts
from kvern.core.hashing import CacheKey, hash_special, media_within
from kvern.core.hashing import as_columns as hash_columns
from kvern.core.pool import BlockPool
from kvern.core.replacement import Int64, make_queue
from kvern.core.rules import GroupRule
from kvern.core.sequence import Int32, Media, Sequence
from kvern.core.tree import Bool, PrefixTree


class PrefixIndex:
    """Finds, names and forgets sealed blocks.

    Attributes:
        rules: the KV groups.
        span: tokens per node.
        pool: the blocks.
        tree: the nodes.
        events: stored, removed, cleared.
        ghosts: when content was replaced or cleared.
        roots: the root node of every key in use.
        num_replaced: blocks replaced so far.
        num_cleared: blocks dropped by `clear` so far.
        num_deduplicated: sealed blocks that gave way to an equal one.
    """

    def __init__(
        self,
        num_blocks: int,
        rules: SequenceOf[GroupRule],
        span: int,
        clock: Clock,
        *,
        replacement: str = "lru",
        hash_bits: int = 128,
        secret: bytes = b"",
        max_state_pages: int | None = None,
    ) -> None:
        self.rules = tuple(rules)
        self.span = span
        num_columns = sum(rule.num_columns for rule in self.rules)
        self.tree = PrefixTree(num_blocks, span, num_columns)
        self.tree.on_root_removed(self._forget_root)
        self.pool = BlockPool(num_blocks, make_queue(replacement, num_blocks, self._chain_facts))
        self.pool.on_replace(self._forget)
        self.events = EventBus()
        self.ghosts = Ghosts(num_blocks)
        self.hash_bits = hash_bits
        self.num_replaced = 0
        self.num_cleared = 0
        self.num_deduplicated = 0
        self._clock = clock
        self._secret = secret
        self.roots: dict[CacheKey, int] = {}
        self._root_keys: dict[int, tuple[CacheKey, bytes]] = {}
        self.state_entries: OrderedDict[int, Int32] = OrderedDict()
        self.num_state_pages = 0
        self._max_state_pages = num_blocks if max_state_pages is None else max_state_pages
        self._group_of_column = [rule.index for rule in self.rules for _ in range(rule.num_columns)]

    # ---------------------------------------------------------------------------------- roots

    def root_hash(self, root: int) -> bytes:
        """Hash of the empty prefix of a root node."""
        return self._root_keys[root][1]

    def hold_root(self, key: CacheKey) -> int:
        """The root node of a key, with one more reference."""
        root = self.roots.get(key)
        if root is None:
            name = key.root_hash(self._secret)
            low, high = hash_columns(name, self.hash_bits)
            root = self.tree.add_root(int(low[0]), int(high[0]))
            self.roots[key] = root
            self._root_keys[root] = key, name
        self.tree.refs[root] += 1
        return root

    def release_node(self, node: int) -> None:
        """Drop a reference to a node; nodes that nothing needs any more go."""
        self.tree.refs[node] -= 1
        if self.tree.refs[node] == 0 and not self.tree.num_children[node]:
            self.tree.remove_idle(np.array([node], np.int32))

    def _forget_root(self, root: int) -> None:
        key, _ = self._root_keys.pop(root)
        del self.roots[key]

    # -------------------------------------------------------------------------------- sealing

    def seal(self, seq: Sequence, num_spans: int) -> None:
        """Name the sequence's spans up to `num_spans`."""
        book = seq.book
        first, count = book.num_sealed, num_spans - book.num_sealed
        book.hashes.extend(seq, self.span, num_spans)
        low, high = book.hashes.columns(first, num_spans, self.hash_bits)
        tokens = seq.token_ids(first * self.span, num_spans * self.span).reshape(count, self.span)
        known = self.tree.walk(book.last_node, low, high, tokens)
        known = self.with_equal_media(known, seq.request.media, first)
        nodes, num_known = known, len(known)
        if num_known < count:
            parent = int(known[-1]) if num_known else book.last_node
            rest = slice(num_known, count)
            nodes = self.tree.add_path(parent, low[rest], high[rest], tokens[rest])
            if seq.request.media:
                self._note_media(seq, nodes, first + num_known)
            nodes = np.concatenate((known, nodes))
        stored = np.zeros(count, np.bool_)
        for rule in self.rules:
            if not rule.is_state:
                self._name_blocks(seq, rule, nodes, num_known, stored)
        self._move(seq, int(nodes[-1]), num_spans)
        if self.events and stored.any():
            self._tell_stored(seq, first, stored)

    def seal_one_each(self, seqs: SequenceOf[Sequence]) -> None:
        """Name the next span of each of many sequences without media."""
        span, tree = self.span, self.tree
        count = len(seqs)
        hashes, parents = [], np.empty(count, np.int32)
        tokens = np.empty((count, span), np.int32)
        for place, seq in enumerate(seqs):
            book = seq.book
            done = book.num_sealed
            book.hashes.extend(seq, span, done + 1)
            hashes.append(book.hashes.at(done))
            parents[place] = book.last_node
            tokens[place] = seq.token_ids(done * span, (done + 1) * span)
        low, high = hash_columns(b"".join(hashes), self.hash_bits)
        nodes = tree.find(parents, low, high, tokens)
        if tree.media:
            nodes[[node in tree.media for node in nodes.tolist()]] = 0
        missing = np.flatnonzero(nodes == 0)
        if len(missing):
            fresh: dict[tuple[int, bytes], int] = {}
            for place in missing.tolist():
                twin = (int(parents[place]), tokens[place].tobytes())
                if twin not in fresh:
                    fresh[twin] = tree.add_child(
                        twin[0], int(low[place]), int(high[place]), tokens[place]
                    )
                nodes[place] = fresh[twin]
        for seq, node in zip(seqs, nodes.tolist(), strict=True):
            done = seq.book.num_sealed
            stored = np.zeros(1, np.bool_)
            for rule in self.rules:
                if not rule.is_state:
                    self._name_one(seq, rule, node, done, stored)
            self._move(seq, node, done + 1)
            if self.events and stored.any():
                self._tell_stored(seq, done, stored)

    def _name_blocks(
        self, seq: Sequence, rule: GroupRule, nodes: Int32, num_known: int, stored: Bool
    ) -> None:
        """Publish a run of blocks of one group, or put equal ones in their place."""
        first = seq.book.num_sealed
        table = seq.tables[rule.index]
        for offset in range(rule.num_columns):
            column = rule.first_column + offset
            places = np.arange(first, first + len(nodes)) * rule.num_columns + offset
            own = table.blocks[places]
            present = self.tree.blocks[nodes, column]
            present[num_known:] = 0
            vacant = (present == 0) & (own != 0)
            self.tree.blocks[nodes[vacant], column] = own[vacant]
            self.pool.publish(own[vacant], nodes[vacant], column)
            stored |= vacant
            twins = np.flatnonzero((present != 0) & (present != own) & (own != 0))
            if len(twins):
                self._swap(own[twins], present[twins])
                for place in twins.tolist():
                    table.replace(int(places[place]), int(present[place]))

    def _name_one(
        self, seq: Sequence, rule: GroupRule, node: int, span_index: int, stored: Bool
    ) -> None:
        table = seq.tables[rule.index]
        pool, blocks = self.pool, self.tree.blocks
        for offset in range(rule.num_columns):
            column = rule.first_column + offset
            place = span_index * rule.num_columns + offset
            own = table.blocks.item(place)
            present = blocks.item(node, column)
            if own == 0 or own == present:
                continue
            if present:
                self._swap(np.array([own], np.int32), np.array([present], np.int32))
                table.replace(place, present)
            else:
                blocks[node, column] = own
                pool.node[own] = node
                pool.column[own] = column
                pool.queue.stored(np.array([own], np.int32))
                stored[0] = True

    def _swap(self, own: Int32, present: Int32) -> None:
        self.pool.hold(present)
        self.pool.release(own)
        self.num_deduplicated += len(own)

    def _move(self, seq: Sequence, node: int, num_sealed: int) -> None:
        book = seq.book
        refs = self.tree.refs
        refs[node] += 1
        refs[book.last_node] -= 1
        book.last_node = node
        book.num_sealed = num_sealed

    def with_equal_media(self, nodes: Int32, media: tuple[Media, ...], first: int) -> Int32:
        """The leading nodes whose media are those of a sequence; the first is span `first`."""
        if not media and not self.tree.media:
            return nodes
        for place, node in enumerate(nodes.tolist()):
            start = (first + place) * self.span
            if self.tree.media.get(node, ()) != media_within(media, start, self.span):
                return nodes[:place]
        return nodes

    def _note_media(self, seq: Sequence, nodes: Int32, first: int) -> None:
        for place, node in enumerate(nodes.tolist()):
            start = (first + place) * self.span
            inside = media_within(seq.request.media, start, self.span)
            if inside:
                self.tree.media[node] = inside

    def _tell_stored(self, seq: Sequence, first: int, stored: Bool) -> None:
        hashes = seq.book.hashes
        start = first + int(np.argmax(stored))
        stop = first + len(stored) - int(np.argmax(stored[::-1]))
        self.events.publish(
            BlocksStored(
                hashes=tuple(hashes.at(i) for i in range(start, stop)),
                parent_hash=hashes.at(start - 1),
                token_ids=tuple(seq.token_ids(start * self.span, stop * self.span).tolist()),
                span_tokens=self.span,
            )
        )

    # ------------------------------------------------------------------------- partial leaves

    def leaf(self, seq: Sequence) -> int:
        """A node for what the sequence has computed behind its last whole span.

        The last node itself when there is nothing; 0 when a stored node already covers the
        tokens and the model has no states to keep.
        """
        book = seq.book
        start, end = book.num_sealed * self.span, seq.num_computed_tokens
        if end == start:
            return int(book.last_node)
        tokens = seq.token_ids(start, end)
        media = media_within(seq.request.media, start, end - start)
        parent_hash = book.hashes.at(book.num_sealed - 1)
        data = tokens.astype("<i4", copy=False).tobytes()
        name = hash_special(parent_hash, data, seq.request.media, start, end - start)
        low, high = (int(column[0]) for column in hash_columns(name, self.hash_bits))
        node = self.tree.find_partial(book.last_node, low, high, tokens)
        if node and self.tree.media.get(node, ()) == media:
            return node
        if not media and not self.has_states and self._is_covered(book.last_node, tokens):
            return 0
        return self.tree.add_child(book.last_node, low, high, tokens, media)

    @property
    def has_states(self) -> bool:
        """Whether any group holds states."""
        return any(rule.is_state for rule in self.rules)

    def _is_covered(self, parent: int, tokens: Int32) -> bool:
        nodes = self.tree.children(parent, 64)
        length = len(tokens)
        longer = nodes[self.tree.num_tokens[nodes] >= length]
        same = (self.tree.tokens[longer, :length] == tokens).all(axis=1)
        same &= self.tree.blocks[longer].all(axis=1)
        return any(node not in self.tree.media for node in longer[same].tolist())

    def publish_at(self, node: int, rule: GroupRule, offset: int, block: int) -> bool:
        """Give a held block of a partial leaf its name; False if the place is taken."""
        column = rule.first_column + offset
        if self.tree.blocks[node, column]:
            return False
        self.tree.blocks[node, column] = block
        one = np.array([block], np.int32)
        self.pool.publish(one, np.array([node], np.int32), column)
        return True

    # --------------------------------------------------------------------------------- states

    def publish_state(self, node: int, rule: GroupRule, pages: Int32) -> bool:
        """Keep the state behind a node in held pages; False if it is kept already or may not be."""
        column = rule.first_column
        if self.tree.blocks[node, column] or not self._make_room(len(pages)):
            return False
        first = int(pages[0])
        self.tree.blocks[node, column] = first
        self.pool.publish(pages, np.full(len(pages), node, np.int32), column)
        self.state_entries[first] = pages.copy()
        self.num_state_pages += len(pages)
        return True

    def state_pages(self, node: int, rule: GroupRule) -> Int32:
        """Pages of the state kept behind a node."""
        first = int(self.tree.blocks[node, rule.first_column])
        self.state_entries.move_to_end(first)
        return self.state_entries[first]

    def _make_room(self, num_pages: int) -> bool:
        """Keep the states within their budget, dropping the least recently used idle ones."""
        excess = self.num_state_pages + num_pages - self._max_state_pages
        if excess <= 0:
            return True
        idle = []
        for first, pages in self.state_entries.items():
            if excess <= 0:
                break
            if self.pool.refs[first] == 0:
                idle.append(first)
                excess -= len(pages)
        if excess > 0:
            return False
        for first in idle:
            self.drop(np.array([first], np.int32))
        return True

    # ------------------------------------------------------------------------------ forgetting

    def drop(self, blocks: Int32) -> None:
        """Give up cached blocks, and what falls with them."""
        self.pool.unpublish(np.concatenate((blocks, self._forget(blocks))))

    def clear(self) -> int:
        """Drop every block that nobody holds; returns how many."""
        pool = self.pool
        before = pool.num_cached
        idle = np.flatnonzero((pool.node != 0) & (pool.refs == 0)).astype(np.int32)
        if self.state_entries:
            pages = np.concatenate(list(self.state_entries.values()))
            firsts = np.array(list(self.state_entries), np.int32)
            idle = np.setdiff1d(idle, np.setdiff1d(pages, firsts)).astype(np.int32)
        if len(idle):
            more = self._forget(idle, is_cleared=True)
            self.pool.unpublish(np.concatenate((idle, more)))
        if self.events:
            self.events.publish(CacheCleared())
        return before

    def _forget(self, blocks: Int32, *, is_cleared: bool = False) -> Int32:
        """Unname blocks; returns the further pages of states among them."""
        tree, pool = self.tree, self.pool
        nodes, columns = pool.node[blocks], pool.column[blocks]
        tree.blocks[nodes, columns] = 0
        self.ghosts.remember(tree.hash_low[nodes], self._clock(), is_cleared=is_cleared)
        if is_cleared:
            self.num_cleared += len(blocks)
        else:
            self.num_replaced += len(blocks)
        if self.events:
            self._tell_removed(nodes, columns.tolist())
        more: list[Int32] = []
        if self.state_entries:
            for block in blocks.tolist():
                pages = self.state_entries.pop(block, None)
                if pages is not None:
                    more.append(pages[1:])
                    self.num_state_pages -= len(pages)
        tree.remove_idle(nodes)
        return np.concatenate(more) if more else np.zeros(0, np.int32)

    def _tell_removed(self, nodes: Int32, columns: list[int]) -> None:
        tree = self.tree
        by_group: dict[int, list[bytes]] = {}
        for node, column in zip(nodes.tolist(), columns, strict=True):
            if tree.num_tokens[node] < self.span:
                continue
            name = tree.hash_low[node].tobytes() + tree.hash_high[node].tobytes()
            by_group.setdefault(self._group_of_column[column], []).append(name)
        for group, hashes in by_group.items():
            self.events.publish(BlocksRemoved(tuple(hashes), group))

    def _chain_facts(self, blocks: Int32) -> tuple[Int64, Int32]:
        """Depth and parent block of published blocks."""
        nodes = self.pool.node[blocks]
        parents = self.tree.parent[nodes]
        return (
            self.tree.depth[nodes].astype(np.int64),
            self.tree.blocks[parents, self.pool.column[blocks]],
        )
