"""What a finished step changes."""

from __future__ import annotations

from kvern.core import beams
from kvern.core.book import RequestRecord, SequenceBook
from kvern.core.plan import (
    Event,
    RequestFinished,
    SampleFinished,
    StepPlan,
    StepResult,
    TokenChoice,
    TokenEvent,
)
from kvern.core.regimes import cross_where_due
from kvern.core.sequence import Sequence
from kvern.core.state import Draft, SchedulerState
from kvern.errors import IntegrityError

MAX_TOKEN_ID = 1 << 31
"""Token ids are stored as int32."""


def commit_step(
    state: SchedulerState, draft: Draft, plan: StepPlan, result: StepResult
) -> list[Event]:
    """Advance every sequence of the plan by a checked result; returns what callers want to know."""
    events: list[Event] = []
    advance(state, plan)
    state.residency.publish_states(draft.copies)
    draft.copies = []
    while draft.held:
        state.residency.release_run(draft.held.pop(0))
    samples = iter(result.samples)
    for chunk in plan.chunks:
        if chunk.num_samples:
            choices = next(samples)
            if _is_closing(chunk.seq):
                continue
            if chunk.num_samples == 1:
                take_token(state, chunk.seq, choices[0], events)
            else:
                _take_many(state, chunk.seq, list(choices), events)
        elif chunk.start + chunk.length == chunk.seq.num_tokens:
            finish_sample(state, chunk.seq, "length", events)
    cross_where_due(state, plan.chunks)
    state.counters.steps += 1
    return events


def check_result(plan: StepPlan, result: StepResult) -> None:
    """Refuse a result that does not belong to the plan, before anything changes.

    Raises:
        IntegrityError: another step's, or samples that are missing, too many or without a token id.
    """
    if result.step != plan.step:
        raise IntegrityError(f"the result of step {result.step} came for step {plan.step}")
    wanted = [chunk.num_samples for chunk in plan.chunks if chunk.num_samples]
    given = [len(choices) for choices in result.samples]
    if wanted != given:
        raise IntegrityError(
            f"step {plan.step} asked for {wanted} samples per chunk, its result has {given}"
        )
    for choices in result.samples:
        for choice in choices:
            if not 0 <= choice.token_id < MAX_TOKEN_ID:
                raise IntegrityError(
                    f"the result of step {plan.step} chooses {choice.token_id}, which is no token id"
                )


def advance(state: SchedulerState, plan: StepPlan) -> None:
    """Count what was computed; seal what is complete and let go of what has left the reach."""
    crossing: list[Sequence] = []
    total = 0
    for seq, start, length, _, _ in plan.chunks:
        end = start + length
        total += length
        seq.num_computed_tokens = end
        book = seq.book
        is_new = start == book.high_water and end > book.short_water
        if is_new and end > seq.num_prompt_tokens and length == 1:
            book.high_water = end
            state.counters.computed_generated_tokens += 1
        else:
            _count(state, seq, book, start, end)
        if end >= book.next_event:
            crossing.append(seq)
    state.counters.computed_tokens += total
    if crossing:
        residency = state.residency
        residency.seal(crossing)
        for seq in crossing:
            residency.trim(seq)
            residency.schedule_events(seq)


def _count(state: SchedulerState, seq: Sequence, book: SequenceBook, start: int, end: int) -> None:
    counters = state.counters
    again = min(max(book.high_water, start), end) - start
    if state.config.no_cache:
        counters.uncached_recomputed_tokens += again
    else:
        counters.recomputed_tokens += again
    crossed = max(min(end, book.short_water) - start - again, 0)
    counters.regime_recomputed_tokens += crossed
    fresh = start + again + crossed
    book.high_water = max(book.high_water, end)
    if end > fresh:
        prompt = max(min(end, seq.num_prompt_tokens) - fresh, 0)
        counters.prompt_tokens += prompt
        counters.computed_prompt_tokens += prompt
        counters.computed_generated_tokens += end - fresh - prompt


def take_token(
    state: SchedulerState, seq: Sequence, choice: TokenChoice, events: list[Event]
) -> None:
    """Append a chosen token; the sample may end with it."""
    record = seq.book.record
    token_id = choice.token_id
    seq.append_token(token_id)
    seq.logprob += choice.logprob
    state.counters.generated_tokens += 1
    events.append(TokenEvent(record.request.request_id, seq.sample_index, choice))
    if token_id in record.request.stop_token_ids:
        finish_sample(state, seq, "stop", events)
    elif seq.num_tokens - seq.num_prompt_tokens >= record.max_tokens:
        finish_sample(state, seq, "length", events)
    elif state.config.no_cache:
        state.residency.leave(seq)


def _take_many(
    state: SchedulerState, seq: Sequence, choices: list[TokenChoice], events: list[Event]
) -> None:
    record = seq.book.record
    if record.beam is not None:
        beams.deliver(state, seq, choices)
        if beams.is_round_complete(record):
            _finish_beams(state, record, events)
        return
    record.is_forked = True
    siblings = [fork_sample(state, seq, index) for index in range(1, record.request.n)]
    for sample, choice in zip((seq, *siblings), choices, strict=True):
        take_token(state, sample, choice, events)


def _is_closing(seq: Sequence) -> bool:
    closing = seq.book.record.closing
    return bool(closing) and (None in closing or seq.sample_index in closing)


def _finish_beams(state: SchedulerState, record: RequestRecord, events: list[Event]) -> None:
    """Start the next round, or report the best beams."""
    request_id = record.request.request_id
    best = beams.advance_beams(state, record, fork_sample, drop_sequence)
    for index, beam in enumerate(best):
        state.counters.generated_tokens += len(beam.token_ids)
        record.num_generated_tokens += len(beam.token_ids)
        record.last_reason = beam.reason
        events.append(SampleFinished(request_id, index, beam.reason, beam.token_ids, beam.score))
    _finish_if_empty(state, record, events)


def fork_sample(state: SchedulerState, parent: Sequence, sample_index: int) -> Sequence:
    """Another sequence with the parent's tokens and, if there is a seat, its blocks."""
    record = parent.book.record
    tokens = parent.token_ids(0, parent.num_tokens)
    state.next_seq_id += 1
    child = Sequence(state.next_seq_id, record.request, tokens, len(state.rules), sample_index)
    book = parent.book
    priority, arrival, order, _ = book.rank
    rank = (priority, arrival, order, record.num_ranked)
    record.num_ranked += 1
    child.book = SequenceBook(rank, record, book.hashes.copy(), book.root, book.root)
    child.logprob = parent.logprob
    state.index.tree.refs[book.root] += 2  # its root and, so far, its last node
    child.book.high_water, child.book.short_water = book.high_water, book.short_water
    child.regime, child.book.is_private = parent.regime, book.is_private
    record.live.append(child)
    seats = min(state.config.max_num_seqs, state.config.max_num_batched_tokens)
    if parent.book.is_running and len(state.running) < seats and not state.config.no_cache:
        state.residency.fork(parent, child)
        state.start(child)
        if child.book.tail is not None:
            state.unsettled.append(child)
    else:
        state.residency.schedule_events(child)
        state.enqueue(child)
    return child


def drop_sequence(state: SchedulerState, seq: Sequence) -> None:
    """Take a sequence out of the scheduler; what it computed stays in the cache."""
    state.stop(seq)
    state.residency.leave(seq)
    book = seq.book
    state.index.tree.refs[book.last_node] -= 1
    state.index.release_node(book.root)
    book.record.live.remove(seq)


def finish_sample(state: SchedulerState, seq: Sequence, reason: str, events: list[Event]) -> None:
    """End a sample, and its request with the last one."""
    record = seq.book.record
    tokens = tuple(seq.generated_token_ids.tolist())
    record.num_generated_tokens += len(tokens)
    record.last_reason = reason
    drop_sequence(state, seq)
    events.append(
        SampleFinished(record.request.request_id, seq.sample_index, reason, tokens, seq.logprob)
    )
    _finish_if_empty(state, record, events)


def _finish_if_empty(state: SchedulerState, record: RequestRecord, events: list[Event]) -> None:
    if record.live:
        return
    del state.records[record.request.request_id]
    state.counters.requests_finished += 1
    if record.last_reason == "abort":
        state.counters.requests_aborted += 1
    events.append(
        RequestFinished(
            record.request.request_id,
            record.last_reason,
            len(record.prompt),
            record.num_cached_tokens,
            record.num_generated_tokens,
            record.num_preemptions,
            record.miss,
        )
    )


def close_asked(state: SchedulerState, events: list[Event]) -> None:
    """Carry out the aborts and early ends that were asked for while the step ran."""
    closing, state.closing = state.closing, []
    for record in closing:
        asked, record.closing = record.closing, {}
        for seq in tuple(record.live):
            reason = asked.get(None) or asked.get(seq.sample_index)
            if reason is not None and seq in record.live:
                finish_sample(state, seq, reason, events)


def discard_step(state: SchedulerState, draft: Draft, plan: StepPlan) -> None:
    """Undo a step that was not carried out: its sequences will catch up again."""
    for _, _, pages in draft.copies:
        state.pool.release_entry(pages)
    for node, _, _ in draft.copies:
        state.index.release_node(node)
    for blocks in draft.held:
        state.residency.release_run(blocks)
    named = {chunk.seq.seq_id for chunk in plan.chunks} | draft.fixed
    for seq in [seq for seq in state.running if seq.seq_id in named]:
        state.preempt(seq, keep=False)
