"""What a check found: per case, and altogether."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kvern.check.names import Fault, Finding, causes, rank_of

Verdict = Literal["pass", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One comparison, or one set of invariants.

    Attributes:
        name: stable short name.
        title: what is compared, in words.
        verdict: ``skip`` with a note where a case cannot apply to the model or the settings.
        num_compared: positions whose logits were compared with the full pass.
        num_left_out: positions behind a near tie of experts, where a right computation may differ.
        largest: largest absolute logit difference.
        relative: the same as a share of the row's logit range.
        kl: largest Kullback-Leibler divergence, in nats.
        position: where the largest difference is; None without one.
        request: of which request.
        layer: first layer whose hidden states differ there, when layers were traced.
        findings: faults named.
        note: what happened, such as hits and preemptions.
        duration_s: seconds.
    """

    name: str
    title: str
    verdict: Verdict
    num_compared: int = 0
    num_left_out: int = 0
    largest: float = 0.0
    relative: float = 0.0
    kl: float = 0.0
    position: int | None = None
    request: str | None = None
    layer: int | None = None
    findings: tuple[Finding, ...] = ()
    note: str = ""
    duration_s: float = 0.0

    @property
    def causes(self) -> tuple[Finding, ...]:
        """The findings worth a line."""
        return causes(self.findings)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """A whole check.

    Attributes:
        tolerance: share of a row's logit range that a logit may differ by; 0: equal bits.
        kv_format: stored form of keys and values, and so on: the settings that were checked.
        reference: whose passes were compared with; empty: the engine's own, without a cache.
    """

    model: str
    backend: str
    kernel_path: str
    weights_format: str
    kv_format: str
    block_size: int
    tolerance: float
    cases: tuple[CaseResult, ...]
    duration_s: float
    reference: str = ""

    @property
    def is_healthy(self) -> bool:
        """No case failed, and something was compared at all."""
        return self.num_compared > 0 and all(case.verdict != "fail" for case in self.cases)

    @property
    def num_compared(self) -> int:
        """Positions compared over all cases."""
        return sum(case.num_compared for case in self.cases)

    @property
    def num_left_out(self) -> int:
        """Positions left out behind near ties of experts, over all cases."""
        return sum(case.num_left_out for case in self.cases)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Named faults: causes before what follows from them, those of most cases first."""
        counts: dict[Fault, int] = {}
        for case in self.cases:
            for fault in {finding.fault for finding in case.causes}:
                counts[fault] = counts.get(fault, 0) + 1
        return tuple(sorted(counts, key=lambda fault: (rank_of(fault), -counts[fault])))

    def document(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "model": self.model,
            "backend": self.backend,
            "kernel_path": self.kernel_path,
            "weights_format": self.weights_format,
            "kv_format": self.kv_format,
            "block_size": self.block_size,
            "tolerance": self.tolerance,
            "reference": self.reference or "full pass without a cache",
            "healthy": self.is_healthy,
            "faults": [fault.value for fault in self.faults],
            "positions_compared": self.num_compared,
            "positions_left_out": self.num_left_out,
            "duration_s": round(self.duration_s, 3),
            "cases": [_case_document(case) for case in self.cases],
        }


def _case_document(case: CaseResult) -> dict[str, Any]:
    return {
        "name": case.name,
        "title": case.title,
        "verdict": case.verdict,
        "positions_compared": case.num_compared,
        "positions_left_out": case.num_left_out,
        "max_logit_difference": case.largest,
        "max_relative_difference": case.relative,
        "max_kl_divergence": case.kl,
        "position": case.position,
        "request": case.request,
        "layer": case.layer,
        "findings": [
            {
                "fault": finding.fault.value,
                "title": finding.title,
                "sentence": finding.sentence,
                "basis": finding.basis,
                "unexplained_share": finding.exactness,
            }
            for finding in case.findings
        ],
        "note": case.note,
        "duration_s": round(case.duration_s, 3),
    }
