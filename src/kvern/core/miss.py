"""Why a prompt was not found in the cache in full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvern.core.branching import Branch, nearest_branch, other_key
from kvern.core.matching import Match
from kvern.core.sequence import Sequence

if TYPE_CHECKING:
    from kvern.core.state import SchedulerState

MissKind = Literal[
    "never_stored",
    "replaced",
    "cleared",
    "different_key",
    "text_differs",
    "window_not_held",
    "state_not_held",
    "last_token",
    "tail_not_copyable",
    "no_room_to_copy",
    "caching_disabled",
    "cache_not_used",
    "all_logits_needed",
    "asked_to_ignore",
]


@dataclass(frozen=True, slots=True)
class MissReason:
    """One reason.

    Attributes:
        kind: the class of the reason.
        position: the first prompt token that it kept from being found.
        when: of "replaced" and "cleared": seconds on the scheduler's clock.
        age_s: of these: seconds between then and this report.
        stored_token: of "text_differs": the stored token at `position`, None if what is stored
            ends there.
        prompt_token: of "text_differs": the prompt's token at `position`.
        fields: of "different_key": the fields that differ (adapter, cache_salt, ...). Tells that
            other tenants' content exists: show it to the operator, not to the tenant.
        num_tokens: of "different_key": leading prompt tokens that are stored there.
    """

    kind: MissKind
    position: int
    when: float | None = None
    stored_token: int | None = None
    prompt_token: int | None = None
    fields: tuple[str, ...] = ()
    age_s: float | None = None
    num_tokens: int = 0

    def __str__(self) -> str:
        """The reason in plain words."""
        at = f"token {self.position}"
        match self.kind:
            case "replaced" | "cleared":
                return f"from {at} on it was {self.kind} {_duration(self.age_s or 0.0)} ago"
            case "different_key":
                return (
                    f"its first {_tokens(self.num_tokens)} stored under another "
                    f"{', '.join(self.fields)}"
                )
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
    "cache_not_used": "the cache is not used",
    "all_logits_needed": "the logits of every prompt token were asked for",
    "asked_to_ignore": "the request asked for no hit",
}


def _duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for unit, size in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _tokens(count: int) -> str:
    return "token is" if count == 1 else f"{count} tokens are"


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
        yield MissReason("cache_not_used" if state.config.no_cache else "caching_disabled", 0)
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
    """Why the stored path goes no further: the explanation that reaches furthest."""
    index = state.index
    start = len(full.path) * index.span
    if start > full.limit:
        return
    gone = _ghost_reason(state, seq, start)
    if gone is not None:
        yield gone
        return
    branch = nearest_branch(index, seq, full.path, seq.book.root)
    num_elsewhere, fields = other_key(state, seq, branch.num_tokens)
    if fields:
        yield MissReason("different_key", full.num_tokens, fields=fields, num_tokens=num_elsewhere)
    elif branch.num_tokens < seq.num_tokens:
        yield _text_reason(seq, start, branch)


def _ghost_reason(state: SchedulerState, seq: Sequence, start: int) -> MissReason | None:
    """What became of the span behind the stored path, if it is remembered."""
    index, place = state.index, start // state.index.span
    if start + index.span > seq.num_tokens:
        return None
    low, _ = seq.book.hashes.columns(place, place + 1, index.hash_bits)
    ghost = index.ghosts.find(int(low[0]))
    if ghost is None:
        return None
    kind: MissKind = "cleared" if ghost.is_cleared else "replaced"
    return MissReason(kind, start, when=ghost.when, age_s=state.clock() - ghost.when)


def _text_reason(seq: Sequence, start: int, branch: Branch) -> MissReason:
    """What differs behind the stored path."""
    position = branch.num_tokens
    if position == start and (branch.stored_token is None or start == 0):
        return MissReason("never_stored", position)
    return MissReason(
        "text_differs",
        position,
        stored_token=branch.stored_token,
        prompt_token=int(seq.token_ids(position, position + 1)[0]),
    )
