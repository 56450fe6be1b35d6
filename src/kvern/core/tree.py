"""The prefix tree: which runs of tokens have blocks, as numpy columns.

A node is one span of tokens behind its parent's; its identity is the whole path from its root, and
a root stands for a `CacheKey`. Nodes are found by hash through chained buckets and then verified:
parent, token ids and media must be equal, so a colliding hash is only a slow miss. A node lives as
long as it has blocks, children or references; its parents live at least as long.

    buckets[hash & mask] -> node -> bucket_next -> ... -> 0
    first_child[parent]  -> node <-> sibling     -> ... -> 0      (newest first)

About 100 bytes per node beside its 4 * span bytes of token ids.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvern.core.hashing import UInt64
from kvern.core.sequence import Int32, Media

Bool = npt.NDArray[np.bool_]


class PrefixTree:
    """Columns of nodes; node 0 is none.

    Attributes:
        parent: int32; 0 for a root.
        tokens: token ids, int32 `[capacity, span]`, the first `num_tokens[node]` valid.
        num_tokens: tokens of the node, less than `span` in a partial leaf, 0 in a root.
        depth: spans before this one; -1 in a root.
        refs: users that are not blocks or children (sequences writing behind the node).
        num_children: children.
        blocks: block per column, int32 `[capacity, num_columns]`, 0 for none.
        media: media that begin in a node, for the few that have any.
        num_nodes: nodes alive, roots included.
        num_collisions: nodes passed over because they only shared the hash.
    """

    def __init__(self, capacity: int, span: int, num_columns: int) -> None:
        self.span = span
        self._capacity = capacity + 1
        size = self._capacity
        self.hash_low: UInt64 = np.zeros(size, np.uint64)
        self.hash_high: UInt64 = np.zeros(size, np.uint64)
        self.parent: Int32 = np.zeros(size, np.int32)
        self.first_child: Int32 = np.zeros(size, np.int32)
        self.next_sibling: Int32 = np.zeros(size, np.int32)
        self.previous_sibling: Int32 = np.zeros(size, np.int32)
        self.bucket_next: Int32 = np.zeros(size, np.int32)
        self.tokens: Int32 = np.zeros((size, span), np.int32)
        self.num_tokens: Int32 = np.zeros(size, np.int32)
        self.depth: Int32 = np.zeros(size, np.int32)
        self.refs: Int32 = np.zeros(size, np.int32)
        self.num_children: Int32 = np.zeros(size, np.int32)
        self.blocks: Int32 = np.zeros((size, num_columns), np.int32)
        self.is_alive: Bool = np.zeros(size, np.bool_)
        self.media: dict[int, tuple[Media, ...]] = {}
        self._buckets: Int32 = np.zeros(1 << max(4, (capacity - 1).bit_length()), np.int32)
        self._mask = np.uint64(len(self._buckets) - 1)
        self._free: Int32 = np.zeros(size, np.int32)
        self._num_free = 0
        self._next_unused = 1
        self.num_nodes = 0
        self.num_collisions = 0
        self._root_removed: Callable[[int], None] | None = None

    def on_root_removed(self, forget: Callable[[int], None]) -> None:
        """Register who is told that a root is gone."""
        self._root_removed = forget

    # -------------------------------------------------------------------------------- finding

    def find(self, parents: Int32, low: UInt64, high: UInt64, tokens: Int32) -> Int32:
        """The whole-span child of each parent with these tokens, 0 where there is none.

        Args:
            parents: int32 `[k]`, nodes.
            low: hash column, uint64 `[k]`.
            high: hash column, uint64 `[k]`.
            tokens: int32 `[k, span]`.
        """
        nodes: Int32 = self._buckets[low & self._mask]
        pending = np.flatnonzero(nodes)
        while len(pending):
            found = nodes[pending]
            same = (self.hash_low[found] == low[pending]) & (self.hash_high[found] == high[pending])
            equal = same & (self.parent[found] == parents[pending])
            equal &= (self.tokens[found] == tokens[pending]).all(axis=1)
            equal &= self.num_tokens[found] == self.span
            self.num_collisions += int(np.count_nonzero(same & ~equal))
            pending = pending[~equal]
            nodes[pending] = self.bucket_next[nodes[pending]]
            pending = pending[nodes[pending] != 0]
        return nodes

    def walk(self, start: int, low: UInt64, high: UInt64, tokens: Int32) -> Int32:
        """The nodes of the longest known path behind `start`.

        Candidates are looked up by hash for all spans at once, then verified against each other.
        """
        matched: list[Int32] = []
        done, batch = 0, 64
        while done < len(low):
            stop = min(done + batch, len(low))
            nodes = self._walk_batch(start, low[done:stop], high[done:stop], tokens[done:stop])
            matched.append(nodes)
            done += len(nodes)
            if done < stop:
                break
            start = int(nodes[-1])
            batch = 8192
        return np.concatenate(matched) if matched else np.zeros(0, np.int32)

    def _walk_batch(self, start: int, low: UInt64, high: UInt64, tokens: Int32) -> Int32:
        nodes: Int32 = self._buckets[low & self._mask]
        pending = np.flatnonzero(nodes)
        while len(pending):
            found = nodes[pending]
            other = self.hash_low[found] != low[pending]
            other |= self.hash_high[found] != high[pending]
            pending = pending[other]
            nodes[pending] = self.bucket_next[nodes[pending]]
            pending = pending[nodes[pending] != 0]
        parents = np.empty_like(nodes)
        parents[0] = start
        parents[1:] = nodes[:-1]
        wrong = (nodes == 0) | (self.parent[nodes] != parents)
        wrong |= self.num_tokens[nodes] != self.span
        good = int(wrong.argmax()) if wrong.any() else len(nodes)
        differs = (self.tokens[nodes[:good]] != tokens[:good]).any(axis=1)
        if differs.any():
            good = int(differs.argmax())
        while good < len(nodes) and nodes[good]:  # another node has the same hash: look behind it
            parent = int(nodes[good - 1]) if good else start
            one = slice(good, good + 1)
            nodes[one] = self.find(np.array([parent], np.int32), low[one], high[one], tokens[one])
            if nodes[good] == 0:
                break
            good += 1
        return nodes[:good]

    def children(self, parent: int, limit: int) -> Int32:
        """Up to `limit` children of a node, newest first."""
        found: list[int] = []
        child = self.first_child.item(parent)
        while child and len(found) < limit:
            found.append(child)
            child = self.next_sibling.item(child)
        return np.array(found, np.int32)

    def find_partial(self, parent: int, low: int, high: int, tokens: Int32) -> int:
        """The partial leaf of a parent with exactly these tokens, or 0."""
        node = self._buckets.item(low & int(self._mask))
        while node:
            if (
                self.hash_low.item(node) == low
                and self.hash_high.item(node) == high
                and self.parent.item(node) == parent
                and self.num_tokens.item(node) == len(tokens)
                and bool((self.tokens[node, : len(tokens)] == tokens).all())
            ):
                return node
            node = self.bucket_next.item(node)
        return 0

    # ------------------------------------------------------------------------------- growing

    def add_root(self, low: int, high: int) -> int:
        """A new root; it stays as long as it has children or references."""
        node = int(self._take(1)[0])
        self._set(node, 0, low, high, -1, 0)
        return node

    def add_child(
        self, parent: int, low: int, high: int, tokens: Int32, media: tuple[Media, ...] = ()
    ) -> int:
        """A new child, whole or partial."""
        node = int(self._take(1)[0])
        self.tokens[node, : len(tokens)] = tokens
        self._set(node, parent, low, high, self.depth.item(parent) + 1, len(tokens))
        self._link(node, parent)
        if media:
            self.media[node] = media
        return node

    def add_path(self, parent: int, low: UInt64, high: UInt64, tokens: Int32) -> Int32:
        """New whole-span nodes, each the child of the one before, the first of `parent`."""
        count = len(low)
        nodes = self._take(count)
        self.hash_low[nodes] = low
        self.hash_high[nodes] = high
        self.tokens[nodes] = tokens
        self.num_tokens[nodes] = self.span
        depth = self.depth.item(parent) + 1
        self.depth[nodes] = np.arange(depth, depth + count)
        self.refs[nodes] = 0
        self.next_sibling[nodes] = 0
        self.previous_sibling[nodes] = 0
        self.parent[nodes[1:]] = nodes[:-1]
        self.first_child[nodes[:-1]] = nodes[1:]
        self.num_children[nodes] = 1
        last = nodes[-1]
        self.first_child[last] = 0
        self.num_children[last] = 0
        self.is_alive[nodes] = True
        self._link(int(nodes[0]), parent)
        self._chain(nodes, low)
        return nodes

    def _set(self, node: int, parent: int, low: int, high: int, depth: int, length: int) -> None:
        self.hash_low[node] = low
        self.hash_high[node] = high
        self.parent[node] = parent
        self.first_child[node] = 0
        self.next_sibling[node] = 0
        self.previous_sibling[node] = 0
        self.num_tokens[node] = length
        self.depth[node] = depth
        self.refs[node] = 0
        self.num_children[node] = 0
        self.is_alive[node] = True
        bucket = low & int(self._mask)
        self.bucket_next[node] = self._buckets[bucket]
        self._buckets[bucket] = node

    def _link(self, node: int, parent: int) -> None:
        head = self.first_child.item(parent)
        self.parent[node] = parent
        self.next_sibling[node] = head
        self.previous_sibling[node] = 0
        if head:
            self.previous_sibling[head] = node
        self.first_child[parent] = node
        self.num_children[parent] += 1

    def _chain(self, nodes: Int32, low: UInt64) -> None:
        """Put many nodes in front of their buckets, several in one bucket one behind another."""
        buckets = (low & self._mask).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        buckets, nodes = buckets[order], nodes[order]
        is_last = np.empty(len(nodes), np.bool_)
        is_last[-1] = True
        np.not_equal(buckets[1:], buckets[:-1], out=is_last[:-1])
        is_first = np.empty(len(nodes), np.bool_)
        is_first[0] = True
        is_first[1:] = is_last[:-1]
        following = np.empty_like(nodes)
        following[:-1] = nodes[1:]
        following[is_last] = self._buckets[buckets[is_last]]
        self.bucket_next[nodes] = following
        self._buckets[buckets[is_first]] = nodes[is_first]

    def _take(self, count: int) -> Int32:
        reused = min(count, self._num_free)
        self._num_free -= reused
        nodes = self._free[self._num_free : self._num_free + reused].copy()
        if reused < count:
            fresh = count - reused
            self._reserve(self._next_unused + fresh)
            start = self._next_unused
            self._next_unused += fresh
            nodes = np.concatenate((nodes, np.arange(start, start + fresh, dtype=np.int32)))
        self.num_nodes += count
        return nodes

    def _reserve(self, size: int) -> None:
        """Grow the columns: only models without a full-reach group keep nodes without blocks."""
        if size <= self._capacity:
            return
        self._capacity = max(size, 2 * self._capacity)
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray) and name != "_buckets":
                grown = np.zeros((self._capacity, *column.shape[1:]), column.dtype)
                grown[: len(column)] = column
                setattr(self, name, grown)

    # ------------------------------------------------------------------------------- removing

    def remove_idle(self, nodes: Int32) -> None:
        """Remove those of the nodes that have no blocks, references or other children.

        Parents that thereby become idle go too, roots included.
        """
        idle = nodes[
            self.is_alive[nodes] & (self.refs[nodes] == 0) & ~self.blocks[nodes].any(axis=1)
        ]
        idle = idle[idle != 0]
        if len(idle) > 1:
            idle = np.unique(idle)
        idle = self._without_other_children(idle)
        while len(idle):
            idle = self._remove(idle)

    def _without_other_children(self, nodes: Int32) -> Int32:
        """The largest subset whose children all lie in the subset."""
        while len(nodes):
            going = np.zeros(0, np.int32)
            parents, counts = np.unique(self.parent[nodes], return_counts=True)
            places = np.searchsorted(parents, nodes).clip(max=len(parents) - 1)
            going = np.where(parents[places] == nodes, counts[places], 0)
            stays = self.num_children[nodes] > going
            if not stays.any():
                break
            nodes = nodes[~stays]
        return nodes

    def _remove(self, nodes: Int32) -> Int32:
        """Remove nodes and return the parents that are idle now."""
        self.is_alive[nodes] = False
        parents = self.parent[nodes]
        tops = nodes[self.is_alive[parents] & (parents != 0)]
        for node in tops.tolist():
            self._unlink(node)
        self._unchain(nodes)
        if self.media:
            for node in nodes.tolist():
                self.media.pop(node, None)
        if self._root_removed is not None:
            for root in nodes[parents == 0].tolist():
                self._root_removed(root)
        end = self._num_free + len(nodes)
        self._free[self._num_free : end] = nodes
        self._num_free = end
        self.num_nodes -= len(nodes)
        above = np.unique(self.parent[tops])
        is_idle = (self.refs[above] == 0) & (self.num_children[above] == 0)
        idle: Int32 = above[is_idle & ~self.blocks[above].any(axis=1)]
        return idle

    def _unlink(self, node: int) -> None:
        parent = self.parent.item(node)
        following = self.next_sibling.item(node)
        before = self.previous_sibling.item(node)
        if before:
            self.next_sibling[before] = following
        else:
            self.first_child[parent] = following
        if following:
            self.previous_sibling[following] = before
        self.num_children[parent] -= 1

    def _unchain(self, nodes: Int32) -> None:
        """Take dead nodes out of their buckets, walking all affected buckets in step."""
        buckets = (self.hash_low[nodes] & self._mask).astype(np.int64)  # twins do the same twice
        heads = self._buckets[buckets]
        while True:
            dead = (heads != 0) & ~self.is_alive[heads]
            if not dead.any():
                break
            heads[dead] = self.bucket_next[heads[dead]]
        self._buckets[buckets] = heads
        before = heads[heads != 0]
        while len(before):
            following = self.bucket_next[before]
            dead = (following != 0) & ~self.is_alive[following]
            self.bucket_next[before[dead]] = self.bucket_next[following[dead]]
            before = np.where(dead, before, following)
            before = before[before != 0]
