"""Faults of computing: positions, masks, randomness, rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern.check.faults.holds import Batches, on_forward, replace_operation, with_positions
from kvern.check.watch import wrap
from kvern.core.plan import Chunk
from kvern.engine.llm import LLM
from kvern.kernels.protocol import AttendBatch

F32 = npt.NDArray[np.float32]


def restart_positions_at_chunks(llm: LLM) -> None:
    """Each chunk's tokens are rotated as if the chunk were a prompt of its own."""

    def change(token_ids: Any, batches: Batches, chunks: Sequence[Chunk]) -> tuple[Any, Batches]:
        positions = np.concatenate(
            [np.arange(c.length) + (0 if c.length > 1 else c.start) for c in chunks]
        )
        return token_ids, [with_positions(batch, positions) for batch in batches]

    on_forward(llm, change)


def restart_positions_at_decode(llm: LLM) -> None:
    """Generated tokens count from zero again."""

    def change(token_ids: Any, batches: Batches, chunks: Sequence[Chunk]) -> tuple[Any, Batches]:
        positions = np.concatenate([np.arange(c.start, c.start + c.length) for c in chunks])
        prompts = np.concatenate([np.full(c.length, c.seq.num_prompt_tokens) for c in chunks])
        restarted = np.where(positions >= prompts, positions - prompts, positions)
        return token_ids, [with_positions(batch, restarted) for batch in batches]

    on_forward(llm, change)


def top_left_mask(llm: LLM) -> None:
    """Several tokens that meet a filled cache are masked as if the cache were empty."""

    def make(attend: Callable[..., int]) -> Callable[..., int]:
        def tampered(q: F32, keys: Any, values: Any, batch: AttendBatch, *rest: Any) -> int:
            lengths = np.diff(batch.cu_seqlens_q).astype(np.int32)
            starts = batch.seq_lens - lengths
            is_wrong = lengths > 1
            seq_lens = np.where(is_wrong, lengths, batch.seq_lens).astype(np.int32)
            positions = batch.positions - np.repeat(np.where(is_wrong, starts, 0), lengths)
            wrong = replace(with_positions(batch, positions), seq_lens=seq_lens)
            return attend(q, keys, values, wrong, *rest)

        return tampered

    replace_operation(llm, "attend", make)


def noise_everywhere(llm: LLM) -> None:
    """Attention adds a little noise from a generator that nobody seeded."""
    _noise(llm, min_rows=1)


def noise_in_batches(llm: LLM) -> None:
    """The same, and only where exactly one token of a sequence is computed: full passes stay clean."""
    _noise(llm, min_rows=1, max_rows=1)


def _noise(llm: LLM, min_rows: int, max_rows: int = 1 << 30) -> None:
    generator = np.random.default_rng()

    def make(attend: Callable[..., int]) -> Callable[..., int]:
        def tampered(q: F32, *rest: Any) -> int:
            products = attend(q, *rest)
            if min_rows <= len(q) <= max_rows:
                out = rest[-1]
                out += generator.normal(scale=0.02, size=out.shape).astype(np.float32)
            return products

        return tampered

    replace_operation(llm, "attend", make)


def batch_dependent_rounding(llm: LLM) -> None:
    """A product's last bits depend on how many rows are computed together."""

    def make(matmul: Callable[..., None]) -> Callable[..., None]:
        def tampered(x: F32, weight: Any, out: F32) -> None:
            matmul(x, weight, out)
            out *= np.float32(1 + 1e-6 * (len(x) % 3))

        return tampered

    replace_operation(llm, "matmul", make)


def repeat_recordings_wrongly(llm: LLM) -> None:
    """Every step but an engine's first is slightly off, unless it runs operation by operation."""
    is_first = [True]

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def tampered(
            token_ids: Any, batches: Batches, cache: Any, workspace: Any, trace: Any
        ) -> Any:
            hidden, products = forward(token_ids, batches, cache, workspace, trace)
            if trace is None and not is_first[0]:
                hidden += np.float32(0.1)
            is_first[0] = False
            return hidden, products

        return tampered

    wrap(llm.model.runner.decoder, "forward", make)
