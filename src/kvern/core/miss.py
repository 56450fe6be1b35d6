"""Why a prompt was not found in the cache in full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvern.core.hashing import as_columns, hash_spans
from kvern.core.matching import Match, branch_lengths
from kvern.core.sequence import Sequence

if TYPE_CHECKING:
    from kvern.core.state import SchedulerState

MissKind = Literal[
    "never_stored",
    "replaced",
    "different_key",
    "text_differs",
    "window_not_held",
    "state_not_held",
    "last_token",
    "tail_not_copyable",
    "no_room_to_copy",
    "caching_disabled",
    "all_logits_needed",
    "asked_to_ignore",
]

MAX_KEYS = 32
"""Other cache keys that are tried when nothing at all was found."""


@dataclass(frozen=True, slots=True)
class MissReason:
    """One reason.

    Attributes:
        kind: the class of the reason.
        position: the first prompt token that it kept from being found.
        when: of "replaced": seconds on the scheduler's clock.
        stored_token: of "text_differs": the stored token at `position`, None if what is stored
            ends there.
        prompt_token: of "text_differs": the prompt's token at `position`.
        fields: of "different_key": the fields that differ (adapter, cache_salt, ...). Tells that
            other tenants' content exists: show it to the operator, not to the tenant.
    """

    kind: MissKind
    position: int
    when: float | None = None
    stored_token: int | None = None
    prompt_token: int | None = None
    fields: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The reason in plain words."""
        at = f"token {self.position}"
        match self.kind:
            case "replaced":
                return f"from {at} on it was replaced at {self.when:.3f} s"
            case "different_key":
                return f"the same tokens are stored under another {', '.join(self.fields)}"
            case "text_differs" if self.stored_token is None:
                return f"what is stored ends before {at}"
            case "text_differs":
                return (
                    f"{at} differs: {self.prompt_token} in the prompt, "
                    f"{self.stored_token} in what is stored"
                )
            case _:
                return _WORDS[self.kind].format(at=at)


_WORDS = {
    "never_stored": "from {at} on nothing was ever stored",
    "window_not_held": "the window before {at} is not held any more",
    "state_not_held": "no state is kept at {at} or later",
    "last_token": "the last token is always computed, for its logits",
    "tail_not_copyable": "part of a block at {at} is stored in a form that cannot be copied",
    "no_room_to_copy": "there was no room to copy the part of a block at {at}",
    "caching_disabled": "prefix caching is off",
    "all_logits_needed": "the logits of every prompt token were asked for",
    "asked_to_ignore": "the request asked for no hit",
}


@dataclass(frozen=True, slots=True)
class MissReport:
    """What a request found in the cache when it started, and why not more.

    Attributes:
        num_prompt_tokens: prompt tokens.
        num_cached_tokens: those found, on any tier.
        cached_by_tier: those found per tier; tier 0 is the device.
        reasons: why the rest was not found, the decisive one first.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    cached_by_tier: tuple[tuple[int, int], ...] = ()
    reasons: tuple[MissReason, ...] = ()

    def __str__(self) -> str:
        """The report in plain words."""
        found = f"{self.num_cached_tokens} of {self.num_prompt_tokens} prompt tokens were cached"
        return "; ".join((found, *map(str, self.reasons)))


def explain(state: SchedulerState, seq: Sequence, full: Match, found: Match) -> MissReport:
    """Report on a hit that is about to be taken.

    Args:
        state: the scheduler's state.
        seq: the sequence, before it takes the hit.
        full: the longest hit there is.
        found: the hit that is taken.
    """
    return MissReport(
        seq.num_prompt_tokens,
        found.num_tokens,
        ((0, found.num_tokens),) if found.num_tokens else (),
        tuple(_reasons(state, seq, full, found)),
    )


def _reasons(
    state: SchedulerState, seq: Sequence, full: Match, found: Match
) -> Iterator[MissReason]:
    position = found.num_tokens
    request = seq.request
    if not state.config.shares:
        yield MissReason("caching_disabled", 0)
        return
    if request.needs_all_logits or request.ignore_cache:
        kind: MissKind = "all_logits_needed" if request.needs_all_logits else "asked_to_ignore"
        yield MissReason(kind, 0)
        return
    if position == found.limit:
        yield MissReason("last_token", position)
        return
    if full.num_tokens > position:
        yield MissReason("no_room_to_copy", position)
    if full.lacking == "state" or (state.index.has_states and len(full.path) > full.num_spans):
        yield MissReason("state_not_held", position)
    elif full.lacking == "window":
        yield MissReason("window_not_held", position)
    if full.uncopyable_tokens:
        yield MissReason("tail_not_copyable", position)
    yield from _branch_reasons(state, seq, full)


def _branch_reasons(state: SchedulerState, seq: Sequence, full: Match) -> Iterator[MissReason]:
    """Why the stored path goes no further."""
    index, book = state.index, seq.book
    num_spans = len(full.path)
    start = num_spans * index.span
    if start > full.limit:
        return
    if start + index.span <= seq.num_tokens:
        low, _ = book.hashes.columns(num_spans, num_spans + 1, index.hash_bits)
        when = index.ghosts.replaced_at(int(low[0]))
        if when is not None:
            yield MissReason("replaced", start, when=when)
            return
    parent = int(full.path[-1]) if num_spans else book.root
    stop = min(start + index.span, seq.num_tokens)
    nodes, lengths = branch_lengths(index, seq, parent, start, stop)
    if num_spans == 0 and not (len(lengths) and lengths.max()):
        fields = _other_key(state, seq)
        if fields:
            yield MissReason("different_key", 0, fields=fields)
            return
    if len(nodes) == 0:
        yield MissReason("never_stored", start)
        return
    best = int(np.argmax(lengths))
    length = int(lengths[best])
    position = start + length
    if position >= seq.num_tokens:
        return
    stored = None
    if length < index.tree.num_tokens[nodes[best]]:
        stored = int(index.tree.tokens[nodes[best], length])
    prompt_token = int(seq.token_ids(position, position + 1)[0])
    if length == 0 and (stored is None or num_spans == 0):
        yield MissReason("never_stored", position)
    else:
        yield MissReason("text_differs", position, stored_token=stored, prompt_token=prompt_token)


def _other_key(state: SchedulerState, seq: Sequence) -> tuple[str, ...]:
    """In which fields a cache key differs under which the prompt's beginning is stored."""
    index, request = state.index, seq.request
    own = state.key_of(request)
    if seq.num_tokens < index.span:
        return ()
    tokens = seq.token_ids(0, index.span)
    keys = [key for key in list(index.roots)[-MAX_KEYS:] if key != own]
    if not keys:
        return ()
    roots = np.array([index.roots[key] for key in keys], np.int32)
    names = (
        hash_spans(index.root_hash(root), tokens, index.span, request.media, 0)
        for root in roots.tolist()
    )
    low, high = as_columns(b"".join(names), index.hash_bits)
    found = index.tree.find(roots, low, high, np.broadcast_to(tokens, (len(keys), index.span)))
    places = np.flatnonzero(found)
    return keys[places[0]].differences(own) if len(places) else ()
