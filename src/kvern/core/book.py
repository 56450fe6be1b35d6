"""The scheduler's private notes about a sequence and about a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvern.core.hashing import HASH_BYTES, UInt64, as_columns, hash_spans
from kvern.core.plan import TokenChoice

if TYPE_CHECKING:
    from kvern.core.miss import MissReport
    from kvern.core.sequence import Int32, Request, Sequence

Rank = tuple[int, float, int, int]
"""(priority, arrival, order of adding, order within the request): smaller goes first."""


class SpanHashes:
    """Chain hashes of a sequence's whole spans, computed as far as they are asked for."""

    __slots__ = ("_hashes", "root")

    def __init__(self, root: bytes) -> None:
        self.root = root
        self._hashes = bytearray()

    def copy(self) -> SpanHashes:
        """An independent continuation."""
        other = SpanHashes(self.root)
        other._hashes = bytearray(self._hashes)
        return other

    def extend(self, seq: Sequence, span: int, count: int) -> None:
        """Make sure that the first `count` spans are hashed."""
        known = len(self._hashes) // HASH_BYTES
        if count > known:
            tokens = seq.token_ids(known * span, count * span)
            media = seq.request.media
            self._hashes += hash_spans(self.at(known - 1), tokens, span, media, known * span)

    def at(self, index: int) -> bytes:
        """Hash of one span; the root's for index -1."""
        if index < 0:
            return self.root
        return bytes(self._hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES])

    def columns(self, start: int, stop: int, hash_bits: int) -> tuple[UInt64, UInt64]:
        """Hashes of a run of spans as two uint64 columns."""
        data = bytes(self._hashes[start * HASH_BYTES : stop * HASH_BYTES])
        return as_columns(data, hash_bits)


@dataclass(slots=True)
class TailSource:
    """Blocks whose first tokens a sequence will copy instead of computing them.

    Attributes:
        blocks: one list per KV group: (table index, source block, tokens to copy); a held
            reference each. In a state group: one entry per page, tokens 0.
        num_tokens: tokens that the copies add to what is computed.
        seat: whose open blocks are copied in narrow groups; -1 if there are none.
    """

    blocks: list[list[tuple[int, int, int]]]
    num_tokens: int
    seat: int = -1


@dataclass(slots=True, eq=False)
class SequenceBook:
    """Notes about one sequence.

    Attributes:
        rank: its place among all sequences.
        record: its request's notes.
        hashes: chain hashes of its spans.
        root: the prefix-tree root of its cache key.
        last_node: the node of its last sealed span, or the root; holds a reference.
        num_sealed: its sealed spans.
        capacity: tokens that its tables have room for.
        next_seal: length at which the next span is whole.
        next_release: length at which a block may leave some group's reach.
        next_event: the smaller of both.
        next_checkpoint: position at which its chunk must stop to keep the state, or a huge one.
        checkpointed: last position at which its state was kept.
        high_water: tokens computed or found at least once in the present position regime.
        short_water: tokens computed or found at least once in the ones before.
        tail: blocks to copy from before it continues.
        num_preemptions: times it lost its blocks.
        blocked_steps: steps that it waited at the head of the queue.
        waits_for: a running sequence that computes its prefix, and the length to wait for.
        is_running: whether it holds blocks and takes part in steps.
        beam_delivered: the beam has handed in its candidates for this round.
        is_private: nothing of it is published; see `kvern.core.regimes`.
    """

    rank: Rank
    record: RequestRecord
    hashes: SpanHashes
    root: int
    last_node: int
    num_sealed: int = 0
    capacity: int = 0
    next_seal: int = 0
    next_release: int = 0
    next_event: int = 0
    next_checkpoint: int = 0
    checkpointed: int = 0
    high_water: int = 0
    short_water: int = 0
    tail: TailSource | None = None
    num_preemptions: int = 0
    blocked_steps: int = 0
    waits_for: tuple[Sequence, int] | None = None
    is_running: bool = False
    beam_delivered: bool = False
    is_private: bool = False


@dataclass(slots=True, eq=False)
class BeamHypothesis:
    """A finished beam."""

    score: float
    logprob: float
    token_ids: tuple[int, ...]
    reason: str


@dataclass(slots=True, eq=False)
class BeamSearch:
    """State of a request's beam search.

    Attributes:
        candidates: what the beams of this round have handed in.
        finished: complete hypotheses, best first, at most `beam_width`.
    """

    candidates: dict[int, tuple[Sequence, list[TokenChoice]]] = field(default_factory=dict)
    finished: list[BeamHypothesis] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Notes about one request.

    Attributes:
        request: the request.
        order: how many requests were added before it.
        arrival: seconds on the scheduler's clock.
        prompt: token ids, int32.
        max_tokens: the limit in force, after clamping.
        live: its unfinished sequences.
        miss: the report of its first start.
        num_cached_tokens: prompt tokens found at the first start.
        num_generated_tokens: over all finished samples.
        num_preemptions: over all its sequences.
        num_ranked: sequences that have been given a rank.
        is_forked: whether its `n` samples have parted.
        beam: its beam search, if it is one.
        last_reason: why its latest sample ended.
        closing: samples to end at the next commit: index (None: all) to reason.
    """

    request: Request
    order: int
    arrival: float
    prompt: Int32
    max_tokens: int
    live: list[Sequence] = field(default_factory=list)
    miss: MissReport | None = None
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_ranked: int = 1
    is_forked: bool = False
    beam: BeamSearch | None = None
    last_reason: str = ""
    closing: dict[int | None, str] = field(default_factory=dict)

    @property
    def is_special(self) -> bool:
        """Whether steps of one token ask for anything but one sample."""
        request = self.request
        if request.needs_all_logits or request.beam_width:
            return True
        return request.n > 1 and not self.is_forked
