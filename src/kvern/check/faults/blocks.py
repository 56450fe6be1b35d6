"""Faults of ownership: tables that lead elsewhere, blocks that are freed, written or kept too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern.check.faults.holds import Batches, on_forward, on_plan
from kvern.check.watch import wrap
from kvern.core.plan import Chunk, StepPlan
from kvern.engine.llm import LLM

F32 = npt.NDArray[np.float32]


def table_points_at_neighbour(llm: LLM) -> None:
    """In a batch, a sequence's first table entry names its neighbour's first block."""

    def change(token_ids: Any, batches: Batches, chunks: Sequence[Chunk]) -> tuple[Any, Batches]:
        full = [row for row, c in enumerate(chunks) if c.start >= llm.settings.block_size]
        if len(full) < 2:
            return token_ids, batches
        changed = []
        for batch in batches:
            tables = batch.block_tables.copy()
            tables[full[1], 0] = tables[full[0], 0]
            changed.append(replace(batch, block_tables=tables, backend_data={}))
        return token_ids, changed

    on_forward(llm, change)


def hit_of_another_prefix(llm: LLM) -> None:
    """A hit's first block is that of the oldest other sequence: content is taken for equal that is not."""
    first_blocks: dict[bytes, int] = {}

    def change(plan: StepPlan) -> StepPlan:
        for chunk in plan.chunks:
            seq, table = chunk.seq, chunk.seq.tables[0]
            if chunk.start < llm.settings.block_size:
                continue
            tokens = seq.token_ids(0, llm.settings.block_size).tobytes()
            foreign = [block for other, block in first_blocks.items() if other != tokens]
            if foreign and seq.num_generated_tokens == 0:
                table.replace(0, foreign[0])
            else:
                first_blocks.setdefault(tokens, int(table.blocks[0]))
        return plan

    on_plan(llm, change)


def free_while_used(llm: LLM) -> None:
    """A running sequence's first block goes back to the pool while the sequence still reads it."""
    scheduler, freed = llm.model.scheduler, set[int]()

    def make(plan: Callable[[], StepPlan]) -> Callable[[], StepPlan]:
        def tampered() -> StepPlan:
            made = plan()
            for chunk in made.chunks:
                is_settled = chunk.start >= llm.settings.block_size
                if is_settled and chunk.seq.seq_id not in freed:
                    freed.add(chunk.seq.seq_id)
                    block = chunk.seq.tables[0].blocks[:1].copy()
                    if int(scheduler.state.pool.node[block[0]]) and block[0]:
                        scheduler.state.index.drop(block)
                    scheduler.state.pool.release(block)
            return made

        return tampered

    wrap(scheduler, "plan", make)


def write_into_sealed(llm: LLM) -> None:
    """After each step a byte of some sealed block changes."""
    pool, pages = llm.model.scheduler.state.pool, llm.model.store.pages

    def make(execute: Callable[[StepPlan], Any]) -> Callable[[StepPlan], Any]:
        def tampered(plan: StepPlan) -> Any:
            result = execute(plan)
            sealed = np.flatnonzero(pool.node)
            if len(sealed):
                pages[sealed[0], :64] ^= 0x55
            return result

        return tampered

    wrap(llm.model.runner, "execute", make)


def leak_blocks(llm: LLM) -> None:
    """Some blocks are never given back."""
    count = [0]

    def make(release: Callable[[Any], None]) -> Callable[[Any], None]:
        def tampered(blocks: Any) -> None:
            count[0] += 1
            if count[0] % 3:
                release(blocks)

        return tampered

    wrap(llm.model.scheduler.state.pool, "release", make)
