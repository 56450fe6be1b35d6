"""Beam search: beams are sequences, and reordering them means forking and dropping tables.

A round is complete when every live beam has handed in its likeliest tokens; beams that lost their
blocks catch up first. The best continuations go on: a parent's first child takes over its tables,
further children fork them, parents without children are dropped. No tensor moves except the open
tail block of a fork.
"""

from __future__ import annotations

from collections.abc import Callable

from kvern.core.book import BeamHypothesis, BeamSearch, RequestRecord
from kvern.core.plan import TokenChoice
from kvern.core.sequence import Sequence
from kvern.core.state import SchedulerState

Fork = Callable[[SchedulerState, Sequence, int], Sequence]
Drop = Callable[[SchedulerState, Sequence], None]
Continuation = tuple[float, Sequence, TokenChoice]


def deliver(state: SchedulerState, seq: Sequence, choices: list[TokenChoice]) -> None:
    """Note a beam's candidates for this round."""
    search = _search(seq.book.record)
    search.candidates[seq.seq_id] = (seq, choices)
    seq.book.beam_delivered = True
    if state.config.no_cache:
        state.residency.leave(seq)
        state.stop(seq)
        state.enqueue(seq)


def is_round_complete(record: RequestRecord) -> bool:
    """Whether every live beam has handed in its candidates."""
    return len(_search(record).candidates) == len(record.live)


def advance_beams(
    state: SchedulerState, record: RequestRecord, fork: Fork, drop: Drop
) -> list[BeamHypothesis]:
    """Begin the next round; returns the best `n` hypotheses when the search is over."""
    search = _search(record)
    chosen = _choose(record, search)
    search.candidates.clear()
    by_parent: dict[int, list[Continuation]] = {}
    for continuation in chosen:
        by_parent.setdefault(continuation[1].seq_id, []).append(continuation)
    if _is_over(record, search, chosen):
        for logprob, seq, choice in chosen:
            tokens = (*seq.generated_token_ids.tolist(), choice.token_id)
            if len(tokens) >= record.max_tokens:
                _keep(record, search, logprob, tokens, "length")
        for seq in tuple(record.live):
            drop(state, seq)
        return search.finished[: record.request.n]
    for seq in tuple(record.live):
        if seq.seq_id not in by_parent:
            drop(state, seq)
    for continuations in by_parent.values():
        parent = continuations[0][1]
        beams = [parent, *(fork(state, parent, 0) for _ in continuations[1:])]
        for beam, (logprob, _, choice) in zip(beams, continuations, strict=True):
            beam.append_token(choice.token_id)
            beam.logprob = logprob
            beam.book.beam_delivered = False
    for place, beam in enumerate(record.live):
        beam.sample_index = place
    return []


def _search(record: RequestRecord) -> BeamSearch:
    assert record.beam is not None
    return record.beam


def _choose(record: RequestRecord, search: BeamSearch) -> list[Continuation]:
    """The best continuations; those that end go to the finished hypotheses.

    Only an end among the `beam_width` best counts, as in other implementations.
    """
    width = record.request.beam_width
    candidates = [
        (seq.logprob + choice.logprob, seq, choice)
        for seq, choices in search.candidates.values()
        for choice in choices
    ]
    candidates.sort(key=lambda item: (-item[0], item[1].seq_id, item[2].token_id))
    chosen: list[Continuation] = []
    for place, (logprob, seq, choice) in enumerate(candidates):
        if choice.token_id in record.request.stop_token_ids:
            if place < width:
                tokens = (*seq.generated_token_ids.tolist(), choice.token_id)
                _keep(record, search, logprob, tokens, "stop")
        elif len(chosen) < width:
            chosen.append((logprob, seq, choice))
    return chosen


def _keep(
    record: RequestRecord,
    search: BeamSearch,
    logprob: float,
    tokens: tuple[int, ...],
    reason: str,
) -> None:
    score = logprob / len(tokens) ** record.request.beam_length_penalty
    search.finished.append(BeamHypothesis(score, logprob, tokens, reason))
    search.finished.sort(key=lambda item: -item.score)
    del search.finished[record.request.beam_width :]


def _is_over(record: RequestRecord, search: BeamSearch, chosen: list[Continuation]) -> bool:
    """Whether the longest answers are reached or no live beam can still win."""
    if not chosen:
        return True
    length = chosen[0][1].num_generated_tokens + 1
    if length >= record.max_tokens:
        return True
    if len(search.finished) < record.request.beam_width:
        return False
    attainable = chosen[0][0] / length**record.request.beam_length_penalty
    return bool(search.finished[-1].score >= attainable)
