"""What could have gone wrong with one sequence, as replays: each fault under its own semantics.

A hypothesis says in numbers what a fault would do to the sequence at hand: which positions its rows would be
rotated to, which keys they would see, whose content they would find. `diagnose` runs them without a cache and
keeps the one whose logits are those that the engine gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvern.check.dense import Replay, Swap
from kvern.check.names import Fault

I64 = npt.NDArray[np.int64]
MAX_SOURCES = 6
"""Other runs that are tried as the origin of wrong content."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A fault and the pass that would show it.

    Attributes:
        shift: row ``p + shift`` of the replay is position ``p``.
        only: the one position that it speaks of; None: all from the first wrong one on.
    """

    fault: Fault
    sentence: str
    replay: Replay
    shift: int = 0
    only: int | None = None


@dataclass(frozen=True, slots=True)
class Other:
    """Another run that was in the engine: whose content could have come into the sequence's view."""

    name: str
    tokens: tuple[int, ...]
    is_sibling: bool


@dataclass(frozen=True, slots=True)
class Suspect:
    """A sequence with wrong logits.

    Attributes:
        tokens: all tokens computed for it.
        num_prompt_tokens: how many of them are the prompt.
        chunks: (start, length) in the order of computing; positions before the first start were found.
        first_wrong: first position whose logits are wrong.
        block_size: tokens per block.
        others: other runs of the engine.
        was_resumed: it was preempted and computed again.
    """

    tokens: tuple[int, ...]
    num_prompt_tokens: int
    chunks: tuple[tuple[int, int], ...]
    first_wrong: int
    block_size: int
    others: tuple[Other, ...]
    was_resumed: bool

    @property
    def num_found(self) -> int:
        """Positions taken from the cache at first."""
        return self.chunks[0][0] if self.chunks else 0

    def chunk_starts(self) -> I64:
        """First position of the chunk that computed each position last, its own where none did."""
        starts = np.arange(len(self.tokens))
        for start, length in self.chunks:
            starts[start : start + length] = start
        return starts

    def chunk_ends(self) -> I64:
        """Last position of the chunk that computed each position last."""
        ends = np.arange(len(self.tokens))
        for start, length in self.chunks:
            ends[start : start + length] = start + length - 1
        return ends


def hypotheses(suspect: Suspect) -> Iterator[Hypothesis]:
    """All that apply, likely ones first."""
    yield from _masks(suspect)
    yield from _positions(suspect)
    yield from _last_token(suspect)
    yield from _lost_tokens(suspect)
    yield from _tails(suspect)
    yield from _foreign_blocks(suspect)
    yield from _empty_blocks(suspect)


def _ints(values: I64) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _masks(suspect: Suspect) -> Iterator[Hypothesis]:
    index, starts, ends = (
        np.arange(len(suspect.tokens)),
        suspect.chunk_starts(),
        suspect.chunk_ends(),
    )
    replay = Replay(suspect.tokens)
    is_long = ends > starts
    behind = index - starts
    variants = {
        "several tokens that meet a filled cache see keys from the front: row i of a chunk sees the first "
        "i + 1 keys (top-left alignment) instead of all keys up to its own (bottom-right)": (
            np.where(is_long, behind, index),
            None,
        ),
        "every chunk sees keys from the front only (top-left alignment), single tokens too": (
            behind,
            None,
        ),
        "a chunk sees only its own tokens and none of the cache": (None, starts),
        "a token sees the tokens that follow it in its chunk": (ends, None),
        "a token does not see itself": (np.maximum(index - 1, 0), None),
    }
    for sentence, (end, start) in variants.items():
        if end is not None and not np.array_equal(end, index):
            yield Hypothesis(Fault.MASK, sentence, Replay(suspect.tokens, mask_end=_ints(end)))
        elif start is not None and start.any():
            yield Hypothesis(Fault.MASK, sentence, Replay(replay.tokens, mask_start=_ints(start)))


def _positions(suspect: Suspect) -> Iterator[Hypothesis]:
    index, starts, ends = (
        np.arange(len(suspect.tokens)),
        suspect.chunk_starts(),
        suspect.chunk_ends(),
    )
    prompt, found = suspect.num_prompt_tokens, suspect.num_found
    is_decode, is_long = index >= prompt, ends > starts
    variants = {
        "positions restart at 0 with every chunk": index - starts,
        "positions restart at 0 with every chunk of several tokens": np.where(
            is_long, index - starts, index
        ),
        "positions restart at 0 where decoding begins": np.where(is_decode, index - prompt, index),
        "positions restart at 0 behind the part found in the cache": np.where(
            index >= found, index - found, index
        ),
        "positions are one too high where decoding begins": np.where(is_decode, index + 1, index),
        "positions are one too low where decoding begins": np.where(is_decode, index - 1, index),
        "positions stand still where decoding begins": np.where(is_decode, prompt, index),
    }
    for sentence, rope in variants.items():
        positions = _ints(np.maximum(rope, 0))
        if positions == _ints(index):
            continue
        for mask_end in ((), positions):
            yield Hypothesis(
                Fault.POSITIONS,
                sentence + (", and the mask follows them" if mask_end else ""),
                Replay(suspect.tokens, rope=positions, mask_end=mask_end),
            )


def _last_token(suspect: Suspect) -> Iterator[Hypothesis]:
    """After a full hit the row of the last prompt token is another row."""
    tokens, prompt = suspect.tokens, suspect.num_prompt_tokens
    last = prompt - 1
    if suspect.first_wrong != last or suspect.num_found < last or last < 1:
        return
    yield Hypothesis(
        Fault.LAST_TOKEN,
        f"after a full hit the logits of position {last - 1} stand for those of the last prompt token "
        f"at {last}",
        Replay(tokens),
        shift=-1,
        only=last,
    )
    yield Hypothesis(
        Fault.LAST_TOKEN,
        f"after a full hit the last prompt token is computed a second time, as position {prompt}",
        Replay(tokens[:prompt] + tokens[last:]),
        shift=1,
        only=last,
    )
    yield Hypothesis(
        Fault.LAST_TOKEN,
        f"after a full hit the token at {last - 1} is computed in place of the last prompt token",
        Replay((*tokens[:last], tokens[last - 1], *tokens[prompt:])),
        only=last,
    )


def _lost_tokens(suspect: Suspect) -> Iterator[Hypothesis]:
    if not suspect.was_resumed:
        return
    first, prompt = suspect.first_wrong, suspect.num_prompt_tokens
    for count in range(1, min(first - prompt, 8) + 1):
        start, stop = first - count, first
        yield Hypothesis(
            Fault.TOKENS_LOST,
            f"the request resumed without its tokens at positions {start}..{stop - 1}",
            Replay(suspect.tokens[:start] + suspect.tokens[stop:]),
            shift=-count,
        )


def _swaps(
    suspect: Suspect, other: Other | None, spans: Iterator[tuple[int, int]]
) -> Iterator[Swap]:
    """Swaps whose content the other run has, seen from the first wrong row on.

    A sibling may have written the row's own position too, just before the row attended.
    """
    limit = len(suspect.tokens) if other is not None and other.is_sibling else suspect.first_wrong
    for start, stop in spans:
        stop = min(stop, limit, len(other.tokens) if other else stop)
        if start < stop:
            source = None if other is None else other.tokens
            yield Swap(suspect.first_wrong, start, stop, source, start)


def _blocks(suspect: Suspect) -> Iterator[tuple[int, int]]:
    """Blocks before the first wrong row, nearest last."""
    size = suspect.block_size
    for start in range(0, suspect.first_wrong, size):
        yield start, start + size


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = min(len(a), len(b))
    unequal = np.flatnonzero(np.array(a[:length]) != np.array(b[:length]))
    return int(unequal[0]) if len(unequal) else length


def _tails(suspect: Suspect) -> Iterator[Hypothesis]:
    """The copied beginning of a block reaches into where the two runs differ."""
    found = suspect.num_found
    for other in suspect.others[:MAX_SOURCES]:
        shared = common_length(suspect.tokens, other.tokens)
        if other.is_sibling or not 0 < shared < suspect.first_wrong + 1:
            continue
        limit = min((shared // suspect.block_size + 1) * suspect.block_size, shared + 4)
        spans = {(shared, max(found, shared))} | {
            (shared, stop) for stop in range(shared + 1, limit + 1)
        }
        for swap in _swaps(suspect, other, iter(sorted(spans))):
            yield Hypothesis(
                Fault.TAIL_TOO_FAR,
                f"positions {swap.start}..{swap.stop - 1} hold what {other.name} has there: the runs part at "
                f"{shared} and the copied tail goes further",
                Replay(suspect.tokens, swap=swap),
            )


def _foreign_blocks(suspect: Suspect) -> Iterator[Hypothesis]:
    for other in suspect.others[:MAX_SOURCES]:
        own = suspect.num_prompt_tokens
        spans = list(_blocks(suspect))
        if other.is_sibling:
            spans = [(own, len(suspect.tokens)), (own, suspect.first_wrong), *spans]
        else:
            spans.insert(0, (0, suspect.num_found))
        for swap in _swaps(suspect, other, iter(spans)):
            if suspect.tokens[: swap.stop] == other.tokens[: swap.stop]:
                continue
            if other.is_sibling:
                fault, how = Fault.FORK, "its sibling has written there"
            else:
                fault, how = Fault.WRONG_PREFIX, "its table leads to another request's block"
            yield Hypothesis(
                fault,
                f"positions {swap.start}..{swap.stop - 1} hold the keys and values of {other.name}: {how}",
                Replay(suspect.tokens, swap=swap),
            )


def _empty_blocks(suspect: Suspect) -> Iterator[Hypothesis]:
    spans = [(0, suspect.num_found), *_blocks(suspect)]
    for swap in _swaps(suspect, None, iter(spans)):
        fault = Fault.TOKENS_LOST if suspect.was_resumed else Fault.UNWRITTEN
        yield Hypothesis(
            fault,
            f"positions {swap.start}..{swap.stop - 1} hold zeros: they count as computed and nobody wrote them",
            Replay(suspect.tokens, swap=swap),
        )
