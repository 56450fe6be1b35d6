"""What the next step computes.

Every running sequence catches its computed tokens up with its tokens: one token behind is a decode,
more is a prompt (or a resumption). Decodes go first, so a long prompt never stalls them. Prompts
share what is left of the token budget: each takes half of the rest, by rank, so that a short one
never waits for a long one to be through; what nobody takes goes to the first of them. When the pool
is empty, the sequence of the highest rank takes the blocks of the lowest, so the first one always
advances and every one finishes.
"""

from __future__ import annotations

from kvern.core.plan import Chunk, Logits
from kvern.core.regimes import cut_at_border, wants_all_logits
from kvern.core.rules import cut_at_blocks
from kvern.core.sequence import Sequence
from kvern.core.state import Draft, SchedulerState, rank_of


def settle_forks(state: SchedulerState, draft: Draft) -> None:
    """Carry out the copies that forks of the last step asked for, before anything is written.

    A fork for which there is no room gives its blocks back and catches up later.
    """
    unsettled, state.unsettled = state.unsettled, []
    for seq in unsettled:
        assert seq.book.tail is not None
        copied = seq.book.tail.num_tokens
        if state.residency.settle(seq, draft.ops, draft.held):
            draft.fixed.add(seq.seq_id)
            state.counters.copied_tokens += copied
        else:
            state.preempt(seq)


def plan_running(state: SchedulerState, draft: Draft) -> None:
    """Chunks of the running sequences, decodes first."""
    behind: list[Sequence] = []
    chunks = draft.chunks
    slow: list[Sequence] = []
    for seq in state.running:
        start = seq.num_computed_tokens
        missing = seq.num_tokens - start
        if missing != 1:
            if missing:
                behind.append(seq)
            continue
        book = seq.book
        if start < book.capacity and start < book.next_checkpoint and draft.budget > 0:
            wanted = _wanted(state, seq, seq.num_tokens) if book.record.is_special else ("last", 1)
            chunks[seq.seq_id] = Chunk(seq, start, 1, *wanted)
            draft.budget -= 1
        else:
            slow.append(seq)
    for seq in slow:
        if draft.budget > 0 and seq.book.is_running:
            extend(state, draft, seq, draft.budget)
    for place, seq in enumerate(behind, 1):
        if draft.budget > 0 and seq.book.is_running:
            is_last = place == len(behind) and not state.waiting
            extend(state, draft, seq, share(draft, is_last))


def share(draft: Draft, is_last: bool) -> int:
    """Tokens for one prompt: half of what is left, so that those behind it advance as well."""
    return draft.budget if is_last else (draft.budget + 1) // 2


def top_up(state: SchedulerState, draft: Draft) -> None:
    """Give what is left of the budget to the prompts of the step, by rank."""
    if draft.budget <= 0:
        return
    for seq in tuple(state.running):
        chunk = draft.chunks.get(seq.seq_id)
        if chunk is not None and chunk.start + chunk.length < seq.num_tokens:
            withdraw(draft, seq)
            extend(state, draft, seq, draft.budget)


def extend(state: SchedulerState, draft: Draft, seq: Sequence, limit: int) -> bool:
    """Plan as long a chunk of a running sequence as limits and room allow."""
    config, residency = state.config, state.residency
    start = seq.num_computed_tokens
    length = min(seq.num_tokens - start, limit, config.max_chunk_tokens or limit)
    length = cut_at_border(state, seq, start, length)
    if residency.wants_checkpoint(seq):
        spare_pages = residency.pages_needed(seq, start + length)
        copies = residency.copy_states(seq, draft.ops, spare_pages)
        if copies:
            draft.copies.extend(copies)
            draft.fixed.add(seq.seq_id)
        residency.schedule_events(seq)
    length = min(length, seq.book.next_checkpoint - start)
    missing = seq.num_tokens - start
    length = cut_at_blocks(state.rules, start, length, missing)
    if start + length > seq.book.capacity:
        length = _make_room(state, draft, seq, start + length) - start
        if length < 1:
            return False
        length = cut_at_blocks(state.rules, start, length, missing)
        before = len(draft.ops)
        residency.grow(seq, start + length, draft.ops)
        if len(draft.ops) > before:
            draft.fixed.add(seq.seq_id)
    logits, num_samples = _wanted(state, seq, start + length)
    draft.chunks[seq.seq_id] = Chunk(seq, start, length, logits, num_samples)
    draft.budget -= length
    return True


def _make_room(state: SchedulerState, draft: Draft, seq: Sequence, wanted: int) -> int:
    """The length up to `wanted` that there is room for, at least one token more if need be.

    Takes blocks from sequences of lower rank, then from pins.
    """
    while True:
        room = state.residency.most_tokens(seq, wanted, state.pool.num_available)
        if room > seq.num_computed_tokens:
            return min(room, wanted)
        victim = lowest_below(state, draft, seq)
        if victim is not None:
            withdraw(draft, victim)
            state.preempt(victim)
        elif not state.expire_pins(everything=True):
            return 0


def lowest_below(state: SchedulerState, draft: Draft, seq: Sequence) -> Sequence | None:
    """The running sequence of the lowest rank below `seq` that no operation of the step names.

    Beams of the same search that only wait for `seq` count as below it.
    """
    book = seq.book
    if seq.request.beam_width:
        for other in reversed(state.running):
            if other.book.beam_delivered and other.book.record is book.record:
                return other
    rank = book.rank
    for other in reversed(state.running):
        if rank_of(other) <= rank:
            return None
        if other.seq_id not in draft.fixed:
            return other
    return None


def withdraw(draft: Draft, seq: Sequence) -> None:
    """Take a sequence's chunk out of the step again."""
    chunk = draft.chunks.pop(seq.seq_id, None)
    if chunk is not None:
        draft.budget += chunk.length


def _wanted(state: SchedulerState, seq: Sequence, end: int) -> tuple[Logits, int]:
    """Which logits and how many samples a chunk that ends at `end` asks for."""
    record = seq.book.record
    request = record.request
    num_samples = 0
    if end == seq.num_tokens and record.max_tokens > 0:
        if request.beam_width:
            num_samples = 2 * request.beam_width
        elif seq.num_generated_tokens == 0 and request.n > 1 and not record.is_forked:
            num_samples = request.n
        else:
            num_samples = 1
    if request.needs_all_logits and wants_all_logits(state, seq, end):
        return "all", num_samples
    return ("last", num_samples) if num_samples else ("none", 0)
