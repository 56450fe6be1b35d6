"""Pins: stored prefixes held for a while, whatever the pool needs."""

from __future__ import annotations

from kvern.core.book import RequestRecord, SequenceBook, SpanHashes
from kvern.core.matching import match
from kvern.core.regimes import first_regime
from kvern.core.sequence import Int32, Request, Sequence, token_array
from kvern.core.state import Pin, SchedulerState


def pin_prefix(state: SchedulerState, pin_id: int, request: Request, ttl_s: float) -> int:
    """Hold every block that the prompt would find now, for `ttl_s` seconds.

    Returns:
        The tokens held.
    """
    prompt = token_array(request)
    seq = Sequence(0, request, prompt, len(state.rules))
    seq.regime = first_regime(state, request)
    key = state.key_of(request, seq.regime)
    root = state.index.hold_root(key)
    record = RequestRecord(request, 0, 0.0, prompt, 0)
    hashes = SpanHashes(state.index.root_hash(root))
    seq.book = SequenceBook((0, 0.0, 0, 0), record, hashes, root, root)
    found = match(state.index, seq)
    runs: list[Int32] = []
    for blocks in (*state.residency.hit_blocks(found), *state.residency.source_blocks(found)):
        held = blocks[blocks != 0]
        if len(held):
            state.pool.hold(held)
            runs.append(held)
    state.index.release_node(root)
    runs = [run if int(run[0]) in state.index.state_entries else run[::-1].copy() for run in runs]
    state.pins[pin_id] = Pin(pin_id, state.clock() + ttl_s, runs[::-1], found.num_tokens)
    return found.num_tokens
