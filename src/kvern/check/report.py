"""A check's result for people: one line per case, one line per failure, one sentence at the end."""

from __future__ import annotations

from kvern.check.results import CaseResult, CheckReport

MAX_LINES_PER_CASE = 2


def report_lines(report: CheckReport) -> list[str]:
    """The whole report, without line ends."""
    passes = "one full pass without a cache"
    if report.reference:
        passes = f"one pass over the same tokens by {report.reference}"
    demand = f"every logit within {report.tolerance:.0e} of its row's range of {passes}"
    if report.tolerance == 0:
        demand = f"every logit equal, bit for bit, to {passes}"
    return [
        f"model     {report.model}",
        f"engine    {report.backend} ({report.kernel_path}), weights {report.weights_format}, "
        f"KV {report.kv_format}, blocks of {report.block_size}",
        f"demand    {demand}",
        "",
        *_table(report),
        "",
        *_failures(report),
        _verdict(report),
    ]


def _table(report: CheckReport) -> list[str]:
    header = f"{'case':<18} {'positions':>9}  {'largest difference':<26} {'KL':>8}  verdict"
    return [header, "-" * len(header), *(_row(case) for case in report.cases)]


def _row(case: CaseResult) -> str:
    if case.largest == 0:
        difference = "0"
    else:
        difference = f"{case.largest:.2e} ({case.relative:.1e})"
        if case.position is not None:
            difference += f" @{case.position}"
        if case.layer is not None:
            difference += f" L{case.layer}"
    kl = "0" if case.kl == 0 else f"{case.kl:.1e}"
    verdict = case.verdict if case.verdict != "fail" else "FAIL"
    note = f"  {case.note}" if case.note else ""
    return f"{case.name:<18} {case.num_compared:>9,}  {difference:<26} {kl:>8}  {verdict}{note}"


def _failures(report: CheckReport) -> list[str]:
    lines: list[str] = []
    for case in report.cases:
        if case.verdict != "fail":
            continue
        shown = case.causes[:MAX_LINES_PER_CASE]
        for finding in shown:
            lines.append(f"{case.name}: {finding.title}: {finding.sentence} [{finding.basis}]")
        if not shown:
            lines.append(
                f"{case.name}: logits differ from the full pass; the cases above name the cause"
            )
    return [*lines, ""] if lines else []


def _verdict(report: CheckReport) -> str:
    counts = dict.fromkeys(("pass", "fail", "skip"), 0)
    for case in report.cases:
        counts[case.verdict] += 1
    skipped = f", {counts['skip']} skipped" if counts["skip"] else ""
    told = (
        f"{counts['pass']} cases passed, {counts['fail']} failed{skipped}: {report.num_compared:,} positions "
        f"compared in {report.duration_s:.1f} s"
    )
    if report.num_left_out:
        told += f"; {report.num_left_out:,} behind near ties of experts left out"
    if report.is_healthy and report.reference:
        return f"{told}. The answers are those of {report.reference}."
    if report.is_healthy:
        return f"{told}. The answers with the cache are the answers without it."
    named = ", ".join(report.faults) or "nothing was compared"
    return f"{told}. Probable fault: {named}."
