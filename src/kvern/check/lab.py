"""Engines for the doctor: many small pools over one set of weights, and the answers without a cache."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvern.check.against import EXACT_MARGIN, TOLERANCE, Margins, Oracle, margins_of
from kvern.check.compare import tolerance_of
from kvern.check.contexts import Contexts
from kvern.check.dense import DensePass
from kvern.check.names import Fault
from kvern.check.session import Session
from kvern.check.uncached import LayerTrace, Sink, UncachedRow, UncachedRows
from kvern.check.watch import Watch
from kvern.core.plan import Chunk
from kvern.core.sequence import Sequence as TokenSequence
from kvern.engine.llm import LLM
from kvern.engine.params import SamplingParams
from kvern.engine.runner import Observer
from kvern.spec.groups import make_kv_plan

SEED = 20240229
Tamper = Callable[[LLM], None]
"""Breaks an engine on purpose, right after it was made: for proving that the doctor sees it."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckOptions:
    """What to check.

    Attributes:
        is_quick: fewer and shorter cases.
        trace_layers: also keep hidden states, to name the first layer that differs.
        max_border: windows, chunks and regimes up to this length are followed past their end, whatever it
            takes; None: up to what a few minutes allow.
    """

    is_quick: bool = False
    trace_layers: bool = False
    max_border: int | None = None


class Lab:
    """Makes watched engines.

    Attributes:
        llm: the engine as the user would run it; its weights and settings are used for all others.
        tolerance: share of a row's range that a logit may differ by; 0 demands equal bits.
        noise: how far the independent pass lies from the engine's full pass, as a share of the range.
        noise_rms: the same as the root mean square over all logits.
        stored_dtypes: of keys and values.
        is_random: the same input gave different logits.
        named: faults that replays have named so far.
        oracle: gives the rows to compare with; None: the engine's own full passes.
    """

    def __init__(
        self,
        llm: LLM,
        options: CheckOptions,
        tamper: Tamper | None = None,
        *,
        tampers_last: bool = False,
        oracle: Oracle | None = None,
    ) -> None:
        """Prepare.

        Args:
            llm: loaded with the settings to check; stays untouched.
            options: what to check.
            tamper: applied to every engine made here, those without a cache included.
            tampers_last: whether the doctor's own wrappers lie inside the tampered ones.
            oracle: compare with its passes instead of the engine's own.
        """
        self.llm = llm
        self.options = options
        self.oracle = oracle
        self.contexts = Contexts(llm.model.scheduler.config.regimes)
        layers = range(len(llm.model.decoder.config.layers))
        found = [entry for entry in map(llm.model.store.streams, layers) if entry is not None]
        self.stored_dtypes = {stream.dtype for _, streams in found for stream in streams}
        self.tolerance = tolerance_of(llm.model.backend.row_invariant, self.stored_dtypes)
        if oracle is not None:
            self.tolerance = TOLERANCE
        self.uncached = UncachedRows(
            self.contexts,
            self._own_rows if oracle is None else self._oracle_rows,
            is_exact=self.tolerance == 0,
        )
        self.noise = 0.0
        self.noise_rms = 0.0
        self.is_random = False
        self.named: set[Fault] = set()
        self._tamper = tamper
        self._tampers_last = tampers_last
        self.dense = DensePass(llm.model.decoder, llm.model.store)

    @property
    def has_quantised_products(self) -> bool:
        """Whether matrix products round activations (to int8 for stored codes, or to bf16)."""
        weights = self.llm.model.weights
        if weights.backend.name != "native":
            return False
        is_integer = weights.weights_format == "auto" and weights.is_quantised
        return is_integer or weights.weights_format == "bf16"

    @property
    def _has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.llm.model.decoder.config.layers)

    @property
    def block_size(self) -> int:
        """Tokens per block, as the user set it."""
        return self.llm.settings.block_size

    def traced(self, trace_layers: bool) -> Lab:
        """The same lab with or without traced layers, which run steps operation by operation."""
        other = copy.copy(self)
        other.options = dataclasses.replace(self.options, trace_layers=trace_layers)
        return other

    # -- tokens ------------------------------------------------------------------------------------------

    def tokens(self, length: int, stream: int = 0) -> tuple[int, ...]:
        """Token ids drawn with a fixed seed; different streams differ from the first token on."""
        rng = np.random.default_rng((SEED, stream))
        vocab_size = self.llm.model.decoder.config.vocab_size
        return tuple(rng.integers(0, vocab_size, length).tolist())

    def fitting(self, length: int) -> int:
        """A prompt length, cut to what the model's context leaves room for."""
        return max(1, min(length, self.llm.model.max_model_len - 48))

    def within_first_regime(self, length: int) -> int:
        """A length, cut to where all positions of a pass are in the regime of their own length."""
        regimes = self.llm.model.decoder.config.regimes
        return length if regimes is None else min(length, regimes.border)

    # -- engines -----------------------------------------------------------------------------------------

    def engine(self, num_tokens: int, *, num_blocks: int | None = None, **changes: Any) -> LLM:
        """An engine with the user's settings, changed, and its own small pool.

        Args:
            num_tokens: what the pool has room for, beside a few spare blocks.
            num_blocks: exact size of the pool instead, without the null block.
            **changes: fields of `EngineSettings`.
        """
        settings = dataclasses.replace(self.llm.settings, **{"max_num_seqs": 32, **changes})
        plan = make_kv_plan(
            self.llm.model.spec,
            settings.kv_format,
            settings.block_size,
            num_blocks=2,
            max_num_seqs=settings.max_num_seqs,
        )
        if num_blocks is None:
            num_blocks = plan.pages_for(num_tokens) + 8 * len(plan.groups)
        memory = (num_blocks - 1) * plan.page_bytes + plan.total_bytes
        settings = dataclasses.replace(settings, kv_memory=memory)
        return LLM(self.llm.model.path, settings=settings, share_weights_with=self.llm)

    def session(self, num_tokens: int, **settings: Any) -> Session:
        """A watched engine; see `engine` for the arguments."""
        llm = self.engine(num_tokens, **settings)
        if self._tamper is not None and not self._tampers_last:
            self._tamper(llm)
        watch = Watch(llm, self.contexts, self.uncached, self.options.trace_layers, self.tolerance)
        if self._tamper is not None and self._tampers_last:
            self._tamper(llm)
        return Session(llm, watch)

    # -- the answer without the cache -----------------------------------------------------------------

    def full_pass(self, tokens: Sequence[int]) -> dict[int, UncachedRow]:
        """All rows of one pass over ``tokens`` from an empty cache, by context number."""
        rows: dict[int, UncachedRow] = {}
        self._own_rows(tokens, rows.__setitem__)
        return rows

    def _own_rows(self, tokens: Sequence[int], sink: Sink, margins: Margins | None = None) -> None:
        count = len(tokens)
        llm = self.engine(
            count + 1,
            enable_prefix_caching=False,
            no_cache=True,
            max_num_batched_tokens=max(count, 1),
            max_chunk_tokens=None,
        )
        if self._tamper is not None:
            self._tamper(llm)
        collector = _Collector(self.contexts, self.options.trace_layers, sink, margins)
        llm.model.runner.observer = collector
        with llm:
            llm.submit(list(tokens), SamplingParams(max_tokens=1, ignore_eos=True))
            for _ in range(4 * count + 4):
                if not llm.has_work:
                    break
                llm.step()

    def _oracle_rows(self, tokens: Sequence[int], sink: Sink) -> None:
        """The oracle's rows; those behind a near tie of experts are marked, by a pass of the engine."""
        assert self.oracle is not None
        count = len(tokens)
        first_unclear = count
        if self._has_experts:
            with margins_of(self.llm.model.decoder, count) as margins:
                self._own_rows(tokens, lambda _node, _row: None, margins)
            first_unclear = margins.first_unclear(EXACT_MARGIN)
        logits = self.oracle.logits(tokens)
        regime = self.contexts.regime(count)
        for position, node in enumerate(self.contexts.path(tokens).tolist()):
            if self.contexts.regime(position + 1) == regime:
                is_unclear = position >= first_unclear
                sink(node, UncachedRow(logits[position].copy(), is_unclear=is_unclear))


class _Collector(Observer):
    """Hands on every row of one pass."""

    def __init__(
        self, contexts: Contexts, trace_layers: bool, sink: Sink, margins: Margins | None
    ) -> None:
        self._sink = sink
        self._last: tuple[tuple[int, int, int], int] = (-1, -1, -1), 0
        self._margins = margins
        self._contexts = contexts
        self._trace = LayerTrace(trace_layers)
        self.wants_layers = trace_layers

    def on_chunks(self, chunks: Sequence[Chunk]) -> None:
        """The runner's observer."""
        if self._margins is not None:
            self._margins.on_chunks(chunks)

    def on_layer(self, chunks: Sequence[Chunk], layer: int, hidden: Any) -> None:
        """The runner's observer."""
        self._trace.on_layer(chunks, layer, hidden)

    def on_logits(self, seq: TokenSequence, position: int, row: Any) -> None:
        """The runner's observer."""
        if seq.regime != self._contexts.regime(position + 1):
            return
        tokens = seq.token_ids(0, position + 1)
        last, before = self._last
        if last == (seq.seq_id, seq.regime, position - 1):
            node = int(self._contexts.extend(before, tokens[-1:].tolist())[0])
        else:
            node = int(self._contexts.path(tokens.tolist())[-1])
        self._last = (seq.seq_id, seq.regime, position), node
        self._sink(node, UncachedRow(row.copy(), self._trace.row(seq, position)))
