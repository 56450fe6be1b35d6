"""The report as one HTML file: numbers, plots, the formula, warnings. Nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from kvern.errors import KvernError
from kvern.plan.capacity import plan
from kvern.plan.explain import Matrix, explained, formatted_model, matrix_for
from kvern.plan.lengths import Concurrency, Utilisation
from kvern.plan.need import ENGINE_FORMATS, FORMATS
from kvern.plan.result import Plan
from kvern.plan.roofline import DecodeBound
from kvern.plan.svg import Bar, Line, line_chart, stacked_bars
from kvern.spec.budget import format_size

NARROW_FORMATS = ("k8v4", "kivi2")
"""Formats of kvern that are drawn beside those which the search for a set-up tries."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5d6670; --rule: #d9dee3;
  --paper: #ffffff; --panel: #f5f7f9; --warn: #8a4b00; --warn-bg: #fff4e2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #9aa5b0; --rule: #39424b;
  --paper: #15191d; --panel: #1d2328; --warn: #ffc675; --warn-bg: #33270f; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 780px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
.sub, .note { color: var(--soft); } .figures { display: flex; flex-wrap: wrap; gap: .8rem; }
.figure { background: var(--panel); border-radius: 6px; padding: .6rem .9rem; flex: 1 1 9rem; }
.figure b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.figure span { color: var(--soft); font-size: .85rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; }
.scroll { overflow-x: auto; } ol.steps li { margin: .45rem 0; } ol.steps b { font-weight: 600; }
code { font: 13px/1.4 ui-monospace, monospace; } .warning { background: var(--warn-bg);
  color: var(--warn); border-radius: 6px; padding: .5rem .8rem; margin: .5rem 0; }
svg { width: 100%; height: auto; }
"""


def html_report(
    answer: Plan,
    bound: DecodeBound | None = None,
    concurrency: Concurrency | None = None,
    utilisation: Utilisation | None = None,
) -> str:
    """A self-contained report of an answer, with plots."""
    request = answer.request
    title = f"{request.model.name} on {answer.engine} {answer.engine_version}"
    body = [f"<h1>{escape(title)}</h1>", f'<p class="sub">{escape(_setting(answer))}</p>']
    body.append(_figures(answer))
    body += [f'<p class="warning">{escape(text)}</p>' for text in answer.warnings]
    body += ["<h2>Memory of each rank</h2>", _memory_chart(answer), _rank_table(answer)]
    body += [
        "<h2>Requests at once, by length</h2>",
        '<p class="note">One curve per KV format; both axes are logarithmic. A curve ends at the '
        "longest request that fits.</p>",
        line_chart(format_curves(answer), "tokens of each request", "requests at once"),
    ]
    if concurrency is not None:
        body.append(_lengths_section(concurrency, utilisation))
    if bound is not None:
        body.append(_bound_section(bound))
    matrix = matrix_for(formatted_model(answer), answer.context)
    body += ["<h2>KV bytes by length and batch</h2>", _matrix_table(matrix)]
    body += ["<h2>How the numbers come about</h2>", '<ol class="steps">']
    for step in explained(answer):
        body.append(
            f"<li><b>{escape(step.title)}</b><br><code>{escape(step.formula)} = "
            f"{escape(step.result)}</code></li>"
        )
    body.append("</ol>")
    if answer.assumptions:
        body.append("<h2>Assumptions</h2><ul>")
        body += [f"<li>{escape(text)}</li>" for text in answer.assumptions]
        body.append("</ul>")
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: capacity</title><style>{STYLE}</style></head><body>"
    )
    return head + "\n".join(body) + "</body></html>\n"


def _setting(answer: Plan) -> str:
    request = answer.request
    kv_format = request.kv_format or "the engine's default format"
    parts = [f"{answer.context:,} tokens per request", f"KV in {kv_format}"]
    if request.device is not None:
        parts.insert(0, request.device.name)
    for name, degree in (("TP", request.tp), ("PP", request.pp), ("DP", request.dp),
                         ("DCP", request.dcp)):  # fmt: skip
        if degree > 1:
            parts.append(f"{name} {degree}")
    return ", ".join(parts)


def _figures(answer: Plan) -> str:
    a = answer.allocation
    figures = [
        (f"{a.capacity_tokens:,}", "capacity in tokens"),
        (f"{int(a.max_concurrency * 100) / 100:,.2f}", f"requests of {answer.context:,} tokens"),
        (f"{answer.max_model_len:,}", "longest request"),
        (f"{answer.num_blocks:,}", f"blocks of {format_size(a.block_bytes[answer.tightest_rank])}"),
    ]
    cells = "".join(
        f'<div class="figure"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label in figures
    )
    return f'<div class="figures">{cells}</div>'


def _memory_chart(answer: Plan) -> str:
    bars: list[Bar] = []
    total = answer.request.total_memory or 0
    for rank in answer.per_rank:
        parts = [
            ("weights", rank.weights_bytes or 0),
            ("reserve", rank.reserve_bytes),
            ("KV pool", rank.kv_used_bytes),
            ("unused", max(rank.unused_bytes, 0)),
        ]
        known = sum(size for _, size in parts)
        total = max(total, known)
        if total > known and answer.request.total_memory:
            parts.append(("left to others", total - known))
        bars.append(Bar(f"rank {rank.rank}", tuple((n, s) for n, s in parts if s > 0)))
    return stacked_bars(bars[:16], total)


def _rank_table(answer: Plan) -> str:
    rows = [("rank", "layers", "weights", "reserve", "KV budget", "blocks")]
    uneven = len({rank.num_blocks for rank in answer.per_rank}) > 1
    for rank in answer.per_rank:
        tight = " (tightest)" if uneven and rank.rank == answer.tightest_rank else ""
        rows.append(
            (
                f"{rank.rank}{tight}",
                str(rank.num_layers),
                "unknown" if rank.weights_bytes is None else format_size(rank.weights_bytes),
                format_size(rank.reserve_bytes),
                format_size(rank.kv_budget_bytes),
                f"{rank.num_blocks:,}",
            )
        )
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in body]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _matrix_table(matrix: Matrix) -> str:
    rows = [("tokens", *(f"batch {batch}" for batch in matrix.batches))]
    for length, sizes in zip(matrix.lengths, matrix.bytes, strict=True):
        rows.append((f"{length:,}", *(format_size(size) for size in sizes)))
    return _table(rows)


def _lengths_section(concurrency: Concurrency, utilisation: Utilisation | None) -> str:
    rows = [("probability", "requests at once")]
    rows += [(f"{p:.0%}", f"{n:,}") for p, n in concurrency.fits.items()]
    rows.append(("estimate from the mean length", f"{concurrency.mean_based:,}"))
    parts = ["<h2>Lengths as a distribution</h2>", _table(rows)]
    if utilisation is not None:
        shares = [
            ("reserve the maximum", utilisation.by_maximum),
            ("reserve a power of two", utilisation.by_power_of_two),
            ("reserve the exact length", utilisation.by_exact_length),
            ("pages", utilisation.paging),
        ]
        parts.append(
            _table([("way of reserving", "memory that holds something"),
                    *((name, f"{share:.1%}") for name, share in shares)])
        )  # fmt: skip
    return "".join(parts)


def _bound_section(bound: DecodeBound) -> str:
    rows = [
        ("bound", "per device and step"),
        ("weights read", format_size(bound.weight_bytes)),
        ("KV read", format_size(bound.kv_bytes)),
        ("time by bandwidth", f"{bound.memory_s * 1e3:,.3f} ms"),
        ("time by arithmetic", f"{bound.compute_s * 1e3:,.3f} ms"),
        ("tokens per second, at best", f"{bound.tokens_per_s:,.0f}"),
    ]
    return (
        f"<h2>Decode bound for a batch of {bound.batch}</h2>"
        '<p class="note">A bound, not a promise.</p>' + _table(rows)
    )


def format_curves(answer: Plan, num_points: int = 22) -> list[Line]:
    """Requests at once against their length, for every KV format the engine stores."""
    request = answer.request
    asked = request.kv_format or "auto"
    stored = ENGINE_FORMATS.get(request.engine.lower(), FORMATS)
    if answer.engine == "kvern":
        stored = (*stored, *NARROW_FORMATS)
    formats = list(dict.fromkeys((asked, *stored)))
    if asked == "auto":
        formats = formats[1:]
    limit = max(request.model.max_model_len or answer.context, answer.context)
    lengths = _spread(256, limit, num_points)
    return [Line(name, tuple((n, _requests(answer, name, n)) for n in lengths)) for name in formats]


def _requests(answer: Plan, kv_format: str, num_tokens: int) -> float:
    try:
        asked = replace(answer.request, kv_format=kv_format, context=num_tokens)
        if answer.engine == "llama.cpp":
            asked = replace(asked, slots=1)
        other = plan(asked).allocation
    except KvernError:
        return 0.0
    if answer.engine == "llama.cpp":
        # it allocates what it is asked for: how many such allocations would the budget hold?
        budget = answer.per_rank[answer.tightest_rank].kv_budget_bytes
        return float(budget // max(other.bytes_for_context, 1))
    return other.max_concurrency if other.fits else 0.0


def _spread(low: int, high: int, count: int) -> list[int]:
    if high <= low:
        return [high]
    ratio = (high / low) ** (1 / (count - 1))
    return sorted({round(low * ratio**i) for i in range(count)})
