"""How much of a prompt is in the cache: the longest prefix that every group can continue from.

1. Walk the tree: the longest stored path of whole spans.
2. Shrink to a fixed point: a length n is a hit only if every group holds every block of
   `reach.live(n)`, and every state group the state behind n.
3. Look into the next span for a part to copy: the stored child with the longest equal beginning.

The last token of what is asked for is never part of a hit: its logits must be computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvern.core.index import PrefixIndex
from kvern.core.rules import GroupRule
from kvern.core.sequence import Int32, Sequence
from kvern.core.tree import Bool

MAX_BRANCHES = 256
"""Children that are compared when looking for a partial match; newer ones first."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a sequence can take from the cache.

    Attributes:
        path: nodes of the longest stored path, int32; the hit may be shorter.
        num_spans: whole spans of the hit.
        tail_node: node to copy the beginning of the next span from, or 0.
        tail_tokens: tokens to copy from it.
        span: tokens per span.
        limit: the longest hit allowed.
        lacking: the group that kept the hit from covering the path: "window", "state" or "".
        uncopyable_tokens: tokens of the next span that are stored in a form that cannot be copied.
    """

    path: Int32
    num_spans: int
    tail_node: int
    tail_tokens: int
    span: int
    limit: int
    lacking: str = ""
    uncopyable_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed."""
        return self.num_spans * self.span + self.tail_tokens

    @property
    def nodes(self) -> Int32:
        """Nodes of the hit's whole spans."""
        return self.path[: self.num_spans]


def no_match(span: int, limit: int) -> Match:
    """A hit of nothing."""
    return Match(np.zeros(0, np.int32), 0, 0, 0, span, limit)


def match(index: PrefixIndex, seq: Sequence) -> Match:
    """The longest hit for a sequence that holds no blocks."""
    span, book = index.span, seq.book
    limit = seq.num_tokens - 1
    num_whole = seq.num_tokens // span
    book.hashes.extend(seq, span, num_whole)
    path = np.zeros(0, np.int32)
    if num_whole:
        low, high = book.hashes.columns(0, num_whole, index.hash_bits)
        tokens = seq.token_ids(0, num_whole * span).reshape(num_whole, span)
        path = index.tree.walk(book.root, low, high, tokens)
        path = index.with_equal_media(path, seq.request.media, 0)
    most = min(len(path), limit // span)
    by_attention, lacking = _fixed_point(index, path, most, with_states=False)
    tail, num_tail, uncopyable = _tail(index, seq, path, by_attention, limit)
    if tail or not index.has_states:
        return Match(path, by_attention, tail, num_tail, span, limit, lacking, uncopyable)
    num_spans, by_state = _fixed_point(index, path, by_attention, with_states=True)
    return Match(path, num_spans, 0, 0, span, limit, by_state or lacking)


def _fixed_point(
    index: PrefixIndex, path: Int32, most: int, *, with_states: bool
) -> tuple[int, str]:
    """The most whole spans that every group can continue from, and what kept it from more."""
    blocks = index.tree.blocks[path[:most]]
    held = [
        (rule, (blocks[:, rule.first_column : rule.first_column + rule.num_columns] != 0).ravel())
        for rule in index.rules
        if with_states or not rule.is_state
    ]
    num_spans, lacking = most, ""
    while True:
        before = num_spans
        for rule, present in held:
            longest = _longest(rule, present, num_spans, index.span)
            if longest < num_spans:
                lacking = "state" if rule.is_state else "window"
                num_spans = longest
        if num_spans == before:
            return num_spans, lacking


def _longest(rule: GroupRule, present: Bool, num_spans: int, span: int) -> int:
    """The most spans up to `num_spans` for which one group holds what it needs."""
    if rule.is_state:
        kept = np.flatnonzero(present[:num_spans])
        return int(kept[-1]) + 1 if len(kept) else 0
    missing = np.flatnonzero(~present[: num_spans * rule.num_columns])
    while num_spans and len(missing):
        head, first = rule.kept(num_spans * span)
        place = int(missing[0])
        if place >= head:
            later = int(np.searchsorted(missing, first))
            if later == len(missing):
                break
            place = int(missing[later])
        num_spans = place * rule.block_size // span
        missing = missing[: np.searchsorted(missing, num_spans * rule.num_columns)]
    return num_spans


def _tail(
    index: PrefixIndex, seq: Sequence, path: Int32, num_spans: int, limit: int
) -> tuple[int, int, int]:
    """Where to copy the beginning of the next span from.

    Returns:
        (node, tokens to copy, tokens that could have been copied in another stored form).
    """
    tree, span = index.tree, index.span
    start = num_spans * span
    parent = int(path[num_spans - 1]) if num_spans else seq.book.root
    nodes, lengths = branch_lengths(index, seq, parent, start, min(limit, start + span))
    if num_spans < len(path):  # may be older than the newest MAX_BRANCHES
        nodes = np.append(nodes, path[num_spans])
        lengths = np.append(lengths, min(limit - start, span))
    order = np.argsort(-lengths, kind="stable")
    for node, length in zip(nodes[order].tolist(), lengths[order].tolist(), strict=True):
        if length < 1:
            break
        if index.has_states and not (tree.num_tokens[node] == length and _has_states(index, node)):
            continue
        if not _holds(index, node, length):
            continue
        if not all(rule.copies_exactly for rule in index.rules):
            return 0, 0, length
        return node, length, 0
    return 0, 0, 0


def branch_lengths(
    index: PrefixIndex,
    seq: Sequence,
    parent: int,
    start: int,
    stop: int,
    limit: int = MAX_BRANCHES,
) -> tuple[Int32, Int32]:
    """Children of a node, and how many tokens each shares with the sequence from `start` on."""
    tree = index.tree
    nodes = tree.children(parent, limit)
    if stop <= start or len(nodes) == 0:
        return nodes, np.zeros(len(nodes), np.int32)
    wanted = seq.token_ids(start, stop)
    length = len(wanted)
    equal = tree.tokens[nodes, :length] == wanted
    lengths = np.where(equal.all(axis=1), length, equal.argmin(axis=1))
    lengths = np.minimum(lengths, tree.num_tokens[nodes]).astype(np.int32)
    own = [item.start - start for item in seq.request.media if start <= item.start < stop]
    if own or tree.media:
        for place, node in enumerate(nodes.tolist()):
            others = [item.start - start for item in tree.media.get(node, ())]
            lengths[place] = min([lengths.item(place), *own, *others])
    return nodes, lengths


def _has_states(index: PrefixIndex, node: int) -> bool:
    return all(index.tree.blocks[node, r.first_column] for r in index.rules if r.is_state)


def _holds(index: PrefixIndex, node: int, length: int) -> bool:
    """Whether a node has the blocks of its first `length` tokens in every attention group."""
    blocks = index.tree.blocks[node]
    for rule in index.rules:
        if not rule.is_state:
            wanted = rule.num_blocks(length)
            if not blocks[rule.first_column : rule.first_column + wanted].all():
                return False
    return True
