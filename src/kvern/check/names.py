"""The faults that the doctor knows by name, and what it hands out when it finds one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """A kind of cache fault; the value is what ``--json`` shows."""

    POSITIONS = "positions"
    MASK = "mask"
    WRONG_PREFIX = "wrong_prefix"
    RANDOMNESS = "hidden_randomness"
    BLOCK_OWNER = "block_owner"
    LAST_TOKEN = "last_token"
    TAIL_TOO_FAR = "tail_too_far"
    UNWRITTEN = "unwritten"
    TOKENS_LOST = "tokens_lost"
    FORK = "fork"
    SALT = "salt"
    RECORDING = "recording"
    ROUNDING = "rounding"
    NOT_FINITE = "not_finite"
    DEGENERATE = "degenerate"
    FULL_PASS = "full_pass"
    DISAGREES = "disagrees"
    NO_RESULT = "no_result"
    NO_HIT = "no_hit"
    LEAK = "leak"
    INVARIANT = "invariant"
    ACCOUNTING = "accounting"
    UNEXPLAINED = "unexplained"


TITLES: dict[Fault, str] = {
    Fault.POSITIONS: "positions restart or shift",
    Fault.MASK: "the mask is not aligned to the end of the cache",
    Fault.WRONG_PREFIX: "a wrong prefix is reused",
    Fault.RANDOMNESS: "hidden randomness",
    Fault.BLOCK_OWNER: "a block outlives or changes its owner",
    Fault.LAST_TOKEN: "the last prompt token is not computed after a full hit",
    Fault.TAIL_TOO_FAR: "a partial tail is copied too far",
    Fault.UNWRITTEN: "blocks are read before anybody has written them",
    Fault.TOKENS_LOST: "a resumed request has lost tokens",
    Fault.FORK: "a fork writes into its sibling's block",
    Fault.SALT: "the cache salt is ignored",
    Fault.RECORDING: "a step that is repeated from a recording is not the step itself",
    Fault.ROUNDING: "the last bits depend on what else is computed beside a token",
    Fault.NOT_FINITE: "logits are not finite",
    Fault.DEGENERATE: "logits do not depend on the tokens",
    Fault.FULL_PASS: "the full pass itself is wrong",
    Fault.DISAGREES: "another library computes other logits",
    Fault.NO_RESULT: "requests end without a result",
    Fault.NO_HIT: "the cache does not find what it has stored",
    Fault.LEAK: "blocks are still held after all requests ended",
    Fault.INVARIANT: "pool, tables and index disagree",
    Fault.ACCOUNTING: "counters do not add up",
    Fault.UNEXPLAINED: "no known fault explains the difference",
}
"""One short clause per fault, for people."""

CONSEQUENCES: tuple[frozenset[Fault], ...] = (
    frozenset({Fault.LEAK}),
    frozenset({Fault.INVARIANT, Fault.ACCOUNTING, Fault.ROUNDING, Fault.NO_HIT}),
    frozenset({Fault.NOT_FINITE, Fault.NO_RESULT, Fault.UNEXPLAINED}),
)
"""What a fault not named here brings with it, what each of these brings with it, and so on."""

CAUSES = frozenset(Fault) - frozenset[Fault]().union(*CONSEQUENCES)
"""Faults that need no further explanation."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, named.

    Attributes:
        fault: its kind.
        sentence: what was seen, with the numbers: request, position, block.
        basis: how it was found: ``bookkeeping`` (the record of what each slot really holds), ``replay``
            (a computation without a cache that makes the same mistake gives the same logits),
            ``checksum``, ``comparison``, ``counters``.
        exactness: of a replay, the share of the difference that it leaves unexplained.
    """

    fault: Fault
    sentence: str
    basis: str
    exactness: float | None = None

    @property
    def title(self) -> str:
        """The fault in words."""
        return TITLES[self.fault]


def causes(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings that no other one of the same case accounts for."""
    for faults in (CAUSES, *CONSEQUENCES):
        found = tuple(finding for finding in findings if finding.fault in faults)
        if found:
            return found
    return ()


def rank_of(fault: Fault) -> int:
    """0 for causes, then one more for each group of consequences."""
    groups = (CAUSES, *CONSEQUENCES)
    return next(rank for rank, faults in enumerate(groups) if fault in faults)
