"""Where what is stored parts from a prompt, under its own cache key and under others."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvern.core.book import SpanHashes
from kvern.core.hashing import CacheKey, as_columns, hash_spans
from kvern.core.matching import branch_lengths
from kvern.core.sequence import Int32, Sequence

if TYPE_CHECKING:
    from kvern.core.index import PrefixIndex
    from kvern.core.state import SchedulerState

MAX_KEYS = 32
"""Other cache keys that are tried, the newest."""

MAX_WALKS = 4
"""Other cache keys whose stored path is followed to its end."""

MAX_SHORT_BRANCHES = 16
"""Children per key that are compared with a prompt shorter than a span."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The stored run of tokens that shares most with a prompt.

    Attributes:
        num_tokens: leading prompt tokens that it shares.
        stored_token: what it holds at that place, None if it ends there.
    """

    num_tokens: int
    stored_token: int | None


def nearest_branch(index: PrefixIndex, seq: Sequence, path: Int32, root: int) -> Branch:
    """What is stored behind the longest stored path, token by token."""
    start = len(path) * index.span
    parent = int(path[-1]) if len(path) else root
    stop = min(start + index.span, seq.num_tokens)
    nodes, lengths = branch_lengths(index, seq, parent, start, stop)
    if len(nodes) == 0:
        return Branch(start, None)
    best = int(np.argmax(lengths))
    length = int(lengths[best])
    stored = None
    if length < index.tree.num_tokens[nodes[best]]:
        stored = int(index.tree.tokens[nodes[best], length])
    return Branch(start + length, stored)


def other_key(state: SchedulerState, seq: Sequence, least: int) -> tuple[int, tuple[str, ...]]:
    """The other cache key under which most of a prompt is stored.

    Args:
        state: the scheduler's state.
        seq: the prompt.
        least: tokens found under its own key; other keys count only with more.

    Returns:
        (leading prompt tokens stored there, fields in which it differs), or (0, ()).
    """
    index = state.index
    own = state.key_of(seq.request, seq.regime)
    keys = [key for key in list(index.roots)[-MAX_KEYS:] if key != own][::-1]
    if not keys:
        return 0, ()
    if seq.num_tokens < index.span:
        found = [(_short_length(index, seq, index.roots[key]), key) for key in keys]
    else:
        held = _with_first_span(index, seq, keys)[:MAX_WALKS]
        found = [(_stored_length(index, seq, index.roots[key]), key) for key in held]
    length, key = max(found, key=lambda item: item[0], default=(0, own))
    return (length, key.differences(own)) if length > least else (0, ())


def _short_length(index: PrefixIndex, seq: Sequence, root: int) -> int:
    """Tokens of a prompt shorter than a span that the children of a root share with it."""
    if not index.tree.first_child[root]:
        return 0
    _, lengths = branch_lengths(index, seq, root, 0, seq.num_tokens, MAX_SHORT_BRANCHES)
    return int(lengths.max(initial=0))


def _with_first_span(
    index: PrefixIndex, seq: Sequence, keys: SequenceOf[CacheKey]
) -> list[CacheKey]:
    """The keys under which the prompt's first span is stored."""
    tokens = seq.token_ids(0, index.span)
    roots = np.array([index.roots[key] for key in keys], np.int32)
    names = (
        hash_spans(index.root_hash(root), tokens, index.span, seq.request.media, 0)
        for root in roots.tolist()
    )
    low, high = as_columns(b"".join(names), index.hash_bits)
    found = index.tree.find(roots, low, high, np.broadcast_to(tokens, (len(keys), index.span)))
    return [keys[place] for place in np.flatnonzero(found).tolist()]


def _stored_length(index: PrefixIndex, seq: Sequence, root: int) -> int:
    """Leading prompt tokens stored under a root."""
    span = index.span
    count = seq.num_tokens // span
    hashes = SpanHashes(index.root_hash(root))
    hashes.extend(seq, span, count)
    tokens = seq.token_ids(0, count * span).reshape(count, span)
    path = index.tree.walk(root, *hashes.columns(0, count, index.hash_bits), tokens)
    path = index.with_equal_media(path, seq.request.media, 0)
    return nearest_branch(index, seq, path, root).num_tokens
