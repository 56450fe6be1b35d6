"""The executor: carries a `StepPlan` out on the device and answers with a `StepResult`.

It changes no bookkeeping. What it counts, it counts where the work is done.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.core.plan import Chunk, StepPlan, StepResult, TokenChoice
from kvern.core.sequence import Sequence as TokenSequence
from kvern.engine.batch import attend_batch, token_ids
from kvern.engine.sampler import choose, likeliest, log_softmax, require_finite
from kvern.errors import IntegrityError
from kvern.models.decoder import Decoder, LayerCache
from kvern.models.workspace import Workspace
from kvern.spec.pages import state_offsets
from kvern.store.pool import PagedStore

F32 = npt.NDArray[np.float32]

LOGITS_BYTES = 16 * 2**20
"""Logits are computed for as many rows at a time as fit here."""


@dataclass(slots=True)
class WorkCounters:
    """Work done since the start.

    Attributes:
        steps: executed plans.
        tokens_processed: rows that went through the decoder.
        query_key_products: q·k products per head, summed over layers, counted by the kernels.
        logits_rows: rows for which logits were computed.
    """

    steps: int = 0
    tokens_processed: int = 0
    query_key_products: int = 0
    logits_rows: int = 0


class Observer:
    """Watches steps from inside: for the doctor and for tests. Every row's logits are then computed.

    Attributes:
        wants_layers: call `on_layer`. The step then runs operation by operation; otherwise it runs as
            without an observer, by a recorded program where there is one.
    """

    wants_layers: bool = False

    def on_chunks(self, chunks: Sequence[Chunk]) -> None:
        """What the step is about to compute; tables are those of this step."""

    def on_layer(self, chunks: Sequence[Chunk], layer: int, hidden: F32) -> None:
        """Hidden states ``[T, hidden_size]`` after a layer; the array is reused."""

    def on_logits(self, seq: TokenSequence, position: int, row: F32) -> None:
        """Logits ``[vocab]`` after the token at ``position``; the array is reused."""


class Runner:
    """Runs a decoder over a paged pool."""

    def __init__(self, decoder: Decoder, store: PagedStore, max_num_batched_tokens: int) -> None:
        """Args: max_num_batched_tokens: rows of the largest step."""
        self.decoder = decoder
        self.store = store
        self.counters = WorkCounters()
        self.observer: Observer | None = None
        self.workspace = Workspace(decoder.config, max_num_batched_tokens)
        self._cache = [self._layer_cache(index) for index in range(len(decoder.config.layers))]
        self._scores: dict[str, npt.NDArray[np.float64]] = {}
        self._failures: dict[str, str] = {}
        self._logits: F32 = np.empty((0, decoder.config.vocab_size), np.float32)

    def _layer_cache(self, layer: int) -> LayerCache:
        for index, group in enumerate(self.store.plan.groups):
            if layer in group.layers and group.is_state:
                return LayerCache.of_state(index, self.store.pages, state_offsets(group)[layer])
        found = self.store.streams(layer)
        return LayerCache.none() if found is None else LayerCache.of(*found)

    def execute(self, plan: StepPlan) -> StepResult:
        """Operations first, then all chunks as one batch, then logits and samples."""
        started = time.perf_counter()
        self.store.execute(plan.ops)
        if not plan.chunks:
            return StepResult(plan.step, (), {"execute_s": time.perf_counter() - started})
        chunks = plan.chunks
        groups = self.store.plan.groups
        batches = [attend_batch(chunks, index, group) for index, group in enumerate(groups)]
        observer = self.observer
        trace = None
        if observer is not None:
            observer.on_chunks(chunks)
            if observer.wants_layers:
                trace = functools.partial(observer.on_layer, chunks)
        hidden, products = self.decoder.forward(
            token_ids(chunks), batches, self._cache, self.workspace, trace
        )
        forward_s = time.perf_counter() - started
        samples = self._sample(chunks, hidden)
        self.counters.steps += 1
        self.counters.tokens_processed += plan.num_scheduled_tokens
        self.counters.query_key_products += products
        durations = {"forward_s": forward_s, "execute_s": time.perf_counter() - started}
        return StepResult(plan.step, samples, durations)

    def _sample(self, chunks: Sequence[Chunk], hidden: F32) -> list[list[TokenChoice]]:
        wanted = self._wanted_rows(chunks)
        samples: list[list[TokenChoice]] = []
        tile = max(1, LOGITS_BYTES // (4 * self.decoder.config.vocab_size))
        for start in range(0, len(wanted), tile):
            part = wanted[start : start + tile]
            logits = self._compute_logits(hidden, [row for row, _, _ in part])
            for (_, chunk, position), row in zip(part, logits, strict=True):
                choices = self._use_row(chunk, position, row)
                if choices is not None:
                    samples.append(choices)
        return samples

    def _wanted_rows(self, chunks: Sequence[Chunk]) -> list[tuple[int, Chunk, int]]:
        """(row, chunk, position) of every row whose logits are wanted, in row order."""
        wanted: list[tuple[int, Chunk, int]] = []
        first_row = 0
        for chunk in chunks:
            end = chunk.start + chunk.length
            if chunk.logits == "all" or self.observer is not None:
                wanted += [(first_row + p - chunk.start, chunk, p) for p in range(chunk.start, end)]
            elif chunk.logits == "last":
                wanted.append((first_row + chunk.length - 1, chunk, end - 1))
            first_row += chunk.length
        return wanted

    def _compute_logits(self, hidden: F32, rows: list[int]) -> F32:
        if len(rows) > len(self._logits):
            self._logits = np.empty((len(rows), self.decoder.config.vocab_size), np.float32)
        out = self._logits[: len(rows)]
        whole = len(rows) == len(hidden)
        self.decoder.logits(hidden if whole else np.ascontiguousarray(hidden[rows]), out)
        self.counters.logits_rows += len(rows)
        return out

    def _use_row(self, chunk: Chunk, position: int, row: F32) -> list[TokenChoice] | None:
        """Observe, score and sample from one row; choices only where the plan asks for some.

        A row that is not finite ends its own request: the choices are fillers, and the caller is told.
        """
        seq = chunk.seq
        if self.observer is not None:
            self.observer.on_logits(seq, position, row)
        is_sampled = chunk.num_samples > 0 and position == chunk.start + chunk.length - 1
        try:
            if seq.request.needs_all_logits and chunk.logits == "all":
                self._score(seq, position, row)
            return self._choose(chunk, position, row) if is_sampled else None
        except IntegrityError as error:
            self._failures[seq.request.request_id] = str(error)
            return [TokenChoice(0, 0.0)] * chunk.num_samples if is_sampled else None

    @staticmethod
    def _choose(chunk: Chunk, position: int, row: F32) -> list[TokenChoice]:
        seq = chunk.seq
        if seq.request.beam_width:
            return likeliest(row, chunk.num_samples, position + 1)
        return choose(
            row,
            seq.request.sampling,
            range(seq.sample_index, seq.sample_index + chunk.num_samples),
            position + 1,
            seq.token_ids(0, position + 1),
            seq.num_prompt_tokens,
        )

    def _score(self, seq: TokenSequence, position: int, row: F32) -> None:
        require_finite(row, position + 1)
        name, count = seq.request.request_id, seq.num_prompt_tokens - 1
        scores = self._scores.setdefault(name, np.full(count, np.nan))
        if position < count:
            target = int(seq.token_ids(position + 1, position + 2)[0])
            scores[position] = log_softmax(row)[target]

    def take_failures(self) -> dict[str, str]:
        """Requests whose logits were not finite in the last step, with a sentence each, and forget them.

        Their samples are fillers: the caller ends these requests, and no others.
        """
        failures, self._failures = self._failures, {}
        return failures

    def num_scored(self, request_id: str) -> int:
        """How many tokens of a scored prompt have their log-probability already."""
        scores = self._scores.get(request_id)
        return 0 if scores is None else int(np.count_nonzero(~np.isnan(scores)))

    def take_scores(self, request_id: str) -> npt.NDArray[np.float64]:
        """Log-probabilities of a scored prompt's tokens after the first, and forget them."""
        return self._scores.pop(request_id, np.empty(0))
