"""The document as one HTML file with its charts inside; nothing is fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvern.bench.charts import Bar, Line, bar_chart, line_chart, share_chart
from kvern.bench.text import bottleneck_sentence, kernel_cell, number, quality_sentence, start_line
from kvern.spec.budget import format_size

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5d6670; --rule: #d9dee3; --paper: #fff;
  --warn: #8a4b00; --warn-bg: #fff4e2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #9aa5b0; --rule: #39424b;
  --paper: #15191d; --warn: #ffc675; --warn-bg: #33270f; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 860px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
.soft { color: var(--soft); } .warning { background: var(--warn-bg); color: var(--warn);
  border-radius: 6px; padding: .5rem .8rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; }
.scroll { overflow-x: auto; } svg { width: 100%; height: auto; }
text { font: 12px system-ui, sans-serif; fill: var(--soft); } text.ours { font-weight: 600; fill: var(--ink); }
text.inside { fill: #fff; } .grid { stroke: var(--rule); } .whisker { stroke: var(--ink); opacity: .55; }
.mark { stroke: #a8323e; stroke-dasharray: 4 3; }
"""


def html_report(document: Mapping[str, Any]) -> str:
    """A self-contained page: a chart and a table for each case, bottlenecks, the machine."""
    ours = {engine["label"] for engine in document["engines"] if engine["peer"] == "kvern"}
    title = f"kvern bench: {document['model']['name']}"
    body = [f"<h1>{escape(title)}</h1>", f'<p class="soft">{escape(_setting(document))}</p>']
    if document["quick"]:
        body.append('<p class="warning">A quick run with tiny sizes: the figures mean nothing.</p>')
    body += [f'<p class="warning">{escape(text)}</p>' for text in document["warnings"]]
    for item in document["items"]:
        if item["case"] != "sweep":
            body += _item_section(item, ours)
    body += _sweep_section([item for item in document["items"] if item["case"] == "sweep"], ours)
    body += _bottlenecks(document["items"])
    body += _kernels(document["kernels"])
    if document["cold_start"]:
        body += ["<h2>Cold start</h2>", f"<p>{escape(start_line(document['cold_start']))}</p>"]
    body += _engines(document)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _setting(document: Mapping[str, Any]) -> str:
    machine, limits = document["machine"], document["limits"]
    return (
        f"{machine['cpu']}, {machine['threads']} threads, {document['date']}; medians of "
        f"{document['runs']} interleaved runs, whiskers from the least to the greatest. Limits measured "
        f"beside them: {limits['read_bytes_per_s'] / 1e9:.1f} GB/s of memory reads, "
        f"{limits['int8_ops_per_s'] / 1e9:,.0f} int8, {limits['bf16_ops_per_s'] / 1e9:,.0f} bf16 and "
        f"{limits['fp32_ops_per_s'] / 1e9:,.0f} fp32 GOP/s."
    )


def _item_section(item: Mapping[str, Any], ours: set[str]) -> list[str]:
    bars = [
        Bar(
            engine["label"],
            engine["headline"]["median"],
            engine["headline"]["low"],
            engine["headline"]["high"],
            number(engine["headline"]["median"]),
            engine["label"] in ours,
        )
        for engine in item["engines"]
    ]
    better = "more" if item["metric"]["more_is_better"] else "less"
    return [
        f"<h2>{escape(item['key'])}: {escape(item['title'])}</h2>",
        f'<p class="soft">{escape(item["metric"]["unit"])}; {better} is better</p>',
        bar_chart(bars),
        _item_table(item),
        *[
            f'<p class="soft">{escape(label)} failed: {escape(sentence)}</p>'
            for label, sentence in item["errors"].items()
        ],
    ]


def _item_table(item: Mapping[str, Any]) -> str:
    rows = []
    for engine in item["engines"]:
        ratio = _ratio_to(item, engine["label"])
        cells = [
            engine["label"],
            _milliseconds(engine["ttft_s"]),
            _milliseconds(engine["tpot_s"]),
            _milliseconds(engine["queue_s"]),
            number(engine["new_tokens_per_s"]["median"]),
            _mebibytes(engine["kv"]["bytes_used"]),
            _mebibytes(engine["peak_rss_bytes"]["median"]),
            ratio,
        ]
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    heads = (
        "engine", "TTFT ms", "TPOT ms", "queue ms", "new tokens/s", "KV MiB", "peak RSS MiB", "ours / theirs",
    )  # fmt: skip
    return _table(heads, rows)


def _ratio_to(item: Mapping[str, Any], label: str) -> str:
    """The first of our engines over this one."""
    for engine in item["engines"]:
        if label in engine["ratios"]:
            ratio = engine["ratios"][label]
            return f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"
    return ""


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def sweep_lines(items: Sequence[Mapping[str, Any]], ours: set[str]) -> list[Line]:
    """Decode speed over the context, one line for each engine."""
    labels = dict.fromkeys(engine["label"] for item in items for engine in item["engines"])
    lines = []
    for label in labels:
        points = tuple(
            (
                float(item["work"]["prompt_tokens"] + item["work"]["new_tokens"]),
                float(engine["headline"]["median"]),
            )
            for item in items
            for engine in item["engines"]
            if engine["label"] == label
        )
        lines.append(Line(label, points, label in ours))
    return lines


def _sweep_section(items: Sequence[Mapping[str, Any]], ours: set[str]) -> list[str]:
    if not items:
        return []
    chart = line_chart(sweep_lines(items, ours), "tokens of context", "new tokens/s")
    return ["<h2>sweep: decode over the length of the context, one request</h2>", chart]


def _bottlenecks(items: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [
        (f"{item['key']} {engine['label']}", engine["profile"])
        for item in items
        for engine in item["engines"]
        if engine["profile"] is not None
    ]
    if not found:
        return []
    return [
        "<h2>Where the time of a step goes</h2>",
        share_chart([(label, profile["shares"]) for label, profile in found]),
        "<ul>",
        *[f"<li>{escape(label)}: {escape(bottleneck_sentence(p))}</li>" for label, p in found],
        "</ul>",
    ]


def _kernels(kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    if not kernels:
        return []
    rows = []
    for row in kernels:
        cells = [
            f"{row['context']:,} × {row['batch']}, {row['kv_format']}",
            number(row["limit_s"] * 1e6),
            kernel_cell(row["kvern"]),
            kernel_cell(row["torch"]),
        ]
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    heads = ("context × batch", "bandwidth limit µs", "kvern µs (share)", "torch sdpa µs (share)")
    return ["<h2>Attention alone, per layer, one query per sequence</h2>", _table(heads, rows)]


def _engines(document: Mapping[str, Any]) -> list[str]:
    rows = []
    for engine in document["engines"]:
        cells = [
            engine["label"],
            str(engine.get("version", "")),
            engine["model_file"] + (" (the same file)" if engine["same_file"] else ""),
            f"{engine['start_s']:.2f}",
            format_size(engine["weight_bytes"]) if engine.get("weight_bytes") else "",
        ]
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    checked = [
        f"{engine['label']}: {quality_sentence(engine['quality'])}"
        for engine in document["engines"]
        if engine.get("quality")
    ]
    notes = [f"{absent['name']}: {absent['reason']}" for absent in document["absent"]]
    return [
        "<h2>Engines</h2>",
        _table(
            ("engine", "version", "model", "s to first token from process start", "weights"), rows
        ),
        *[f'<p class="soft">{escape(sentence)}</p>' for sentence in checked],
        *[f'<p class="soft">absent: {escape(note)}</p>' for note in notes],
        *[f'<p class="soft">left out: {escape(note)}</p>' for note in document["left_out"]],
    ]


def _milliseconds(spread: Mapping[str, Any] | None) -> str:
    return "–" if spread is None else number(spread["median"] * 1e3)


def _mebibytes(num_bytes: float | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / 2**20:,.0f}"
