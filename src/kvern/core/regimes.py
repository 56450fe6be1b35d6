"""Position regimes: models whose rotations change when a sequence outgrows a border (longrope).

The reference for position `p` is a forward pass of exactly `p + 1` tokens, all of whose keys are in
one regime: short (0) up to `regime_border` tokens, long (1) beyond. So a sequence that is about to
compute position `regime_border` gives its blocks back, changes its cache key and is computed again,
from the first position or from what is stored in the long regime. One whose prompt is longer starts
long. The regime is part of the hash: blocks of one are never found by the other.

    short:  0 ......... border - 1 |
    long:   0 ......... border - 1 | border ....... end

Scoring a prompt beyond the border takes both passes: logits of positions before the border come
from the short one, later ones from the long one.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvern.core.book import SpanHashes
from kvern.core.plan import Chunk
from kvern.core.sequence import Request, Sequence
from kvern.core.state import SchedulerState

SHORT, LONG = 0, 1


def first_regime(state: SchedulerState, request: Request) -> int:
    """The regime in which a request's prompt is computed first."""
    border = state.config.regime_border
    if border is None or request.needs_all_logits or len(request.prompt) <= border:
        return SHORT
    return LONG


def cut_at_border(state: SchedulerState, seq: Sequence, start: int, length: int) -> int:
    """A chunk's length, such that a scored prompt has no chunk on both sides of the border."""
    border = state.config.regime_border
    if border is None or start >= border or not _is_scored(seq):
        return length
    return min(length, border - start)


def wants_all_logits(state: SchedulerState, seq: Sequence, end: int) -> bool:
    """Whether the logits of a chunk that ends at `end` are wanted: the long pass repeats some."""
    border = state.config.regime_border
    return _is_scored(seq) and not (border is not None and seq.regime == LONG and end <= border)


def cross_where_due(state: SchedulerState, chunks: Iterable[Chunk]) -> None:
    """Let every sequence of the chunks' requests that has outgrown its regime cross the border."""
    border = state.config.regime_border
    if border is None:
        return
    records = {id(chunk.seq.book.record): chunk.seq.book.record for chunk in chunks}
    for record in records.values():
        for seq in tuple(record.live):
            is_done = seq.num_computed_tokens >= border or not _is_scored(seq)
            if seq.regime == SHORT and seq.num_tokens > border and is_done:
                _cross(state, seq)


def _is_scored(seq: Sequence) -> bool:
    return seq.request.needs_all_logits and seq.num_generated_tokens == 0


def _cross(state: SchedulerState, seq: Sequence) -> None:
    """Give the blocks back and go on under the key of the long regime."""
    book, index = seq.book, state.index
    stays = state.config.no_cache or not book.is_running
    if not stays:
        state.stop(seq)
    state.residency.leave(seq)
    root = index.hold_root(state.key_of(seq.request, LONG))
    index.tree.refs[root] += 1  # as the last node
    index.tree.refs[book.last_node] -= 1
    index.release_node(book.root)
    book.root = book.last_node = root
    book.hashes = SpanHashes(index.root_hash(root))
    seq.regime = LONG
    if not state.config.no_cache:
        book.short_water, book.high_water = book.high_water, 0
    if not stays:
        state.enqueue(seq)
