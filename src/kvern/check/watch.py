"""What the doctor hears and sees of one engine while it works."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern.check.compare import NO_DIFFERENCE, Difference, compare
from kvern.check.contexts import Contexts
from kvern.check.names import Fault, Finding
from kvern.check.seats import FreeSeats
from kvern.check.shadow import PoolView, Shadow
from kvern.check.uncached import LayerTrace, UncachedRow, UncachedRows
from kvern.core.plan import Chunk, Copy, StepPlan, StepResult
from kvern.core.pool import BlockPool
from kvern.core.sequence import Sequence as TokenSequence
from kvern.engine.llm import LLM
from kvern.engine.runner import Observer
from kvern.kernels.protocol import AttendBatch
from kvern.spec.reach import num_positions

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

POISON = 0xFF
"""Byte that fills pages without content: a NaN in every stored dtype, so that reading one shows."""

MAX_FINDINGS_OF_A_KIND = 2

VERIFIED_BYTES_PER_STEP = 32 * 2**20

MAX_DIFFERING_BYTES = 128 * 2**20
"""Of differing rows that are kept to explain them; the ones after them are counted only."""

MAX_MEASURED = 4
"""Differing rows per engine that take a pass of their own to be measured."""


@dataclass(slots=True)
class Row:
    """One computed token: what the engine said behind it.

    Attributes:
        node: context number of the tokens that the request asked for.
        step: the engine's step in which it was computed.
        difference: from the row without the cache, once that is known.
        logits: the row, dropped when it is equal.
        layers: hidden states, with traced layers.
    """

    request_id: str
    seq_id: int
    position: int
    node: int
    step: int
    difference: Difference | None = None
    logits: F32 | None = None
    layers: F32 | None = None
    first_layer: int | None = None


@dataclass(slots=True)
class SequenceNote:
    """How one sequence was computed: its chunks as (start, length), and what was copied for it."""

    request_id: str
    seq_id: int
    sample_index: int
    num_prompt_tokens: int
    tokens: tuple[int, ...] = ()
    chunks: list[tuple[int, int]] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)


def pool_of(llm: LLM) -> BlockPool:
    """The engine's block pool."""
    return llm.model.scheduler.state.pool


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put a function around a method of one object, looked up by name at call time."""
    setattr(owner, name, make(getattr(owner, name)))


class Watch(Observer):
    """Attaches to an engine; see `Shadow` for what it follows, `Row` for what it keeps.

    Attributes:
        num_unclear: rows left out because they lie behind a near tie of experts.
        num_beyond: differing rows that are only counted, because many others differ too.
    """

    def __init__(
        self,
        llm: LLM,
        contexts: Contexts,
        uncached: UncachedRows,
        trace_layers: bool,
        tolerance: float = 0.0,
    ) -> None:
        self.rows: list[Row] = []
        self.num_unclear = 0
        self.num_beyond = 0
        self._tolerance = tolerance
        self._num_differing_bytes = 0
        self.notes: dict[int, SequenceNote] = {}
        self.findings: list[Finding] = []
        self.num_rows_processed = 0
        self.num_products = 0
        self._llm = llm
        self._uncached = uncached
        self._trace = LayerTrace(trace_layers)
        self.wants_layers = trace_layers
        self._pool = pool_of(llm)
        self._pages = llm.model.store.pages
        state = llm.model.scheduler.state
        view = PoolView(lambda: self._pool.refs, lambda: self._pool.node, lambda: state.running)
        plan = llm.model.kv_plan
        self.shadow = Shadow(plan, contexts, view)
        self._seats = FreeSeats(llm.model.store, state, POISON)
        self._chunks: Sequence[Chunk] = ()
        self.step = 0
        self._chosen: dict[tuple[str, int, int], int] = {}
        self._sums: dict[int, int] = {}
        self._next_to_verify = 0
        self._was_free = np.zeros(plan.num_blocks, np.bool_)
        self._reaches = Counter(
            layer.caches[0].reach
            for layer in llm.model.spec.layers
            if layer.caches and not layer.caches[0].is_state
        )
        self._wrapped: list[tuple[Any, str]] = []
        self._attach()

    def _attach(self) -> None:
        runner = self._llm.model.runner
        runner.observer = self
        for owner, name, make in (
            (runner.decoder, "forward", self._around_forward),
            (runner.store, "execute", self._around_operations),
            (runner, "execute", self._around_execute),
            (self._pool, "unpublish", self._around_unpublish),
        ):
            wrap(owner, name, make)
            self._wrapped.append((owner, name))
        self._poison()

    def detach(self) -> None:
        """Let go of the engine and its pool; rows, notes and findings stay."""
        for owner, name in self._wrapped:
            vars(owner).pop(name, None)
        self._wrapped.clear()
        self._llm.model.runner.observer = None
        self._pages = np.zeros((0, 1), np.uint8)

    # -- around the engine's calls --------------------------------------------------------------------

    def _around_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(token_ids: I32, batches: Sequence[AttendBatch], *rest: Any) -> Any:
            self._follow(token_ids, batches, self._chunks)
            self._seats.spoil_rows()
            return forward(token_ids, batches, *rest)

        return watched

    def _around_operations(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def watched(ops: Sequence[Any]) -> Any:
            self.shadow.on_ops(ops)
            return execute(ops)

        return watched

    def _around_execute(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def watched(plan: StepPlan) -> StepResult:
            self.step = plan.step
            for chunk in plan.chunks:
                self._note_copies(chunk, plan)
            result: StepResult = execute(plan)
            self._note_choices(plan, result)
            return result

        return watched

    def _around_unpublish(self, unpublish: Callable[[I32], None]) -> Callable[[I32], None]:
        def watched(blocks: I32) -> None:
            for block in blocks.tolist():
                self._sums.pop(block, None)
            unpublish(blocks)

        return watched

    def on_chunks(self, chunks: Sequence[Chunk]) -> None:
        """The runner's observer, called before the forward pass over these chunks."""
        self._chunks = chunks

    def on_layer(self, chunks: Sequence[Chunk], layer: int, hidden: F32) -> None:
        """The runner's observer, called when layers are traced."""
        self._trace.on_layer(chunks, layer, hidden)

    def _follow(
        self, token_ids: I32, batches: Sequence[AttendBatch], chunks: Sequence[Chunk]
    ) -> None:
        """Check and follow what a forward pass is given."""
        self.num_rows_processed += len(token_ids)
        self.shadow.on_forward(token_ids, batches, chunks)
        for chunk in chunks:
            self._note_chunk(chunk)

    def on_logits(self, seq: TokenSequence, position: int, row: F32) -> None:
        """The runner's observer: compare at once where the uncached row is known.

        Rows before a position regime's border that a longer sequence computes again stand for nothing.
        """
        if seq.regime != self.shadow.contexts.regime(position + 1):
            return
        node = int(self.shadow.path(seq, position + 1)[position])
        known = self._uncached.find(node)
        if known is not None and known.is_unclear:
            self.num_unclear += 1
            return
        note = Row(seq.request.request_id, seq.seq_id, position, node, self.step)
        difference = self._uncached.compare(node, row)
        if difference is not None and difference.is_within(self._tolerance):
            note.difference = difference
            self.rows.append(note)
            return
        if known is not None:
            self._num_differing_bytes += row.nbytes
            if self._num_differing_bytes > MAX_DIFFERING_BYTES:
                self.num_beyond += 1
                return
        self.rows.append(note)
        note.logits = row.copy()
        note.layers = self._trace.row(seq, position)

    # -- notes ---------------------------------------------------------------------------------------

    def _note_of(self, seq: TokenSequence) -> SequenceNote:
        note = self.notes.get(seq.seq_id)
        if note is None:
            note = SequenceNote(
                seq.request.request_id, seq.seq_id, seq.sample_index, seq.num_prompt_tokens
            )
            self.notes[seq.seq_id] = note
        return note

    def _note_chunk(self, chunk: Chunk) -> None:
        note = self._note_of(chunk.seq)
        note.chunks.append((chunk.start, chunk.length))
        self.num_products += sum(
            layers * num_positions(reach.sees(position))
            for reach, layers in self._reaches.items()
            for position in range(chunk.start, chunk.start + chunk.length)
        )
        note.tokens = tuple(chunk.seq.token_ids(0, chunk.start + chunk.length).tolist())

    def _note_copies(self, chunk: Chunk, plan: StepPlan) -> None:
        note = self._note_of(chunk.seq)
        for op in plan.ops:
            if isinstance(op, Copy) and op.dst in chunk.seq.tables[op.group].blocks:
                note.copies.append(op)

    def _note_choices(self, plan: StepPlan, result: StepResult) -> None:
        """Every sample's token at a position is chosen once: a second choice means that one was lost."""
        sampled = [chunk for chunk in plan.chunks if chunk.num_samples]
        for chunk, choices in zip(sampled, result.samples, strict=False):
            seq, position = chunk.seq, chunk.start + chunk.length
            if seq.request.beam_width:
                continue
            for sample, choice in enumerate(choices, seq.sample_index):
                key = seq.request.request_id, sample, position
                if key in self._chosen:
                    self._find(
                        Fault.TOKENS_LOST,
                        f"request {key[0]}: the token at position {position} is chosen a second time, so the "
                        "first one was lost",
                    )
                self._chosen[key] = choice.token_id
        for chunk in plan.chunks:
            self._check_kept(chunk.seq)

    def _check_kept(self, seq: TokenSequence) -> None:
        if seq.request.beam_width:
            return
        request_id, first = seq.request.request_id, seq.num_prompt_tokens
        for offset, token in enumerate(seq.generated_token_ids.tolist()):
            chosen = self._chosen.get((request_id, seq.sample_index, first + offset))
            if chosen is not None and chosen != token:
                self._find(
                    Fault.TOKENS_LOST,
                    f"request {request_id}: token {chosen} was chosen for position {first + offset}, and the "
                    f"sequence holds {token} there",
                )

    def _find(self, fault: Fault, sentence: str, basis: str = "bookkeeping") -> None:
        """Keep the first few of a kind."""
        same = [
            finding for finding in self.findings if (finding.fault, finding.basis) == (fault, basis)
        ]
        if len(same) < MAX_FINDINGS_OF_A_KIND:
            self.findings.append(Finding(fault, sentence, basis))

    # -- after each step -------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Verify sealed pages, take sums of new ones, spoil pages that were given back."""
        nodes = self._pool.node
        budget = max(1, VERIFIED_BYTES_PER_STEP // self._pages.shape[1])
        self._verify(self._next_to_verify, budget)
        for block in np.flatnonzero(nodes).tolist():
            if block not in self._sums:
                self._sums[block] = zlib.crc32(self._pages[block])
        self._poison()

    def verify_all(self) -> None:
        """Verify every sealed page."""
        self._verify(0, len(self._pages))

    def _verify(self, start: int, count: int) -> None:
        blocks = sorted(self._sums)
        chosen = [blocks[(start + i) % len(blocks)] for i in range(min(count, len(blocks)))]
        self._next_to_verify = (start + len(chosen)) % len(blocks) if blocks else 0
        for block in chosen:
            total = zlib.crc32(self._pages[block])
            if total != self._sums[block]:
                self._find(
                    Fault.BLOCK_OWNER,
                    f"the bytes of block {block} changed after it was sealed (seen after step "
                    f"{self.step}; {int(self._pool.refs[block])} sequences hold it)",
                    "checksum",
                )
                self._sums[block] = total

    def _poison(self) -> None:
        """Fill pages that came free since the last step, so that a late reader meets NaN."""
        is_free = np.zeros(len(self._was_free), np.bool_)
        is_free[self._pool.free_blocks()] = True
        fresh = np.flatnonzero(is_free & ~self._was_free).astype(np.int32)
        self._was_free = is_free
        if len(fresh):
            self._pages[fresh] = POISON
            self.shadow.on_poison(fresh)
        self.shadow.on_poison_seats(self._seats.spoil())

    def settle(self) -> None:
        """Compare the rows whose uncached row had to be computed first, and measure what differs."""
        left = [row for row in self.rows if row.difference is None and row.logits is not None]
        for row in sorted(left, key=lambda row: -row.position):  # one pass gives all shorter ones
            self._uncached.get(row.node)
        num_again, out = 0, set()
        for row in sorted(left, key=lambda row: row.position):
            known = self._uncached.find(row.node)
            if known is None:
                continue
            if known.is_unclear:
                self.num_unclear += 1
                out.add(id(row))
                continue
            assert row.logits is not None
            row.difference = self._uncached.compare(row.node, row.logits)
            if row.difference is None:  # only its digest is known: a pass of its own measures it
                num_again += 1
                whole = self._uncached.whole(row.node) if num_again <= MAX_MEASURED else None
                if whole is None or whole.logits is None:
                    self.num_beyond += 1
                    out.add(id(row))
                    continue
                row.difference = compare(row.logits, whole.logits)
            self._locate(row, known)
        self.rows = [row for row in self.rows if id(row) not in out]

    @staticmethod
    def _locate(row: Row, known: UncachedRow) -> None:
        """Name the first layer that differs; forget what is equal."""
        if row.difference == NO_DIFFERENCE:
            row.logits = row.layers = None
        elif row.layers is not None and known.layers is not None:
            unequal = np.flatnonzero((row.layers != known.layers).any(axis=1))
            row.first_layer = int(unequal[0]) if len(unequal) else len(row.layers)
