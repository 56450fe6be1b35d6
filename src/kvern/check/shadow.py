"""A second memory beside the pool: what every slot really holds, and who wrote it.

The pool holds numbers; the shadow holds, for each slot, which run of tokens those numbers stand for
(`kvern.check.contexts`). It follows the device, not the bookkeeping: rows that were written, blocks that
were copied, blocks that were given back. Before a sequence attends, the shadow compares what its block
table leads to with what its own tokens ask for.

    pool     block 7   [ k v | k v | k v | ... ]        numbers
    shadow   block 7   [  12 |  13 |  57 | ... ]        "tokens 0..p of request a", by number
                          ok    ok    57 is a run of request b: named, with how it came there
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.check.contexts import ROOT, UNWRITTEN, Contexts
from kvern.check.names import Fault
from kvern.core.plan import BlockOp, Chunk, Copy
from kvern.core.sequence import Sequence as TokenSequence
from kvern.kernels.protocol import AttendBatch
from kvern.spec.groups import KVGroup

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Writer:
    """Who wrote a slot."""

    request_id: str
    seq_id: int
    sample_index: int
    salt: str | None

    @property
    def name(self) -> str:
        """For sentences."""
        sample = f" (sample {self.sample_index})" if self.sample_index else ""
        return f"request {self.request_id}{sample}"


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that no correct cache does."""

    fault: Fault
    request_id: str
    position: int
    sentence: str


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool as the bookkeeping sees it: references and published nodes per block."""

    refs: Callable[[], I32]
    nodes: Callable[[], I32]


class GroupShadow:
    """One KV group's slots: content, the content before that, writer, and whether it was copied."""

    def __init__(self, group: KVGroup, num_blocks: int) -> None:
        self.block_size = group.block_size
        self.reach = group.spec.reach
        num_slots = num_blocks * group.block_size
        self.content: I64 = np.full(num_slots, UNWRITTEN, np.int64)
        self.before: I64 = np.full(num_slots, UNWRITTEN, np.int64)
        self.writer: I32 = np.full(num_slots, -1, np.int32)
        self.copied_from: I32 = np.zeros(num_slots, np.int32)

    def live_positions(self, num_tokens: int) -> I64:
        """Positions below ``num_tokens`` that a query at ``num_tokens`` may read."""
        spans = self.reach.live(num_tokens)
        return np.concatenate([np.arange(a, b) for a, b in spans]) if spans else np.zeros(0, np.int64)

    def slots(self, table: I32, positions: I64) -> I64:
        """Where a table says that positions lie; slots of block 0 where it names none."""
        index = positions // self.block_size
        blocks = np.zeros(len(positions), np.int64)
        inside = index < len(table)
        blocks[inside] = table[index[inside]]
        return blocks * self.block_size + positions % self.block_size

    def write(self, slots: I64, content: I64, writer: int) -> None:
        """Note rows that were appended."""
        self.before[slots] = self.content[slots]
        self.content[slots] = content
        self.writer[slots] = writer
        self.copied_from[slots] = 0

    def copy(self, op: Copy) -> None:
        """Note a copied beginning of a block."""
        source = np.arange(op.num_tokens) + op.src * self.block_size
        target = np.arange(op.num_tokens) + op.dst * self.block_size
        self.before[target] = self.content[target]
        self.content[target] = self.content[source]
        self.writer[target] = self.writer[source]
        self.copied_from[target] = op.src

    def forget(self, blocks: I32) -> None:
        """Note blocks whose bytes were overwritten with a pattern that nobody may read."""
        slots = (blocks[:, None].astype(np.int64) * self.block_size + np.arange(self.block_size)).ravel()
        self.before[slots] = self.content[slots]
        self.content[slots] = UNWRITTEN


class Shadow:
    """Follows one engine's pool and collects violations, one per request and kind."""

    def __init__(
        self, groups: Sequence[KVGroup], num_blocks: int, contexts: Contexts, pool: PoolView
    ) -> None:
        self.contexts = contexts
        self.violations: list[Violation] = []
        self._pool = pool
        self._groups = {
            index: GroupShadow(group, num_blocks)
            for index, group in enumerate(groups)
            if not group.is_state
        }
        self._copied: Counter[int] = Counter()
        self._writers: list[Writer] = []
        self._writer_numbers: dict[int, int] = {}
        self._paths: dict[int, tuple[I32, I64]] = {}
        self._ends: dict[int, int] = {}
        self._resumed: set[int] = set()
        self._seen: set[tuple[Fault, str]] = set()

    # -- what the sequences ask for ------------------------------------------------------------------

    def path(self, seq: TokenSequence, length: int) -> I64:
        """Numbers of the runs that the sequence's own tokens stand for, ``[length]``."""
        tokens = seq.token_ids(0, length)
        known_tokens, known = self._paths.get(seq.seq_id, (np.zeros(0, np.int32), np.zeros(0, np.int64)))
        usable = min(len(known_tokens), length)
        if not np.array_equal(known_tokens[:usable], tokens[:usable]):
            usable = 0
        if usable < length:
            last = int(known[usable - 1]) if usable else ROOT
            more = self.contexts.extend(last, tokens[usable:].tolist())
            known = np.concatenate((known[:usable], more))
            self._paths[seq.seq_id] = tokens.copy(), known
        return known[:length]

    def writer_of(self, seq: TokenSequence) -> int:
        """The sequence's number among the writers."""
        number = self._writer_numbers.get(seq.seq_id)
        if number is None:
            number = self._writer_numbers[seq.seq_id] = len(self._writers)
            request = seq.request
            self._writers.append(
                Writer(request.request_id, seq.seq_id, seq.sample_index, request.cache_salt)
            )
        return number

    # -- what happens ----------------------------------------------------------------------------------

    def on_ops(self, ops: Sequence[BlockOp]) -> None:
        """Follow a step's block operations; a block copied from counts one reference more until commit."""
        self._copied = Counter(op.src for op in ops if isinstance(op, Copy))
        for op in ops:
            if isinstance(op, Copy) and op.group in self._groups:
                self._groups[op.group].copy(op)

    def on_poison(self, blocks: I32) -> None:
        """Follow free blocks that were filled with a pattern."""
        for group in self._groups.values():
            group.forget(blocks)

    def on_forward(
        self, token_ids: I32, batches: Sequence[AttendBatch], chunks: Sequence[Chunk]
    ) -> None:
        """Check what a forward pass is given, and follow what it writes."""
        for row, chunk in enumerate(chunks):
            self._follow_progress(chunk)
            self._check_tokens(token_ids, batches[0], row, chunk)
            for index, group in self._groups.items():
                self._check_reads(group, batches[index], row, chunk)
        for index, group in self._groups.items():
            self._check_distinct(batches[index], chunks)
            for row, chunk in enumerate(chunks):
                self._check_geometry(batches[index], row, chunk)
                self._write(group, batches[index], row, chunk)

    def _follow_progress(self, chunk: Chunk) -> None:
        seq = chunk.seq
        if chunk.start < self._ends.get(seq.seq_id, 0):
            self._resumed.add(seq.seq_id)
        self._ends[seq.seq_id] = chunk.start + chunk.length
        if chunk.num_samples and chunk.start + chunk.length != seq.num_tokens:
            last = chunk.start + chunk.length - 1
            self._note(
                Fault.LAST_TOKEN,
                chunk,
                last,
                f"a token is chosen from the logits of position {last}, and the last token of the "
                f"sequence is at {seq.num_tokens - 1}",
            )

    # -- checks ----------------------------------------------------------------------------------------

    def _check_tokens(
        self, token_ids: I32, batch: AttendBatch, row: int, chunk: Chunk
    ) -> None:
        rows = slice(int(batch.cu_seqlens_q[row]), int(batch.cu_seqlens_q[row + 1]))
        wanted = chunk.seq.token_ids(chunk.start, chunk.start + chunk.length)
        if len(wanted) != rows.stop - rows.start or not np.array_equal(token_ids[rows], wanted):
            fault = Fault.TOKENS_LOST if chunk.seq.seq_id in self._resumed else Fault.WRONG_PREFIX
            self._note(
                fault, chunk, chunk.start, "the tokens that are computed are not those of the sequence"
            )

    def _check_geometry(self, batch: AttendBatch, row: int, chunk: Chunk) -> None:
        rows = slice(int(batch.cu_seqlens_q[row]), int(batch.cu_seqlens_q[row + 1]))
        positions = batch.positions[rows]
        wanted = np.arange(chunk.start, chunk.start + chunk.length)
        if len(positions) != len(wanted) or not np.array_equal(positions, wanted):
            wrong = int(np.argmax(positions != wanted)) if len(positions) == len(wanted) else 0
            self._note(
                Fault.POSITIONS,
                chunk,
                chunk.start + wrong,
                f"the token at position {chunk.start + wrong} is computed as position "
                f"{int(positions[wrong]) if len(positions) else 'none'} "
                f"(chunk of positions {chunk.start}..{chunk.start + chunk.length - 1})",
            )
        end = int(batch.seq_lens[row])
        if end != chunk.start + chunk.length:
            self._note(
                Fault.MASK,
                chunk,
                chunk.start,
                f"attention is told of {end} keys where positions up to "
                f"{chunk.start + chunk.length - 1} are visible: its mask ends in the wrong place",
            )

    def _check_reads(self, group: GroupShadow, batch: AttendBatch, row: int, chunk: Chunk) -> None:
        """Everything before the chunk that its queries may see is what the sequence's tokens ask for."""
        positions = group.live_positions(chunk.start)
        if len(positions) == 0:
            return
        slots = group.slots(batch.block_tables[row], positions)
        wanted = self.path(chunk.seq, chunk.start)[positions]
        wrong = np.flatnonzero(group.content[slots] != wanted)
        if len(wrong):
            first = int(wrong[0])
            self._name_read(group, chunk, int(positions[first]), int(slots[first]), int(wanted[first]))
            return
        blocks = slots // group.block_size
        free = np.flatnonzero((self._pool.refs()[blocks] <= 0) | (blocks == 0))
        if len(free):
            position = int(positions[free[0]])
            self._note(
                Fault.BLOCK_OWNER,
                chunk,
                position,
                f"block {int(blocks[free[0]])} holds positions around {position} of the request, and the "
                "pool counts nobody who holds it: it can be handed out at any moment",
            )
        foreign = [int(w) for w in np.unique(group.writer[slots]) if w >= 0]
        for writer in (self._writers[w] for w in foreign):
            if writer.salt != chunk.seq.request.cache_salt:
                self._note(
                    Fault.SALT,
                    chunk,
                    int(positions[0]),
                    f"it has cache salt {chunk.seq.request.cache_salt!r} and reads what {writer.name} "
                    f"wrote under salt {writer.salt!r}",
                )

    def _name_read(
        self, group: GroupShadow, chunk: Chunk, position: int, slot: int, wanted: int
    ) -> None:
        """Say why a slot does not hold what the sequence's tokens ask for."""
        block, content = slot // group.block_size, int(group.content[slot])
        here = f"position {position} (block {block})"
        was_resumed = chunk.seq.seq_id in self._resumed
        if block == 0 or (content == UNWRITTEN and group.before[slot] == wanted):
            fault, said = Fault.BLOCK_OWNER, f"{here} has been given back and is still read"
        elif content == UNWRITTEN and was_resumed:
            fault, said = Fault.TOKENS_LOST, f"{here} was not computed again after the request resumed"
        elif content == UNWRITTEN:
            fault, said = Fault.UNWRITTEN, f"{here} counts as computed and nobody has written it"
        elif group.copied_from[slot]:
            fault = Fault.TAIL_TOO_FAR
            said = (
                f"{here} was copied from block {int(group.copied_from[slot])}, which holds "
                f"{self._describe(content)} there"
            )
        elif group.before[slot] == wanted:
            by = self._writers[int(group.writer[slot])]
            is_sibling = by.request_id == chunk.seq.request.request_id and by.seq_id != chunk.seq.seq_id
            fault = Fault.FORK if is_sibling else Fault.BLOCK_OWNER
            said = f"{here} was right, and {by.name} has overwritten it with {self._describe(content)}"
        elif was_resumed:
            fault, said = Fault.TOKENS_LOST, f"{here} holds {self._describe(content)} since it resumed"
        else:
            fault = Fault.WRONG_PREFIX
            by = self._writers[int(group.writer[slot])]
            said = f"the table leads {here} to {self._describe(content)}, written by {by.name}"
        self._note(fault, chunk, position, said)

    def _check_distinct(self, batch: AttendBatch, chunks: Sequence[Chunk]) -> None:
        """No two rows of a step write one slot."""
        slots, counts = np.unique(batch.slot_mapping, return_counts=True)
        if (counts > 1).any():
            slot = int(slots[np.argmax(counts > 1)])
            rows = np.flatnonzero(batch.slot_mapping == slot)
            first, second = (
                chunks[int(np.searchsorted(batch.cu_seqlens_q, row, side="right")) - 1] for row in rows[:2]
            )
            is_sibling = first.seq.request is second.seq.request
            self._note(
                Fault.FORK if is_sibling else Fault.BLOCK_OWNER,
                second,
                second.start,
                f"it writes into the same slot as request {first.seq.request.request_id} in one step",
            )

    def _write(self, group: GroupShadow, batch: AttendBatch, row: int, chunk: Chunk) -> None:
        rows = slice(int(batch.cu_seqlens_q[row]), int(batch.cu_seqlens_q[row + 1]))
        slots = batch.slot_mapping[rows]
        content = self.path(chunk.seq, chunk.start + chunk.length)[chunk.start :]
        if len(slots) != len(content):
            return
        blocks = np.unique(slots // group.block_size)
        self._check_writable(chunk, blocks)
        group.write(slots, content, self.writer_of(chunk.seq))

    def _check_writable(self, chunk: Chunk, blocks: I64) -> None:
        refs, nodes = self._pool.refs(), self._pool.nodes()
        for block in blocks.tolist():
            num_holders = int(refs[block]) - self._copied[block]
            if block == 0 or refs[block] <= 0:
                said = f"it writes into block {block}, which it does not hold"
            elif nodes[block]:
                said = f"it writes into block {block}, which is sealed"
            elif num_holders > 1:
                said = f"it writes into block {block}, which {num_holders} sequences share"
            else:
                continue
            is_fork = num_holders > 1 and (chunk.seq.request.n > 1 or chunk.seq.request.beam_width > 0)
            self._note(Fault.FORK if is_fork else Fault.BLOCK_OWNER, chunk, chunk.start, said)

    # -- sentences ---------------------------------------------------------------------------------------

    def _describe(self, content: int) -> str:
        tokens = self.contexts.tokens(content)
        if not tokens:
            return "nothing"
        tail = ", ".join(map(str, tokens[-3:]))
        return f"the token at position {len(tokens) - 1} of another run (ending in tokens {tail})"

    def _note(self, fault: Fault, chunk: Chunk, position: int, sentence: str) -> None:
        request_id = chunk.seq.request.request_id
        if (fault, request_id) in self._seen:
            return
        self._seen.add((fault, request_id))
        self.violations.append(
            Violation(fault, request_id, position, f"request {request_id}, position {position}: {sentence}")
        )
