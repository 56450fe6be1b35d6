"""Runs all cases on one engine and names what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from kvern.check.against import Oracle
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

LOGIT_CASES = frozenset(
    {"decode", "text", "orders", "join-leave", "full-hit", "partial-tail", "next-turn", "preempt"}
)
"""Cases beside chunks and borders in which another library's passes are compared with."""

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
    _require_room(llm)
    lab = Lab(llm, options or CheckOptions(), tamper, tampers_last=tampers_last)
    return _run(lab, [*foundation_cases(lab), *_chosen(_further_cases(lab), only)], progress)


def check_against(
    llm: LLM,
    oracle: Oracle,
    options: CheckOptions | None = None,
    *,
    progress: Progress | None = None,
    only: Iterable[str] | None = None,
    tamper: Tamper | None = None,
) -> CheckReport:
    """Compare what an engine computes in every way with another library's passes over the same tokens.

    Args:
        llm: a loaded engine with float32 weights, keys and values.
        oracle: the other library with the same model.
        options: what to check.
        progress: told about each case before it runs.
        only: names of cases to run; None for all.
        tamper: breaks every engine that the check makes: to prove that the check sees it.

    Raises:
        UsageError: the context is too short for cases of this block size.
    """
    _require_room(llm)
    lab = Lab(llm, options or CheckOptions(), tamper, oracle=oracle)
    cases = [case for case in _further_cases(lab) if _is_about_logits(case)]
    return _run(lab, _chosen(cases, only), progress)


def _is_about_logits(case: Case) -> bool:
    """Whether a case is worth another library's passes: the rest is about who holds which block."""
    return case.name.startswith(("chunk", "border")) or case.name in LOGIT_CASES


def _run(lab: Lab, cases: list[Case], progress: Progress | None) -> CheckReport:
    started = time.perf_counter()
    results: list[CaseResult] = []
    num_diagnosed = 0
    for case in cases:
        if progress is not None:
            progress(len(results), len(cases), case.title)
        replays = num_diagnosed < MAX_DIAGNOSED and lab.oracle is None
        result = run_case(lab, case, replays=replays)
        num_diagnosed += result.verdict == "fail"
        results.append(result)
    if progress is not None:
        progress(len(cases), len(cases), "done")
    llm, model = lab.llm, lab.llm.model
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
        reference="" if lab.oracle is None else lab.oracle.name,
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
    num_left_out = sum(session.watch.num_unclear for session in sheet.sessions)
    findings += _disagreements(lab, worst)
    if num_compared + num_left_out == 0 and skipped is None and not findings:
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
        num_left_out=num_left_out,
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


def _disagreements(lab: Lab, worst: Row | None) -> list[Finding]:
    """What another library's logits say against the worst row, where that is compared with."""
    if lab.oracle is None or worst is None or worst.difference is None:
        return []
    if worst.difference.is_within(lab.tolerance):
        return []
    sentence = (
        f"{lab.oracle.name} and the engine differ by {worst.difference.relative:.1e} of the range at "
        f"position {worst.position} of request {worst.request_id} ({lab.tolerance:.0e} is allowed)"
    )
    return [Finding(Fault.DISAGREES, sentence, "comparison")]


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
