"""Requests, the sequences they are made of, and the block tables of those sequences."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvern.errors import InputError

if TYPE_CHECKING:
    from kvern.core.book import SequenceBook

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Media:
    """A run of prompt positions whose content is not given by their token ids.

    Attributes:
        start: first position.
        length: number of positions.
        digest: content hash of what lies there (image, audio, embeddings).
    """

    start: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a caller wants.

    Attributes:
        request_id: unique among live requests.
        prompt: token ids, at least one.
        max_tokens: tokens to generate at most; None: as many as context and pool allow; 0 only
            with `needs_all_logits`.
        stop_token_ids: a sample ends after any of these (end-of-sequence tokens included).
        n: number of samples, all sharing the prompt; of a beam search, how many are returned.
        beam_width: 0, or the number of beams.
        beam_length_penalty: a beam's score is its log-probability / length ** penalty.
        priority: lower starts earlier and is preempted later.
        arrival: seconds on the scheduler's clock; None: the time it is added.
        cache_salt: only requests with the same salt share blocks.
        adapter: name and version of the adapter, part of every hash.
        position_regime: how positions become rotations, where a request can change it.
        media: content that token ids do not give, ordered by start.
        needs_all_logits: logits of every prompt position are wanted, so no hit is taken.
        ignore_cache: take no hit, for comparisons; blocks are stored as usual.
        sampling: for the executor; the bookkeeping does not look inside.
    """

    request_id: str
    prompt: SequenceOf[int] | Int32
    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    n: int = 1
    beam_width: int = 0
    beam_length_penalty: float = 1.0
    priority: int = 0
    arrival: float | None = None
    cache_salt: str | None = None
    adapter: str | None = None
    position_regime: str = "default"
    media: tuple[Media, ...] = ()
    needs_all_logits: bool = False
    ignore_cache: bool = False
    sampling: Any = None

    def __post_init__(self) -> None:
        """Refuse what no scheduler could serve."""
        if len(self.prompt) == 0:
            raise InputError("the prompt is empty; give at least one token")
        if self.n < 1:
            raise InputError(f"n is {self.n}; it must be at least 1")
        if self.beam_width < 0 or 0 < self.beam_width < self.n:
            raise InputError(
                f"beam_width {self.beam_width} cannot return {self.n} beams; make it at least n"
            )
        least = 0 if self.needs_all_logits else 1
        if self.max_tokens is not None and self.max_tokens < least:
            raise InputError(f"max_tokens is {self.max_tokens}; it must be at least {least}")


def token_array(request: Request) -> Int32:
    """The prompt as int32.

    Raises:
        InputError: something in it is not a token id.
    """
    tokens = np.asarray(request.prompt)
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        raise InputError("the prompt is not a list of token ids")
    if tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max:
        raise InputError("a token id of the prompt is out of range")
    return tokens.astype(np.int32)


class Table:
    """Block ids of one sequence in one KV group.

    In an attention group entry `i` names the block of positions `i * block_size` and following;
    0 (the null block) where the block has left the reach. In a state group the entries are the
    pages of the sequence's one state, in order.
    """

    __slots__ = ("_ids", "first_live", "num_blocks")

    def __init__(self, capacity: int = 16) -> None:
        self._ids: Int32 = np.zeros(max(capacity, 4), np.int32)
        self.num_blocks = 0
        self.first_live = 0  # entries before it are 0, sinks apart

    @property
    def blocks(self) -> Int32:
        """Block id per absolute block index, int32 `[num_blocks]`; a view, never to be written."""
        return self._ids[: self.num_blocks]

    def append(self, block: int) -> None:
        """Add one block at the end."""
        if self.num_blocks == len(self._ids):
            self._grow(self.num_blocks + 1)
        self._ids[self.num_blocks] = block
        self.num_blocks += 1

    def extend(self, blocks: Int32) -> None:
        """Add blocks at the end."""
        end = self.num_blocks + len(blocks)
        if end > len(self._ids):
            self._grow(end)
        self._ids[self.num_blocks : end] = blocks
        self.num_blocks = end

    def replace(self, index: int, block: int) -> None:
        """Name another block (or 0) at `index`."""
        self._ids[index] = block

    def forget(self, start: int, stop: int) -> None:
        """Set a run of entries to 0: their blocks have left the reach."""
        self._ids[start:stop] = 0
        self.first_live = stop

    def clear(self) -> None:
        """Forget every entry."""
        self.num_blocks = 0
        self.first_live = 0

    def _grow(self, least: int) -> None:
        ids = np.zeros(max(least, 2 * len(self._ids)), np.int32)
        ids[: self.num_blocks] = self._ids[: self.num_blocks]
        self._ids = ids


class Sequence:
    """One run of tokens with its own tables: a request has one, or one per sample or beam.

    Attributes:
        seq_id: unique within the scheduler.
        request: what it works for.
        sample_index: its place among the request's samples (a beam's place is provisional).
        num_tokens: prompt and generated tokens so far.
        num_prompt_tokens: tokens of the prompt.
        num_computed_tokens: leading tokens whose keys and values (or state) are in the cache.
        tables: one per KV group.
        logprob: sum of the log-probabilities of the generated tokens.
        regime: the position regime of its keys: 0 up to `regime_border` tokens; see `kvern.spec.regimes`.
        seat: its place among the running sequences, which is the place of its open blocks in narrow
            formats; -1 while it waits.
    """

    __slots__ = (
        "_tokens",
        "book",
        "logprob",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "regime",
        "request",
        "sample_index",
        "seat",
        "seq_id",
        "tables",
    )

    def __init__(
        self, seq_id: int, request: Request, tokens: Int32, num_groups: int, sample_index: int = 0
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.sample_index = sample_index
        self.num_tokens = len(tokens)
        self.num_prompt_tokens = len(request.prompt)
        self.num_computed_tokens = 0
        self._tokens: Int32 = np.empty(len(tokens) + 64, np.int32)
        self._tokens[: len(tokens)] = tokens
        self.tables = [Table() for _ in range(num_groups)]
        self.logprob = 0.0
        self.regime = 0
        self.seat = -1
        self.book: SequenceBook  # the scheduler's own notes, set when it accepts the sequence

    def token_ids(self, start: int, stop: int) -> Int32:
        """Token ids of positions `start .. stop - 1`, int32; a view, never to be written."""
        return self._tokens[start:stop]

    @property
    def generated_token_ids(self) -> Int32:
        """The tokens after the prompt, int32; a view, never to be written."""
        return self._tokens[self.num_prompt_tokens : self.num_tokens]

    @property
    def num_generated_tokens(self) -> int:
        """Tokens after the prompt."""
        return self.num_tokens - self.num_prompt_tokens

    def append_token(self, token_id: int) -> None:
        """Add a chosen token; it is not yet computed."""
        if self.num_tokens == len(self._tokens):
            tokens: Int32 = np.empty(2 * self.num_tokens, np.int32)
            tokens[: self.num_tokens] = self._tokens
            self._tokens = tokens
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
