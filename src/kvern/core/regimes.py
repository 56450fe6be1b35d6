"""Position regimes: models whose rotations change with a sequence's length (longrope, dynamic NTK).

The reference for position `p` is a forward pass of exactly `p + 1` tokens, all of whose keys are in
that length's regime (`kvern.spec.regimes`). So a sequence that has outgrown its regime gives its blocks
back, changes its cache key and is computed again, from the first position or from what is stored in
the new regime. One whose prompt is longer than the border starts in its own. The regime is part of the
hash: blocks of one are never found by another.

    longrope      0 ......... border - 1 |                         one crossing
                  0 ......... border - 1 | border ........ end
    dynamic NTK   0 ......... border - 1 |                         one crossing per token
                  0 ......... border - 1 | border
                  0 ......... border - 1 | border | border + 1

Scoring a prompt beyond the border takes a pass per regime, and each position's logits come from the
regime of the length that ends with it.

What an answer computes in a regime that it soon leaves again (`PositionRegimes.is_brief`) is not
published: nobody but an exact repetition could find it, and it would push out what others can.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvern.core.book import SpanHashes
from kvern.core.plan import Chunk
from kvern.core.sequence import Request, Sequence
from kvern.core.state import SchedulerState
from kvern.spec.regimes import PositionRegimes


def first_regime(state: SchedulerState, request: Request) -> int:
    """The regime in which a request's prompt is computed first."""
    regimes = state.config.regimes
    if regimes is None or request.needs_all_logits:
        return 0
    return regimes.of(len(request.prompt))


def cut_at_border(state: SchedulerState, seq: Sequence, start: int, length: int) -> int:
    """A chunk's length, such that all or none of the logits of a scored prompt's chunk are its regime's."""
    regimes = state.config.regimes
    if regimes is None or not _is_scored(seq):
        return length
    first, last = regimes.first_own(seq.regime), regimes.last(seq.regime)
    if start < first:
        return min(length, first - start)
    return length if last is None else min(length, last - start)


def wants_all_logits(state: SchedulerState, seq: Sequence, end: int) -> bool:
    """Whether the logits of a chunk that ends at `end` are wanted: a later pass repeats some."""
    regimes = state.config.regimes
    return _is_scored(seq) and (regimes is None or end > regimes.first_own(seq.regime))


def cross_where_due(state: SchedulerState, chunks: Iterable[Chunk]) -> None:
    """Let every sequence of the chunks' requests that has outgrown its regime go on in its own."""
    regimes = state.config.regimes
    if regimes is None:
        return
    records = {id(chunk.seq.book.record): chunk.seq.book.record for chunk in chunks}
    for record in records.values():
        for seq in tuple(record.live):
            last = regimes.last(seq.regime)
            if last is None or seq.num_tokens <= last:
                continue
            if not _is_scored(seq):
                _cross(state, regimes, seq, regimes.of(seq.num_tokens))
            elif seq.num_computed_tokens >= last:
                _cross(state, regimes, seq, seq.regime + 1)


def _is_scored(seq: Sequence) -> bool:
    return seq.request.needs_all_logits and seq.num_generated_tokens == 0


def _cross(state: SchedulerState, regimes: PositionRegimes, seq: Sequence, regime: int) -> None:
    """Give the blocks back and go on under the key of another regime."""
    book, index = seq.book, state.index
    stays = state.config.no_cache or not book.is_running
    if not stays:
        state.stop(seq)
    state.residency.leave(seq)
    root = index.hold_root(state.key_of(seq.request, regime))
    index.tree.refs[root] += 1  # as the last node
    index.tree.refs[book.last_node] -= 1
    index.release_node(book.root)
    book.root = book.last_node = root
    book.hashes = SpanHashes(index.root_hash(root))
    book.is_private = regimes.is_brief
    book.waits_for = None
    seq.regime = regime
    if not state.config.no_cache:
        book.short_water, book.high_water = max(book.high_water, book.short_water), 0
    if not stays:
        state.enqueue(seq)
