"""The document as one picture; needs matplotlib, which is not installed with kvern."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvern.bench.html import sweep_lines
from kvern.errors import UsageError

OURS, OTHERS = "#2f6db5", "#9aa5b0"
TITLE_WIDTH = 76  # letters of a title that fit above a chart
COLUMNS = 2


def write_png(document: Mapping[str, Any], path: Path) -> None:
    """Draw every case, bars with whiskers, and the sweep as lines.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "--png needs matplotlib: install it with `pip install matplotlib`, or use --html"
        ) from error
    ours = {engine["label"] for engine in document["engines"] if engine["peer"] == "kvern"}
    bars = [item for item in document["items"] if item["case"] != "sweep"]
    sweep = [item for item in document["items"] if item["case"] == "sweep"]
    panels = len(bars) + (1 if sweep else 0)
    rows = -(-panels // COLUMNS)
    figure = Figure(figsize=(12, 0.9 + 2.9 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axis, item in zip(axes, bars, strict=False):
        _draw_bars(axis, item, ours)
    if sweep:
        _draw_sweep(axes[len(bars)], sweep, ours)
    for axis in axes[panels:]:
        axis.set_visible(False)
    machine = document["machine"]
    quick = "QUICK RUN, the figures mean nothing; " if document["quick"] else ""
    figure.suptitle(
        f"{quick}{document['model']['name']}, {machine['cpu']}, {machine['threads']} threads, "
        f"medians of {document['runs']} interleaved runs",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def _draw_bars(axis: Any, item: Mapping[str, Any], ours: set[str]) -> None:
    heads = [engine["headline"] for engine in item["engines"]]
    names = [engine["label"] for engine in item["engines"]]
    medians = [head["median"] for head in heads]
    errors = [
        [head["median"] - head["low"] for head in heads],
        [head["high"] - head["median"] for head in heads],
    ]
    colours = [OURS if name in ours else OTHERS for name in names]
    drawn = axis.barh(names, medians, xerr=errors, color=colours, error_kw={"lw": 1, "alpha": 0.6})
    axis.bar_label(drawn, fmt="{:,.4g}", padding=4, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    title = textwrap.fill(f"{item['key']}: {item['title']}", TITLE_WIDTH)
    axis.set_title(title, fontsize=8, loc="left")
    better = "more" if item["metric"]["more_is_better"] else "less"
    axis.set_xlabel(f"{item['metric']['unit']} ({better} is better)", fontsize=8)
    _quiet(axis)


def _draw_sweep(axis: Any, items: list[Mapping[str, Any]], ours: set[str]) -> None:
    for line in sweep_lines(items, ours):
        x, y = zip(*line.points, strict=True)
        style = {"color": OURS, "lw": 2.2} if line.is_ours else {"lw": 1.2}
        axis.plot(x, y, marker="o", ms=3, label=line.name, **style)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_ylim(bottom=0)
    axis.set_title("sweep: decode over the length of the context", fontsize=8, loc="left")
    axis.set_xlabel("tokens of context", fontsize=8)
    axis.set_ylabel("new tokens/s", fontsize=8)
    axis.legend(fontsize=7, frameon=False)
    _quiet(axis)


def _quiet(axis: Any) -> None:
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
