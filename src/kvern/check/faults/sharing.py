"""Faults of sharing: hits, tails, twins, resumption, forks, salts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern.check.faults.holds import Batches, on_forward, on_plan
from kvern.check.watch import wrap
from kvern.core.plan import Chunk, Copy, StepPlan
from kvern.engine.llm import LLM

F32 = npt.NDArray[np.float32]


def _starts_from_hit(chunk: Chunk) -> bool:
    record = chunk.seq.book.record
    return 0 < chunk.start == record.num_cached_tokens and chunk.seq.num_generated_tokens == 0


def skip_last_token(llm: LLM) -> None:
    """After a full hit the token before the last one is computed in the last one's place."""

    def change(token_ids: Any, batches: Batches, chunks: Sequence[Chunk]) -> tuple[Any, Batches]:
        tokens, changed = token_ids.copy(), list(batches)
        for row, chunk in enumerate(chunks):
            is_full_hit = chunk.length == 1 and chunk.start == chunk.seq.num_prompt_tokens - 1
            if not (is_full_hit and _starts_from_hit(chunk)):
                continue
            place = int(batches[0].cu_seqlens_q[row])
            tokens[place] = chunk.seq.token_ids(chunk.start - 1, chunk.start)[0]
            for index, batch in enumerate(changed):
                if batch.seats is not None:
                    continue  # one token fewer would seal the block before once more
                positions, seq_lens = batch.positions.copy(), batch.seq_lens.copy()
                positions[place] -= 1
                seq_lens[row] -= 1
                changed[index] = replace(
                    batch, positions=positions, seq_lens=seq_lens, backend_data={}
                )
        return tokens, changed

    on_forward(llm, change)


def copy_tail_too_far(llm: LLM) -> None:
    """A copied beginning of a block is one or two tokens longer than what the prompts share."""

    def change(plan: StepPlan) -> StepPlan:
        ops, chunks = list(plan.ops), list(plan.chunks)
        for number, chunk in enumerate(chunks):
            extra = min(2, chunk.length - 1)
            tables = chunk.seq.tables
            own = [
                i
                for i, op in enumerate(ops)
                if isinstance(op, Copy) and op.dst in tables[op.group].blocks
            ]
            if not own or extra < 1 or chunk.seq.num_generated_tokens:
                continue
            for i in own:
                op = ops[i]
                assert isinstance(op, Copy)
                size = llm.model.kv_plan.groups[op.group].block_size
                extra = min(extra, size - op.num_tokens)
                ops[i] = op._replace(num_tokens=op.num_tokens + extra)
            chunks[number] = chunk._replace(start=chunk.start + extra, length=chunk.length - extra)
        return replace(plan, ops=tuple(ops), chunks=tuple(chunks))

    on_plan(llm, change)


def claim_unwritten(llm: LLM) -> None:
    """A hit claims more tokens than any other request has written yet."""

    def change(plan: StepPlan) -> StepPlan:
        chunks = [
            _skip(chunk, min(3, chunk.length - 1))
            if chunk.length > 1 and _starts_from_hit(chunk) and not plan.ops
            else chunk
            for chunk in plan.chunks
        ]
        return replace(plan, chunks=tuple(chunks))

    on_plan(llm, change)


def _skip(chunk: Chunk, count: int) -> Chunk:
    return chunk._replace(start=chunk.start + count, length=chunk.length - count)


def resume_without_recomputing(llm: LLM) -> None:
    """A preempted request continues as if its blocks were still there."""
    ends: dict[int, int] = {}

    def change(plan: StepPlan) -> StepPlan:
        chunks = []
        for chunk in plan.chunks:
            known = ends.get(chunk.seq.seq_id, 0)
            end = chunk.start + chunk.length
            if chunk.start < known < end and chunk.seq.book.num_preemptions:
                chunk = _skip(chunk, known - chunk.start)
            ends[chunk.seq.seq_id] = max(known, end)
            chunks.append(chunk)
        return replace(plan, chunks=tuple(chunks))

    on_plan(llm, change)


def forget_generated_token(llm: LLM) -> None:
    """A request that is preempted loses the token that it had just generated."""
    seen: dict[int, int] = {}

    def make(plan: Callable[[], StepPlan]) -> Callable[[], StepPlan]:
        def tampered() -> StepPlan:
            for seq in llm.model.scheduler.state.waiting:
                if (
                    seq.book.num_preemptions > seen.get(seq.seq_id, 0)
                    and seq.num_generated_tokens > 1
                ):
                    seen[seq.seq_id] = seq.book.num_preemptions
                    seq.num_tokens -= 1
            return plan()

        return tampered

    wrap(llm.model.scheduler, "plan", make)


def write_into_sibling(llm: LLM) -> None:
    """Samples of one request go on writing into the block that they shared at the fork.

    Of open blocks in narrow formats they change places at their first token.
    """

    def change(token_ids: Any, batches: Batches, chunks: Sequence[Chunk]) -> tuple[Any, Batches]:
        first_of: dict[int, int] = {}
        changed = [
            replace(
                batch,
                block_tables=batch.block_tables.copy(),
                slot_mapping=batch.slot_mapping.copy(),
                seats=None if batch.seats is None else batch.seats.copy(),
                backend_data={},
            )
            for batch in batches
        ]
        for row, chunk in enumerate(chunks):
            if chunk.length != 1 or chunk.seq.request.n < 2 or not chunk.seq.num_generated_tokens:
                continue
            leader = first_of.setdefault(id(chunk.seq.request), row)
            if row != leader + 1 or chunks[leader].start != chunk.start:
                continue
            for batch in changed:
                if batch.seats is not None:
                    if chunk.start == chunk.seq.num_prompt_tokens:
                        batch.seats[[row, leader]] = batch.seats[[leader, row]]
                    continue
                index = chunk.start // llm.settings.block_size
                batch.block_tables[row, index] = batch.block_tables[leader, index]
                places = batch.cu_seqlens_q[[row, leader]]
                # Two rows that write one slot would add a race between threads: they change places.
                batch.slot_mapping[places] = batch.slot_mapping[places[::-1]]
        return token_ids, changed

    on_forward(llm, change)


def ignore_salt(llm: LLM) -> None:
    """The salt stays out of the cache key."""
    index = llm.model.scheduler.state.index

    def make(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda key: method(replace(key, cache_salt=None))

    wrap(index, "hold_root", make)
