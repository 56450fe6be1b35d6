"""One case: what it does, and the sheet on which its sessions and notes are collected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvern.check.compare import NO_DIFFERENCE
from kvern.check.lab import Lab
from kvern.check.names import Fault, Finding
from kvern.check.session import Session


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison, carried out by `run` on a fresh sheet.

    Attributes:
        name: stable short name.
        title: what is compared, in words.
        run: drives engines; whatever they compute is compared afterwards.
    """

    name: str
    title: str
    run: Callable[[Sheet], None]


class CaseSkippedError(Exception):
    """The case cannot apply to this model or these settings; says why."""


class Sheet:
    """What happens during one case.

    Attributes:
        lab: makes engines.
        sessions: all engines of the case, in order.
        findings: what the case itself noted, beside what its sessions hold.
        notes: what happened, for people.
        num_compared: positions compared by the case itself, beside the rows of its sessions.
        difference: the largest among those, at `position`.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.sessions: list[Session] = []
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.num_compared = 0
        self.difference = NO_DIFFERENCE
        self.position: int | None = None

    def session(self, num_tokens: int, **settings: Any) -> Session:
        """A new engine; see `Lab.session`. The one before it must be finished."""
        session = self.lab.session(num_tokens, **settings)
        self.sessions.append(session)
        return session

    def prepare(self, *runs: Sequence[int]) -> None:
        """Have the uncached rows of some runs computed beforehand, so that equal rows need no copy."""
        for run in runs:
            self.lab.uncached.prepare(run)

    def note(self, text: str) -> None:
        """Add to the case's note."""
        self.notes.append(text)

    def find(self, fault: Fault, sentence: str, basis: str = "comparison") -> None:
        """Name a fault."""
        self.findings.append(Finding(fault, sentence, basis))

    def expect_hit(self, session: Session, name: str, least: int, num_prompt: int) -> None:
        """A finished request found at least so much, and not its last prompt token.

        Named `Fault.NO_HIT` otherwise: a cache that finds nothing proves nothing.
        """
        found = session.cached_tokens(name)
        self.note(f"{name} hit {found} of {num_prompt} tokens")
        if found < least:
            self.find(
                Fault.NO_HIT,
                f"request {name} found {found} of its {num_prompt} prompt tokens in the cache, and at least "
                f"{least} were stored",
                "counters",
            )
        elif found >= num_prompt:
            self.find(
                Fault.LAST_TOKEN,
                f"request {name} took all of its {num_prompt} prompt tokens from the cache, so nothing was "
                "left to compute its logits from",
                "counters",
            )
