"""What one step does: the messages between the bookkeeping and whoever carries them out.

    scheduler.plan() -> StepPlan -> executor -> StepResult -> scheduler.commit() -> events

All of them are plain immutable data; named tuples, because a step makes hundreds of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from kvern.core.miss import MissReport
    from kvern.core.sequence import Sequence

Logits = Literal["none", "last", "all"]


class Chunk(NamedTuple):
    """Compute positions `start .. start + length - 1` of one sequence.

    The token ids are `seq.token_ids(start, start + length)`; their keys and values go into the
    slots that `seq.tables` name; everything before `start` is in place once the step's
    operations have run. In a narrow group they go into the sequence's open block (`seq.seat`), and
    every block that is complete with this chunk is sealed into the page that its table names.

    Attributes:
        seq: the sequence, its tables already long enough for the chunk.
        start: first position to compute.
        length: number of positions, at least 1.
        logits: positions whose logits are wanted: none, the last one, or all of them.
        num_samples: tokens to choose from the last position's logits (0: none). A fork point
            asks for `n` independent samples, a beam for its `2 * beam_width` likeliest tokens.

    A preempted request starts again from its first position if all its logits are wanted, so logits
    of a position may come twice, the same both times.
    """

    seq: Sequence
    start: int
    length: int
    logits: Logits
    num_samples: int


class Copy(NamedTuple):
    """Copy the first `num_tokens` slots of page `src` to page `dst`, in every layer of the group.

    In a state group (`num_tokens` 0) the whole page is copied. Narrow layers have nothing in the page
    of a block that is not full: their part of it is a `CopyOpen`.
    """

    src: int
    dst: int
    num_tokens: int
    group: int


class CopyOpen(NamedTuple):
    """Copy the first `num_tokens` slots of one seat's open block to another's, in every narrow layer.

    Seats are those of `Sequence.seat`; `src_seat` may already be another sequence's, which has written
    nothing yet.
    """

    src_seat: int
    dst_seat: int
    num_tokens: int
    group: int


class Zero(NamedTuple):
    """Fill a page with zeros (a state that has seen no token)."""

    block: int
    group: int


BlockOp = Copy | CopyOpen | Zero


class RequestStarted(NamedTuple):
    """A request takes part in a step for the first time.

    Attributes:
        request_id: the request.
        num_cached_tokens: prompt tokens that were found in the cache.
        miss: what was found and why not more.
        queue_s: seconds between its arrival and its start.
    """

    request_id: str
    num_cached_tokens: int
    miss: MissReport
    queue_s: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: `ops` are carried out first and in order, then all `chunks` as one batch.

    Attributes:
        step: number of the step, counting from 1.
        ops: block operations.
        chunks: what to compute, at most one chunk per sequence.
        started: requests that take part for the first time, for whoever watches.
    """

    step: int
    ops: tuple[BlockOp, ...]
    chunks: tuple[Chunk, ...]
    started: tuple[RequestStarted, ...] = ()

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.length for chunk in self.chunks)


class TokenChoice(NamedTuple):
    """A chosen token.

    Attributes:
        token_id: the token.
        logprob: its natural log-probability.
        top: the likeliest alternatives as (token id, log-probability), when asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the executor found.

    Attributes:
        step: the plan's step.
        samples: for each chunk with `num_samples > 0`, in the plan's order, that many choices.
        durations: seconds by name, for statistics.
    """

    step: int
    samples: SequenceOf[SequenceOf[TokenChoice]]
    durations: Mapping[str, float] = field(default_factory=dict)


FinishReason = Literal["stop", "length", "abort", "error"]


class TokenEvent(NamedTuple):
    """A sample of a request grew by one token (beams report only when they finish)."""

    request_id: str
    sample_index: int
    choice: TokenChoice


class SampleFinished(NamedTuple):
    """A sample of a request is complete.

    Attributes:
        request_id: the request.
        sample_index: 0 .. n-1; of a beam search, in order of score, best first.
        reason: "stop" (an end or stop token, or the caller's word), "length", "abort", "error".
        token_ids: the generated tokens, an end token included.
        score: the beam's score, or the sum of log-probabilities.
    """

    request_id: str
    sample_index: int
    reason: str
    token_ids: tuple[int, ...]
    score: float


class RequestFinished(NamedTuple):
    """Every sample of a request is complete and all its blocks are given back.

    Attributes:
        request_id: the request.
        reason: that of its last sample.
        num_prompt_tokens: prompt tokens.
        num_cached_tokens: prompt tokens that were found in the cache when it first started.
        num_generated_tokens: over all samples.
        num_preemptions: how often one of its sequences lost its blocks.
        miss: what was found and why not more; None when it never started.
    """

    request_id: str
    reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    miss: MissReport | None


Event = TokenEvent | SampleFinished | RequestFinished
