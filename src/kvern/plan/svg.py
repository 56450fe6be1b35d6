"""Small charts as inline SVG: lines on logarithmic axes, stacked bars. No library, no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2f6db5", "#c8641b", "#2a8a63", "#8457ab", "#a8323e", "#5d6670")
QUIET = "#9aa5b0"
QUIET_NAMES = ("left to others",)
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:var(--soft,#5d6670)} text.name{font-weight:600}"
    " text.inside{fill:#fff} .grid,.tick{stroke:var(--rule,#d9dee3);stroke-width:1}"
)
WIDTH = 720
HEIGHT = 360
LEFT, RIGHT, TOP, BOTTOM = 76, 96, 16, 44
LINE = 15


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: points with positive x and y; points with y = 0 are left out."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar: (name, bytes) in order."""

    name: str
    parts: tuple[tuple[str, int], ...]


def line_chart(lines: Sequence[Line], x_label: str, y_label: str) -> str:
    """Curves on two logarithmic axes, each named at its right end."""
    curves = [
        Line(line.name, tuple((x, y) for x, y in line.points if x > 0 and y > 0)) for line in lines
    ]
    points = [point for line in curves for point in line.points]
    if not points:
        return '<p class="note">Nothing fits at any length.</p>'
    x_low, x_high = (f(x for x, _ in points) for f in (min, max))
    y_low, y_high = (f(y for _, y in points) for f in (min, max))
    y_low, y_high = _decade(y_low, down=True), _decade(y_high, down=False)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _share(x, x_low, x_high)
        up = _share(y, y_low, y_high)
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM),
        )

    parts = [_svg_open(HEIGHT)]
    parts += _y_axis(y_low, y_high, place, x_low)
    parts += _x_axis(x_low, x_high, place, y_low)
    ends: list[tuple[float, str, str]] = []
    for number, line in enumerate(curves):
        if not line.points:
            continue
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(
            f"{'M' if i == 0 else 'L'}{px:.1f} {py:.1f}"
            for i, (px, py) in enumerate(place(x, y) for x, y in line.points)
        )
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.2"/>')
        px, py = place(*line.points[-1])
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>')
        ends.append((py, line.name, colour))
    parts += _end_labels(ends)
    parts.append(_text(WIDTH / 2 - 16, HEIGHT - 6, x_label, "middle"))
    parts.append(
        f'<text transform="translate(14 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    parts.append("</svg>")
    return "".join(parts)


def _end_labels(ends: list[tuple[float, str, str]]) -> list[str]:
    """Names at the right ends, pushed apart so that none covers another."""
    placed: list[str] = []
    ends = sorted(ends)
    heights: list[float] = []
    for y, _, _ in ends:
        heights.append(max([y, *(h + LINE for h in heights[-1:])]))
    for place in reversed(range(len(heights))):  # none below the axis, where ticks are named
        below = heights[place + 1] - LINE if place + 1 < len(heights) else HEIGHT - BOTTOM - 6
        heights[place] = min(heights[place], below)
    for y, (_, name, colour) in zip(heights, ends, strict=True):
        placed.append(
            f'<text x="{WIDTH - RIGHT + 10}" y="{y + 4:.1f}" style="fill:{colour}" '
            f'class="name">{escape(name)}</text>'
        )
    return placed


def stacked_bars(bars: Sequence[Bar], total: int, unit: int = 2**30) -> str:
    """Horizontal bars that share one scale from 0 to `total` bytes, with a legend."""
    names = list(dict.fromkeys(name for bar in bars for name, _ in bar.parts))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    colours |= {name: QUIET for name in names if name in QUIET_NAMES}
    row, top = 30, 30
    height = top + row * len(bars) + 34
    span = WIDTH - LEFT - 24
    parts = [_svg_open(height)]
    x = float(LEFT)
    for name in names:
        parts.append(
            f'<rect x="{x:.0f}" y="4" width="11" height="11" rx="2" fill="{colours[name]}"/>'
        )
        parts.append(_text(x + 16, 14, name, "start"))
        x += 34 + 7 * len(name)
    for index, bar in enumerate(bars):
        y = top + index * row
        parts.append(_text(LEFT - 8, y + 15, bar.name, "end"))
        left = float(LEFT)
        for name, size in bar.parts:
            width = span * size / total if total else 0.0
            label = f"{name}: {size / unit:,.3f} GiB"
            parts.append(
                f'<rect x="{left:.1f}" y="{y}" width="{max(width - 1, 0):.1f}" height="20" rx="2" '
                f'fill="{colours[name]}"><title>{escape(label)}</title></rect>'
            )
            if width > 58:
                parts.append(
                    f'<text x="{left + width / 2:.1f}" y="{y + 14}" text-anchor="middle" '
                    f'class="inside">{size / unit:,.2f}</text>'
                )
            left += width
    base = top + row * len(bars) + 4
    step = _nice_step(total / unit)
    for number in range(int(total / unit / step + 1e-9) + 1):
        x = LEFT + span * number * step * unit / total
        parts.append(_text(x, base + 14, f"{number * step:,g}", "middle"))
    parts.append(_text(LEFT + span, base + 28, "GiB", "end"))
    parts.append("</svg>")
    return "".join(parts)


def _nice_step(total: float) -> float:
    """1, 2 or 5 times a power of ten that cuts `total` into about four."""
    if total <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(total / 4))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= total / 5)


def _svg_open(height: float) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>'
    )


def _share(value: float, low: float, high: float) -> float:
    if high <= low:
        return 0.5
    return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))


def _decade(value: float, *, down: bool) -> float:
    exponent = math.log10(value)
    edge = math.floor(exponent) if down else math.ceil(exponent)
    return float(10.0**edge)


def _y_axis(low: float, high: float, place: object, x_low: float) -> list[str]:
    assert callable(place)
    parts: list[str] = []
    exponent = round(math.log10(low))
    while 10.0**exponent <= high * 1.001:
        value = 10.0**exponent
        _, y = place(x_low, value)
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="grid"/>'
        )
        label = f"{value:,.0f}" if value >= 1 else f"{value:g}"
        parts.append(_text(LEFT - 8, y + 4, label, "end"))
        exponent += 1
    return parts


def _x_axis(low: float, high: float, place: object, y_low: float) -> list[str]:
    assert callable(place)
    parts: list[str] = []
    value = 2 ** math.ceil(math.log2(low))
    last = -math.inf
    while value <= high * 1.001:
        x, y = place(value, y_low)
        if x - last > 46:
            label = f"{value // 1024}K" if value >= 1024 else str(value)
            parts.append(
                f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{y + 4:.1f}" class="tick"/>'
            )
            parts.append(_text(x, y + 17, label, "middle"))
            last = x
        value *= 2
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
