"""A second memory beside the pool: what every slot really holds, and who wrote it.

The pool holds numbers; the shadow holds, for each slot, which run of tokens those numbers stand for
(`kvern.check.contexts`). It follows the device, not the bookkeeping: rows that were written, blocks that
were copied, blocks that were given back. Before a sequence attends, the shadow compares what its block
table leads to with what its own tokens ask for.

    pool     block 7   [ k v | k v | k v | ... ]        numbers
    shadow   block 7   [  12 |  13 |  57 | ... ]        "tokens 0..p of request a", by number
                          ok    ok    57 is a run of request b: named, with how it came there

Open blocks of narrow formats, one per seat, are a memory of their own (`kvern.check.slots`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.check.contexts import UNWRITTEN, Contexts
from kvern.check.names import Fault
from kvern.check.slots import ShadowSlots
from kvern.core.plan import BlockOp, Chunk, Copy, CopyOpen
from kvern.core.sequence import Sequence as TokenSequence
from kvern.kernels.protocol import AttendBatch
from kvern.spec.pages import KVPlan

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
    """The pool as the bookkeeping sees it: references and published nodes per block, running sequences."""

    refs: Callable[[], I32]
    nodes: Callable[[], I32]
    running: Callable[[], Sequence[TokenSequence]]


class Shadow:
    """Follows one engine's pool and collects violations, one per request and kind."""

    def __init__(self, plan: KVPlan, contexts: Contexts, pool: PoolView) -> None:
        self.contexts = contexts
        self.violations: list[Violation] = []
        self._pool = pool
        groups = {i: group for i, group in enumerate(plan.groups) if not group.is_state}
        self._groups = {i: ShadowSlots(group, plan.num_blocks) for i, group in groups.items()}
        self._open = {
            i: ShadowSlots(group, plan.num_open_blocks)
            for i, group in groups.items()
            if group.is_narrow
        }
        self._writes_at_once = {i for i, group in groups.items() if group.has_wide}
        self._writers: list[Writer] = []
        self._writer_numbers: dict[int, int] = {}
        self._paths: dict[tuple[int, int], tuple[I32, I64]] = {}
        self._first_starts: dict[int, int] = {}
        self._preemptions: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._resumed_at: dict[int, int] = {}
        self._lost_up_to: dict[int, int] = {}
        """Where a sequence had come before it was last preempted."""
        self._seen: set[tuple[Fault, str]] = set()

    # -- what the sequences ask for ------------------------------------------------------------------

    def path(self, seq: TokenSequence, length: int) -> I64:
        """Numbers of the runs that the sequence's own tokens stand for, ``[length]``."""
        tokens = seq.token_ids(0, length)
        known_tokens, known = self._paths.get(
            (seq.seq_id, seq.regime), (np.zeros(0, np.int32), np.zeros(0, np.int64))
        )
        usable = min(len(known_tokens), length)
        if not np.array_equal(known_tokens[:usable], tokens[:usable]):
            usable = 0
        if usable < length:
            last = int(known[usable - 1]) if usable else self.contexts.root(seq.regime)
            more = self.contexts.extend(last, tokens[usable:].tolist())
            known = np.concatenate((known[:usable], more))
            self._paths[seq.seq_id, seq.regime] = tokens.copy(), known
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
        """Follow a step's block operations."""
        for op in ops:
            if isinstance(op, CopyOpen):
                self._open[op.group].copy(op)
            elif isinstance(op, Copy) and op.group in self._groups:
                group = self._groups[op.group]
                if op.group in self._writes_at_once or op.num_tokens == group.block_size:
                    group.copy(op)

    def on_poison(self, blocks: I32) -> None:
        """Follow free blocks that were filled with a pattern."""
        for group in self._groups.values():
            group.forget(blocks)

    def on_poison_seats(self, seats: I32) -> None:
        """Follow free seats whose open blocks were filled with a pattern."""
        for group in self._open.values():
            group.forget(seats)

    def on_forward(
        self, token_ids: I32, batches: Sequence[AttendBatch], chunks: Sequence[Chunk]
    ) -> None:
        """Check what a forward pass is given, and follow what it writes."""
        for row, chunk in enumerate(chunks):
            self._follow_progress(chunk)
            if self._check_tokens(token_ids, batches[0], row, chunk):
                self._check_geometry(batches, row, chunk)
            for index in self._groups:
                self._check_reads(index, batches[index], row, chunk)
        for index in self._groups:
            self._check_distinct(batches[index], chunks)
            for row, chunk in enumerate(chunks):
                self._write(index, batches[index], row, chunk)

    def _follow_progress(self, chunk: Chunk) -> None:
        seq = chunk.seq
        self._first_starts.setdefault(seq.seq_id, chunk.start)
        num_preemptions = seq.book.num_preemptions
        if num_preemptions > self._preemptions.get(seq.seq_id, 0):
            self._preemptions[seq.seq_id] = num_preemptions
            self._resumed_at[seq.seq_id] = chunk.start
            self._lost_up_to[seq.seq_id] = self._ends.get(seq.seq_id, 0)
        end = chunk.start + chunk.length
        self._ends[seq.seq_id] = max(end, self._ends.get(seq.seq_id, 0))
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

    def _check_tokens(self, token_ids: I32, batch: AttendBatch, row: int, chunk: Chunk) -> bool:
        """The tokens that are computed are the sequence's own."""
        rows = slice(int(batch.cu_seqlens_q[row]), int(batch.cu_seqlens_q[row + 1]))
        seq, start = chunk.seq, chunk.start
        wanted = seq.token_ids(start, start + chunk.length)
        if np.array_equal(token_ids[rows], wanted):
            return True
        if self._first_starts.get(seq.seq_id) == start == seq.num_prompt_tokens - 1 > 0:
            fault, what = (
                Fault.LAST_TOKEN,
                "another token is computed in place of the last prompt token",
            )
        elif seq.seq_id in self._resumed_at:
            fault, what = (
                Fault.TOKENS_LOST,
                "since it resumed, other tokens than its own are computed",
            )
        else:
            fault, what = (
                Fault.WRONG_PREFIX,
                "the tokens that are computed are not those of the sequence",
            )
        self._note(fault, chunk, start, what)
        return False

    def _check_geometry(self, batches: Sequence[AttendBatch], row: int, chunk: Chunk) -> None:
        """Positions and the end of the mask follow from where the chunk lies."""
        end = chunk.start + chunk.length
        for batch in batches:
            rows = slice(int(batch.cu_seqlens_q[row]), int(batch.cu_seqlens_q[row + 1]))
            positions = batch.positions[rows]
            wrong = np.flatnonzero(positions != np.arange(chunk.start, end))
            if len(wrong):
                position = chunk.start + int(wrong[0])
                self._note(
                    Fault.POSITIONS,
                    chunk,
                    position,
                    f"it is computed as position {int(positions[wrong[0]])} (in the chunk "
                    f"{chunk.start}..{end - 1})",
                )
            if int(batch.seq_lens[row]) != end:
                self._note(
                    Fault.MASK,
                    chunk,
                    chunk.start,
                    f"attention is told of {int(batch.seq_lens[row])} keys where {end} are visible: its mask "
                    "ends in the wrong place",
                )

    def _check_reads(self, index: int, batch: AttendBatch, row: int, chunk: Chunk) -> None:
        """Everything before the chunk that its queries may see is what the sequence's tokens ask for."""
        group, opened = self._groups[index], self._open.get(index)
        positions = group.live_positions(chunk.start)
        if opened is not None:
            assert batch.seats is not None
            is_own = positions >= chunk.start // group.block_size * group.block_size
            seats = np.full(int(is_own.sum()), batch.seats[row])
            slots = seats * group.block_size + positions[is_own] % group.block_size
            if not self._is_right(opened, chunk, positions[is_own], slots):
                return
            if index not in self._writes_at_once:
                positions = positions[~is_own]
        if len(positions) == 0:
            return
        slots = group.slots(batch.block_tables[row], positions)
        if self._is_right(group, chunk, positions, slots):
            self._check_holders(group, chunk, positions, slots)

    def _is_right(self, group: ShadowSlots, chunk: Chunk, positions: I64, slots: I64) -> bool:
        """Whether slots hold what the tokens ask for at these positions; names the first that does not."""
        wanted = self.path(chunk.seq, chunk.start)[positions]
        wrong = np.flatnonzero(group.content[slots] != wanted)
        if len(wrong):
            first = int(wrong[0])
            self._name_read(
                group, chunk, int(positions[first]), int(slots[first]), int(wanted[first])
            )
        return len(wrong) == 0

    def _check_holders(self, group: ShadowSlots, chunk: Chunk, positions: I64, slots: I64) -> None:
        """The blocks that are read are held by somebody, and were written under the sequence's own salt."""
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
        self, group: ShadowSlots, chunk: Chunk, position: int, slot: int, wanted: int
    ) -> None:
        """Say why a slot does not hold what the sequence's tokens ask for."""
        block, content = slot // group.block_size, int(group.content[slot])
        is_page = group in self._groups.values()
        here = f"position {position} ({'block' if is_page else 'open block of seat'} {block})"
        is_lost = position < self._resumed_at.get(chunk.seq.seq_id, 0) or (
            content == UNWRITTEN and position < self._lost_up_to.get(chunk.seq.seq_id, 0)
        )
        if is_lost:
            fault = Fault.TOKENS_LOST
            held = self._describe(content)
            said = f"{here} was not computed again when the request resumed, and holds {held}"
        elif (is_page and block == 0) or (content == UNWRITTEN and group.before[slot] == wanted):
            fault, said = Fault.BLOCK_OWNER, f"{here} has been given back and is still read"
        elif is_page and group.copied_from[slot] and group.before[slot] != wanted:
            fault = Fault.TAIL_TOO_FAR
            said = (
                f"{here} was copied from block {int(group.copied_from[slot])}, which holds "
                f"{self._describe(content)} there"
            )
        elif content == UNWRITTEN:
            fault, said = Fault.UNWRITTEN, f"{here} counts as computed and nobody has written it"
        elif group.before[slot] == wanted:
            by = self._writers[int(group.writer[slot])]
            is_sibling = (
                by.request_id == chunk.seq.request.request_id and by.seq_id != chunk.seq.seq_id
            )
            fault = Fault.FORK if is_sibling else Fault.BLOCK_OWNER
            said = (
                f"{here} was right, and {by.name} has overwritten it with {self._describe(content)}"
            )
        else:
            by = self._writers[int(group.writer[slot])]
            is_sibling = (
                by.request_id == chunk.seq.request.request_id and by.seq_id != chunk.seq.seq_id
            )
            fault = Fault.FORK if is_sibling else Fault.WRONG_PREFIX
            said = f"the table leads {here} to {self._describe(content)}, written by {by.name}"
        self._note(fault, chunk, position, said)

    def _check_distinct(self, batch: AttendBatch, chunks: Sequence[Chunk]) -> None:
        """No two rows of a step write one slot, and no two sequences have one seat."""
        sequence_of_row = np.repeat(np.arange(len(chunks)), np.diff(batch.cu_seqlens_q))
        places = [(batch.slot_mapping, sequence_of_row)]
        if batch.seats is not None:
            places.append((batch.seats.astype(np.int64), np.arange(len(chunks))))
        for targets, owners in places:
            distinct, counts = np.unique(targets, return_counts=True)
            if not (counts > 1).any():
                continue
            both = np.flatnonzero(targets == distinct[np.argmax(counts > 1)])[:2]
            first, second = (chunks[int(owners[row])] for row in both)
            is_sibling = first.seq.request is second.seq.request
            self._note(
                Fault.FORK if is_sibling else Fault.BLOCK_OWNER,
                second,
                second.start,
                f"it writes into the same slot as request {first.seq.request.request_id} in one step",
            )

    def _write(self, index: int, batch: AttendBatch, row: int, chunk: Chunk) -> None:
        group = self._groups[index]
        rows = slice(int(batch.cu_seqlens_q[row]), int(batch.cu_seqlens_q[row + 1]))
        slots = batch.slot_mapping[rows]
        content = self.path(chunk.seq, chunk.start + chunk.length)[chunk.start :]
        if len(slots) != len(content):
            return
        blocks = np.unique(slots // group.block_size)
        self._check_writable(chunk, index, blocks)
        if index in self._open:
            assert batch.seats is not None
            self._write_open(index, batch.block_tables[row], int(batch.seats[row]), chunk)
        if index not in self._open or index in self._writes_at_once:
            group.write(slots, content, self.writer_of(chunk.seq))

    def _write_open(self, index: int, table: I32, seat: int, chunk: Chunk) -> None:
        """A narrow layer's append: whole blocks into their pages, the rest into the seat's open block."""
        group, opened, size = self._groups[index], self._open[index], self._groups[index].block_size
        start, end = chunk.start, chunk.start + chunk.length
        own, writer = self.path(chunk.seq, end), self.writer_of(chunk.seq)
        sealed = np.arange(start // size * size, end // size * size)
        if index not in self._writes_at_once and len(sealed):
            content, slots = own[sealed].copy(), group.slots(table, sealed)
            kept_slots = slice(seat * size, seat * size + min(start % size, len(sealed)))
            num_kept = kept_slots.stop - kept_slots.start
            content[:num_kept] = opened.content[kept_slots]
            group.write(slots, content, writer)
            group.writer[slots[:num_kept]] = opened.writer[kept_slots]
        kept = np.arange(max(start, end // size * size), end)
        opened.write(seat * size + kept % size, own[kept], writer)

    def _check_writable(self, chunk: Chunk, group_index: int, blocks: I64) -> None:
        refs, nodes = self._pool.refs(), self._pool.nodes()
        for block in blocks.tolist():
            holders = [
                seq
                for seq in self._pool.running()
                if seq is not chunk.seq and block in seq.tables[group_index].blocks
            ]
            fault = Fault.BLOCK_OWNER
            if block == 0 or refs[block] <= 0:
                said = f"it writes into block {block}, which it does not hold"
            elif nodes[block]:
                said = f"it writes into block {block}, which is sealed"
            elif holders:
                said = f"it writes into block {block}, which is also request {_name(holders[0])}'s"
                fault = Fault.FORK if holders[0].request is chunk.seq.request else Fault.BLOCK_OWNER
            else:
                continue
            self._note(fault, chunk, chunk.start, said)

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
            Violation(
                fault,
                request_id,
                position,
                f"request {request_id}, position {position}: {sentence}",
            )
        )


def _name(seq: TokenSequence) -> str:
    sample = f" (sample {seq.sample_index})" if seq.sample_index else ""
    return seq.request.request_id + sample
