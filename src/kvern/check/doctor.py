"""Runs all cases on one engine and names what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from kvern.check.cases_borders import border_cases
from kvern.check.cases_compute import compute_cases
from kvern.check.cases_foundation import foundation_cases
from kvern.check.cases_sharing import sharing_cases
from kvern.check.compare import Difference
from kvern.check.diagnose import diagnose
from kvern.check.lab import CheckOptions, Lab, Tamper
from kvern.check.names import CAUSES, Fault, Finding
from kvern.check.results import CaseResult, CheckReport, Verdict
from kvern.check.session import EngineFailedError, Session
from kvern.check.sheet import Case, CaseSkippedError, Sheet
from kvern.check.watch import Row
from kvern.engine.llm import LLM
from kvern.errors import UsageError

Progress = Callable[[int, int, str], None]
"""Called before each case with (number of finished cases, number of cases, title)."""

MAX_DIAGNOSED = 6
"""Cases whose wrong logits are replayed; the ones after them are counted only."""


def check(
    llm: LLM,
    options: CheckOptions | None = None,
    *,
    progress: Progress | None = None,
    only: Iterable[str] | None = None,
    tamper: Tamper | None = None,
    tampers_last: bool = False,
) -> CheckReport:
    """Compare everything an engine computes with the answer without the cache.

    Args:
        llm: a loaded engine; its weights and settings are used, its own pool stays as it is.
        options: what to check.
        progress: told about each case before it runs.
        only: names of cases to run, the foundation cases always included; None for all.
        tamper: breaks every engine that the check makes: to prove that the check sees it.
        tampers_last: whether the tampering lies around the doctor's own wrappers or within them.

    Raises:
        UsageError: the context is too short for cases of this block size.
    """
    started = time.perf_counter()
    _require_room(llm)
    lab = Lab(llm, options or CheckOptions(), tamper, tampers_last=tampers_last)
    cases = [*foundation_cases(lab), *_chosen(_further_cases(lab), only)]
    results: list[CaseResult] = []
    num_diagnosed = 0
    for case in cases:
        if progress is not None:
            progress(len(results), len(cases), case.title)
        result = run_case(lab, case, replays=num_diagnosed < MAX_DIAGNOSED)
        num_diagnosed += result.verdict == "fail"
        results.append(result)
    if progress is not None:
        progress(len(cases), len(cases), "done")
    model = llm.model
    return CheckReport(
        model=str(model.path),
        backend=model.backend.name,
        kernel_path=model.backend.kernel_path,
        weights_format=llm.settings.weights_format,
        kv_format=llm.settings.kv_format,
        block_size=llm.settings.block_size,
        tolerance=lab.tolerance,
        cases=tuple(results),
        duration_s=time.perf_counter() - started,
    )


def _require_room(llm: LLM) -> None:
    """Cases need sequences of a few blocks."""
    size = llm.settings.block_size
    needed, context = 3 * size + 48, llm.model.max_model_len
    if context < needed:
        raise UsageError(
            f"the cases take sequences of up to {needed:,} tokens in blocks of {size}, and the "
            f"context is {context:,} tokens: choose a smaller block size or a longer context"
        )


def _further_cases(lab: Lab) -> list[Case]:
    return [*compute_cases(lab), *border_cases(lab), *sharing_cases(lab)]


def _chosen(cases: list[Case], only: Iterable[str] | None) -> list[Case]:
    if only is None:
        return cases
    names = set(only)
    return [case for case in cases if case.name in names]


def run_case(lab: Lab, case: Case, *, replays: bool = True) -> CaseResult:
    """Carry out one case, compare, and name what is wrong.

    Args:
        lab: makes engines.
        case: the case.
        replays: whether wrong logits are explained by replays (seconds) or only reported.
    """
    started = time.perf_counter()
    sheet, skipped = _carry_out(lab, case)
    findings = list(sheet.findings)
    worst: Row | None = None
    num_compared = sheet.num_compared
    for number, session in enumerate(sheet.sessions):
        compared = [row for row in session.watch.rows if row.difference is not None]
        num_compared += len(compared)
        if len(compared) < len(session.watch.rows):
            findings.append(
                Finding(
                    Fault.NO_RESULT,
                    "rows could not be compared: the full pass gave none",
                    "comparison",
                )
            )
        findings += session.findings
        worst = _worse(worst, compared)
        is_known = any(finding.fault in CAUSES for finding in session.findings)
        if replays and not is_known:
            findings += diagnose(lab, session, partial(_session_again, lab, case, number))
    if num_compared == 0 and skipped is None and not findings:
        findings.append(
            Finding(Fault.NO_RESULT, "the case compared no position at all", "comparison")
        )
    difference = sheet.difference if worst is None else worst.difference
    assert difference is not None
    return CaseResult(
        name=case.name,
        title=case.title,
        verdict=_verdict(lab, findings, worst, skipped),
        num_compared=num_compared,
        largest=difference.largest,
        relative=difference.relative,
        kl=_largest_kl(sheet, difference),
        position=_position(sheet, worst),
        request=None if worst is None else worst.request_id,
        layer=None if worst is None else worst.first_layer,
        findings=tuple(dict.fromkeys(findings)),
        note="; ".join([*sheet.notes, *([skipped] if skipped else [])]),
        duration_s=time.perf_counter() - started,
    )


def _carry_out(lab: Lab, case: Case) -> tuple[Sheet, str | None]:
    """Run a case and close its sessions; says why it was skipped, if it was."""
    sheet = Sheet(lab)
    skipped: str | None = None
    try:
        case.run(sheet)
    except CaseSkippedError as reason:
        skipped = str(reason)
    except EngineFailedError:
        pass  # the session holds the finding
    except Exception as error:
        sheet.find(
            Fault.NO_RESULT, f"the case could not be carried out: {type(error).__name__}: {error}"
        )
    for session in sheet.sessions:
        session.close()
    return sheet, skipped


def _session_again(lab: Lab, case: Case, number: int, trace_layers: bool) -> Session | None:
    sheet, _ = _carry_out(lab.traced(trace_layers), case)
    return sheet.sessions[number] if number < len(sheet.sessions) else None


def _worse(worst: Row | None, rows: Iterable[Row]) -> Row | None:
    """The row with the largest difference; None while all are equal."""
    for row in rows:
        assert row.difference is not None
        limit = 0.0 if worst is None or worst.difference is None else worst.difference.relative
        if row.difference.relative > limit:
            worst = row
    return worst


def _verdict(lab: Lab, findings: list[Finding], worst: Row | None, skipped: str | None) -> Verdict:
    is_far = (
        worst is not None
        and worst.difference is not None
        and not worst.difference.is_within(lab.tolerance)
    )
    if findings or is_far:
        return "fail"
    return "skip" if skipped is not None else "pass"


def _position(sheet: Sheet, worst: Row | None) -> int | None:
    return sheet.position if worst is None else worst.position


def _largest_kl(sheet: Sheet, difference: Difference) -> float:
    """Over all rows, not only the one with the largest difference."""
    rows = [
        row.difference.kl
        for session in sheet.sessions
        for row in session.watch.rows
        if row.difference
    ]
    return max([difference.kl, *rows])
