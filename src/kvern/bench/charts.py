"""Small charts as inline SVG: horizontal bars with their spread, stacked shares, lines. No library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2f6db5", "#c8641b", "#2a8a63", "#8457ab", "#a8323e", "#b08a1e", "#5d6670")
OTHERS = "#9aa5b0"
WIDTH = 760
NAME_WIDTH = 190
VALUE_WIDTH = 96
ROW = 26


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with its least and greatest run."""

    name: str
    value: float
    low: float
    high: float
    label: str
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A curve; x and y are positive."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_ours: bool = False


def bar_chart(bars: Sequence[Bar], marks: Sequence[tuple[float, str]] = ()) -> str:
    """Bars from 0 on one scale, whiskers for the spread.

    Args:
        bars: from top to bottom.
        marks: values that get a vertical line and a name, such as a limit.
    """
    top = 18 if marks else 4
    height = top + ROW * len(bars) + 4
    scale = max([bar.high for bar in bars] + [value for value, _ in marks] + [1e-12])
    span = WIDTH - NAME_WIDTH - VALUE_WIDTH
    parts = [_open(height)]
    for index, bar in enumerate(bars):
        y = top + index * ROW
        width = span * bar.value / scale
        colour = COLOURS[0] if bar.is_ours else OTHERS
        parts += [
            _text(NAME_WIDTH - 8, y + 15, bar.name, "end", "ours" if bar.is_ours else ""),
            f'<rect x="{NAME_WIDTH}" y="{y + 3}" width="{width:.1f}" height="17" rx="2" fill="{colour}"/>',
            _whisker(span / scale, bar, y + 11.5),
            _text(NAME_WIDTH + span * bar.high / scale + 6, y + 15, bar.label, "start"),
        ]
    for value, name in marks:
        x = NAME_WIDTH + span * value / scale
        parts.append(f'<line x1="{x:.1f}" y1="{top - 2}" x2="{x:.1f}" y2="{height}" class="mark"/>')
        parts.append(_text(min(x, WIDTH - 40), 12, name, "middle"))
    return "".join([*parts, "</svg>"])


def _whisker(scale: float, bar: Bar, y: float) -> str:
    if bar.high <= bar.low:
        return ""
    left, right = NAME_WIDTH + scale * bar.low, NAME_WIDTH + scale * bar.high
    ends = "".join(
        f'<line x1="{x:.1f}" y1="{y - 4}" x2="{x:.1f}" y2="{y + 4}" class="whisker"/>'
        for x in (left, right)
    )
    return f'<line x1="{left:.1f}" y1="{y}" x2="{right:.1f}" y2="{y}" class="whisker"/>{ends}'


def share_chart(rows: Sequence[tuple[str, dict[str, float]]]) -> str:
    """One bar of shares for each row, all of the same length, with a legend."""
    names = list(dict.fromkeys(name for _, shares in rows for name in shares))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    span = WIDTH - NAME_WIDTH - 10
    parts, x = [], 4.0
    for name in names:
        parts.append(
            f'<rect x="{x:.0f}" y="4" width="11" height="11" rx="2" fill="{colours[name]}"/>'
        )
        parts.append(_text(x + 15, 14, name, "start"))
        x += 30 + 6.4 * len(name)
    top = 28
    for index, (label, shares) in enumerate(rows):
        y, left = top + index * ROW, float(NAME_WIDTH)
        parts.append(_text(NAME_WIDTH - 8, y + 15, label, "end"))
        for name, share in shares.items():
            width = span * share
            parts.append(
                f'<rect x="{left:.1f}" y="{y + 2}" width="{max(width - 1, 0):.1f}" height="18" rx="2" '
                f'fill="{colours[name]}"><title>{escape(name)}: {share:.1%}</title></rect>'
            )
            if width > 34:
                parts.append(_text(left + width / 2, y + 15, f"{share:.0%}", "middle", "inside"))
            left += width
    return "".join([_open(top + ROW * len(rows) + 4), *parts, "</svg>"])


def line_chart(lines: Sequence[Line], x_label: str, y_label: str) -> str:
    """Curves over a logarithmic x axis and a y axis from 0, each named at its right end."""
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    height, left, right, top, bottom = 340, 60, 150, 14, 40
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_high = max(y for _, y in points) * 1.06

    def place(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / x_low) / math.log(x_high / x_low) if x_high > x_low else 0.5
        return (
            left + across * (WIDTH - left - right),
            height - bottom - y / y_high * (height - top - bottom),
        )

    parts = [_open(height), *_axes(place, (x_low, x_high), y_high)]
    ends = []
    others = iter(COLOURS[1:] * len(lines))
    for line in lines:
        colour = COLOURS[0] if line.is_ours else next(others)
        placed = [place(x, y) for x, y in line.points]
        path = " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(placed))
        width = 2.6 if line.is_ours else 1.6
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in placed]
        ends.append((placed[-1][1], line.name, colour))
    parts += _end_names(ends, WIDTH - right + 8)
    parts.append(_text((left + WIDTH - right) / 2, height - 4, x_label, "middle"))
    parts.append(
        f'<text transform="translate(13 {height / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    return "".join([*parts, "</svg>"])


def _axes(
    place: Callable[[float, float], tuple[float, float]],
    x_range: tuple[float, float],
    y_high: float,
) -> list[str]:
    x_low, x_high = x_range
    parts = []
    step = _nice_step(y_high)
    for count in range(int(y_high / step) + 1):
        x, y = place(x_low, count * step)
        right, _ = place(x_high, count * step)
        parts.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" class="grid"/>'
        )
        parts.append(_text(x - 7, y + 4, f"{count * step:,g}", "end"))
    value = 2.0 ** math.ceil(math.log2(x_low))
    while value <= x_high * 1.001:
        x, y = place(value, 0)
        parts.append(_text(x, y + 16, f"{value:,.0f}", "middle"))
        value *= 2
    return parts


def _end_names(ends: Sequence[tuple[float, str, str]], x: float) -> list[str]:
    """Names at the right ends, pushed apart so that none covers another."""
    placed, last = [], -math.inf
    for end, name, colour in sorted(ends):
        y = max(end, last + 14)
        last = y
        placed.append(
            f'<text x="{x:.0f}" y="{y + 4:.1f}" style="fill:{colour}" class="ours">{escape(name)}</text>'
        )
    return placed


def _nice_step(high: float) -> float:
    """1, 2 or 5 times a power of ten that cuts the axis into about four."""
    power = 10.0 ** math.floor(math.log10(high / 4))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= high / 6)


def _open(height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" xmlns="http://www.w3.org/2000/svg">'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(text)}</text>'
