"""Which waiting sequences start.

By rank: priority, then arrival. A sequence starts when there is a seat, a token of budget, and room
for all its present tokens. One whose prefix a running sequence is computing waits for that instead.
One at the head that does not fit holds the others up for `max_head_of_line_wait_steps` steps, then
they pass it. When that has gone on for long and the running sequences of lower rank hold what it
lacks, they make way for it, one per step, and nobody passes until it has started. While sequences
of higher rank hold it, others go on passing: holding them up would not help it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvern.core.config import STARVATION_FACTOR
from kvern.core.matching import Match, match, no_match
from kvern.core.miss import explain
from kvern.core.plan import RequestStarted
from kvern.core.planner import extend, lowest_below, share, withdraw
from kvern.core.regimes import cut_at_border
from kvern.core.sequence import Int32, Sequence
from kvern.core.state import Draft, SchedulerState, rank_of

GROWTH_TOKENS = 32
"""Tokens by which every running sequence must be able to grow before another one starts.

Under overload, 0 makes a third to a half of all computed tokens recomputed ones; 32 a tenth at the
same number of steps; 128 next to none, with up to a tenth more steps.
"""

GROWTH_SHARE = 64
"""That room is at most this part of the pool, so that a tiny pool is not all reserve."""

NO_BLOCKS: Int32 = np.zeros(0, np.int32)

MAX_FAILURES = 16
"""Waiting sequences that may be looked up in vain per step; the others have to wait for the next."""


def admit(state: SchedulerState, draft: Draft) -> None:
    """Start waiting sequences while seats, budget and room last."""
    head: Sequence | None = None
    num_failures = 0
    patience = state.config.max_head_of_line_wait_steps
    for seq in tuple(state.waiting):
        if draft.budget <= 0 or num_failures >= MAX_FAILURES:
            break
        if seq.book.beam_delivered or is_waiting_for_another(seq):
            continue
        if _has_seat(state) and _try_start(state, draft, seq):
            continue
        if _start_instead_of_sibling(state, draft, seq):
            continue
        num_failures += 1
        if seq.book.waits_for is not None:
            continue
        if head is None:
            seq.book.blocked_steps += 1
            may_claim = _may_claim(state, seq)
            if not (may_claim and _make_way(state, draft, seq)):
                head = seq
                if may_claim or seq.book.blocked_steps <= patience:
                    break
        if not _has_seat(state):
            break


def _has_seat(state: SchedulerState) -> bool:
    seats = min(state.config.max_num_seqs, state.config.max_num_batched_tokens)
    return len(state.running) < seats


def _start_instead_of_sibling(state: SchedulerState, draft: Draft, seq: Sequence) -> bool:
    """Start a beam in place of beams of the same search that only wait for it."""
    if not seq.request.beam_width or seq.book.waits_for is not None:
        return False
    while (other := lowest_below(state, draft, seq)) is not None and other.book.beam_delivered:
        state.preempt(other)
        draft.headroom = None
        if _has_seat(state) and _try_start(state, draft, seq):
            return True
    return False


def _make_way(state: SchedulerState, draft: Draft, head: Sequence) -> bool:
    """Preempt one sequence for a head that may claim its room; says whether the head has started."""
    victim = lowest_below(state, draft, head)
    if victim is None:
        return False
    withdraw(draft, victim)
    state.preempt(victim)
    draft.headroom = None
    return _has_seat(state) and _try_start(state, draft, head)


def _may_claim(state: SchedulerState, head: Sequence) -> bool:
    """Whether the head has waited too long and would fit if all below its rank gave way."""
    limit = STARVATION_FACTOR * max(state.config.max_head_of_line_wait_steps, 1)
    if head.book.blocked_steps <= limit:
        return False
    rank = rank_of(head)
    above = [seq for seq in state.running if rank_of(seq) < rank]
    below = state.running[len(above) :]
    seats = min(state.config.max_num_seqs, state.config.max_num_batched_tokens)
    if len(above) >= seats or (above and not below):
        return False
    if not above:
        return True
    found = _look_up(state, head)
    pages = [table.blocks for seq in below for table in seq.tables]
    held, counts = np.unique(np.concatenate(pages or [NO_BLOCKS]), return_counts=True)
    freed = held[(state.pool.refs[held] == counts) & (held != 0)]
    wanted = np.concatenate(
        [*state.residency.hit_blocks(found), *state.residency.source_blocks(found)]
    )
    num_freed = len(np.setdiff1d(freed, wanted))
    growth = sum(_growth(state, seq) for seq in above)
    return _pages_to_start(state, head, found) + growth <= state.pool.num_available + num_freed


def is_waiting_for_another(seq: Sequence) -> bool:
    """Whether a running sequence is still computing what this one waits for."""
    waits_for = seq.book.waits_for
    if waits_for is None:
        return False
    other, length = waits_for
    is_computing = other.book.is_running and other.book.root == seq.book.root
    if is_computing and other.num_computed_tokens < length:
        return True
    seq.book.waits_for = None
    return False


def _try_start(state: SchedulerState, draft: Draft, seq: Sequence) -> bool:
    """Start a sequence from its longest hit if there is room for all its tokens."""
    found = _look_up(state, seq)
    if state.config.shares and not _takes_no_hit(seq):
        other = _provider(state, seq, found)
        if other is not None:
            seq.book.waits_for = other
            return False
    full = found
    while not _fits(state, draft, seq, found):
        if found.tail_node:
            found = replace(found, tail_node=0, tail_tokens=0)
            if state.index.has_states:
                found = no_match(found.span, found.limit)
        elif not state.running and found.num_tokens:
            found = no_match(found.span, found.limit)
        elif state.running or not state.expire_pins(everything=True):
            return False
    _start(state, draft, seq, full, found)
    return True


def _look_up(state: SchedulerState, seq: Sequence) -> Match:
    if not state.config.shares or _takes_no_hit(seq):
        return no_match(state.index.span, seq.num_tokens - 1)
    return match(state.index, seq)


def _takes_no_hit(seq: Sequence) -> bool:
    request = seq.request
    return (request.needs_all_logits or request.ignore_cache) and seq.num_generated_tokens == 0


def _fits(state: SchedulerState, draft: Draft, seq: Sequence, found: Match) -> bool:
    """Whether the pool can hold the hit and room for the sequence's present tokens.

    The running sequences must keep room to grow, else they would soon preempt each other.
    Groups of limited reach need room for one token at first; their chunks are cut to what is left.
    """
    if draft.headroom is None:
        draft.headroom = sum(_growth(state, other) for other in state.running)
    return _pages_to_start(state, seq, found) + draft.headroom <= state.pool.num_available


def _pages_to_start(state: SchedulerState, seq: Sequence, found: Match) -> int:
    """Available pages that a start from a hit takes: fresh ones, and cached ones that it finds."""
    residency, pool = state.residency, state.pool
    blocks = [run[run != 0] for run in residency.hit_blocks(found)]
    idle = sum(pool.num_idle(run) for run in (*blocks, *residency.source_blocks(found)))
    needed = 0
    start = found.num_spans * found.span
    for rule in state.rules:
        if rule.is_state:
            needed += rule.pages_per_entry
            continue
        end = seq.num_tokens if rule.is_full else found.num_tokens + 1
        needed += rule.num_blocks(end) - start // rule.block_size
    return needed + idle


def _growth(state: SchedulerState, seq: Sequence) -> int:
    """Pages that a running sequence takes to grow by what is kept for it."""
    pool_tokens = (state.pool.num_blocks - 1) * state.index.span
    growth = min(GROWTH_TOKENS, pool_tokens // GROWTH_SHARE)
    longest = seq.num_prompt_tokens + seq.book.record.max_tokens - 1
    length = min(seq.num_tokens + growth, longest)
    return sum(
        max(rule.num_blocks(length) - seq.tables[rule.index].num_blocks, 0)
        for rule in state.rules
        if rule.is_full
    )


def _start(state: SchedulerState, draft: Draft, seq: Sequence, full: Match, found: Match) -> None:
    book, record = seq.book, seq.book.record
    is_first = record.miss is None
    if is_first:
        record.miss = explain(state, seq, full, found)
        record.num_cached_tokens = found.num_tokens
        queue_s = state.clock() - record.arrival
        draft.started.append(
            RequestStarted(seq.request.request_id, found.num_tokens, record.miss, queue_s)
        )
    state.waiting.remove(seq)
    state.start(seq)
    state.residency.arrive(seq, found)
    if book.tail is not None:
        settled = state.residency.settle(seq, draft.ops, draft.held)
        assert settled, "room for the copies was counted"
        draft.fixed.add(seq.seq_id)
        state.counters.copied_tokens += found.tail_tokens
    book.blocked_steps = 0
    _count_hit(state, seq, found.num_tokens, is_first=is_first)
    extend(state, draft, seq, share(draft, not state.waiting))
    if draft.headroom is not None:
        draft.headroom += _growth(state, seq)


def _count_hit(state: SchedulerState, seq: Sequence, num_tokens: int, *, is_first: bool) -> None:
    counters, book = state.counters, seq.book
    if is_first:
        counters.queries += seq.num_prompt_tokens
        counters.hits += num_tokens
        counters.misses += seq.num_prompt_tokens - num_tokens
    known = min(max(book.high_water, book.short_water), num_tokens)
    counters.resumed_tokens += known
    if num_tokens > known:
        new_prompt = min(num_tokens, seq.num_prompt_tokens) - min(known, seq.num_prompt_tokens)
        counters.cached_prompt_tokens += new_prompt
        counters.prompt_tokens += new_prompt
    book.high_water = max(book.high_water, num_tokens)


def _provider(state: SchedulerState, seq: Sequence, found: Match) -> tuple[Sequence, int] | None:
    """A running sequence that is computing more of this one's prefix than is stored already."""
    best: tuple[Sequence, int] | None = None
    for other in state.running:
        if other.num_tokens - other.num_computed_tokens <= 1 or other.book.root != seq.book.root:
            continue
        if other.book.is_private or other.request.priority > seq.request.priority:
            continue  # it publishes nothing, or may itself have to wait for long
        length = _common_spans(state, seq, other) * state.index.span
        if length <= found.num_tokens:
            continue
        if state.index.has_states:
            length = state.residency.kept_until(other, length)
            if length <= found.num_tokens or other.num_computed_tokens > length:
                continue
            length += 1  # the copy is made by the step behind it
        elif other.num_computed_tokens >= length:
            continue
        if best is None or length > best[1]:
            best = (other, length)
    return best


def _common_spans(state: SchedulerState, seq: Sequence, other: Sequence) -> int:
    """Whole spans that two sequences have in common and the first may take from the cache."""
    length = cut_at_border(state, other, 0, min(seq.num_tokens - 1, other.num_tokens))
    places = [item.start for item in (*seq.request.media, *other.request.media)]
    if places and seq.request.media != other.request.media:
        length = min(length, *places)
    differs = seq.token_ids(0, length) != other.token_ids(0, length)
    if len(differs) and differs.any():
        length = int(np.argmax(differs))
    return length // state.index.span
