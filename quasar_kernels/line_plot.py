"""Line charts as SVG, reproducible byte for byte.

This module draws charts for the benchmarks' pages, the API's pages, the comparison of two trees and
the loss curve of a training. A chart has one or more panels with the same axes. Each panel shows
its lines in colour, and behind them the lines of the other panels in grey. Text and grid follow the
page's colour scheme; the colours of lines are readable on light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

WIDTH, HEIGHT, SMALL_HEIGHT = 640, 400, 190
"""In pixels: a chart's width, and the height of a single panel and of each of several panels."""
LEFT, TOP, TITLE, BOTTOM = 62, 34, 28, 50
"""Space for the y axis, the chart's title, a panel's title and the x axis, in pixels."""
LETTERS, LETTER = 14, 8.8
"""Height of all text and mean width of a letter, in pixels. On a telephone's narrow screen, the
chart shrinks and the text is 8 pixels high."""
KEY = 22
"""Length of the line segment before a label, in pixels."""
MARKED = 20
"""Lines of at most this many points show each point as a dot."""

GREEN, BLUE, RED, PURPLE = "#16996f", "#3f7fdb", "#d2573b", "#9a70c8"
YELLOW, CYAN, PINK, GREY = "#b08300", "#0095a3", "#d83a76", "#808488"
STYLE = """\
text{fill:#1f2328}.grid{stroke:#d8dee4}.pale{stroke:#c9d1d9}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.grid{stroke:#30363d}.pale{stroke:#484f58}}
path{fill:none}.line{stroke-width:2.5;stroke-linejoin:round}.dashed{stroke-dasharray:7 4}"""


class Line(NamedTuple):
    """One line: its points from left to right, and how it is drawn."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


class Panel(NamedTuple):
    """Lines that are drawn together. A label that several lines share is drawn at the last one."""

    title: str
    lines: Sequence[Line]


class Scale(NamedTuple):
    """An axis, logarithmic or linear. Lines are clipped at its limits; None is the data's limit."""

    log: bool = True
    low: float | None = None
    high: float | None = None


LOG, FROM_ZERO = Scale(), Scale(log=False, low=0)


class _Axis(NamedTuple):
    """Maps values to pixels from `start` to `stop`."""

    log: bool
    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        low, high, here = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return round(self.start + (here - low) / (high - low) * (self.stop - self.start), 1)

    def ticks(self) -> list[float]:
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1,), (1, 3), (1, 2, 5)):
                ticks = [s * 10.0**p for p in powers for s in steps]
                ticks = [value for value in ticks if self.low <= value <= self.high]
                if len(ticks) >= 3:
                    return ticks
        step = _round_step((self.high - self.low) / (6 if self.log else 4))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def _round_step(step: float) -> float:
    """Return the smallest of 1, 2, 2.5 or 5 times a power of ten that is not below the step."""
    power = 10.0 ** math.floor(math.log10(step))
    return power * next(n for n in (1, 2, 2.5, 5, 10) if n * power >= step * (1 - 1e-9))


def line_plot(
    title: str, x_label: str, y_label: str, lines: Sequence[Line], x: Scale = LOG, y: Scale = LOG
) -> str:
    """Return the SVG of `lines`, each labelled at its right; values on a log axis are positive."""
    return panel_plot(title, x_label, y_label, [Panel("", lines)], x, y)


def panel_plot(
    title: str,
    x_label: str,
    y_label: str,
    panels: Sequence[Panel],
    x: Scale = LOG,
    y: Scale = LOG,
) -> str:
    """Return the SVG of panels over the same axes."""
    every = [line for panel in panels for line in panel.lines]
    longest = max(len(line.label) for line in every)
    right = 14 + KEY + 6 + LETTER * longest
    height = HEIGHT if len(panels) == 1 else SMALL_HEIGHT
    head = TITLE if any(panel.title for panel in panels) else 0
    whole = TOP + len(panels) * (head + height) + BOTTOM
    points = [point for line in every for point in line.points]
    across = _axis([p[0] for p in points], x, LEFT, WIDTH - right)
    down = _axis([p[1] for p in points], y, height - 8, 8)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{whole}" '
        f'viewBox="0 0 {WIDTH} {whole}" font-family="sans-serif" '
        f'font-size="{LETTERS}">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<clipPath id="area"><rect x="{LEFT - 4}" y="4" width="{across.stop - LEFT + 8:g}" '
        f'height="{height - 8}"/></clipPath>',
        f'<text x="4" y="20" font-weight="bold">{escape(title)}</text>',
    ]
    for n, panel in enumerate(panels):
        others = [line for other in panels if other is not panel for line in other.lines]
        parts.append(f'<g transform="translate(0 {TOP + head + n * (head + height)})">')
        parts += _grid(across, down, last=n + 1 == len(panels))
        if panel.title:
            parts.append(f'<text x="{LEFT}" y="-3">{escape(panel.title)}</text>')
        parts += _lines(panel.lines, others, across, down)
        parts += _labels(panel.lines, across, down)
        parts.append("</g>")
    middle = (LEFT + WIDTH - right) / 2
    parts += [
        f'<text x="{middle:g}" y="{whole - 8}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(14 {(TOP + whole - BOTTOM) / 2:g}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_label)}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _axis(values: Sequence[float], scale: Scale, start: float, stop: float) -> _Axis:
    low = min(values) if scale.low is None else scale.low
    high = max(values) if scale.high is None else scale.high
    if low == high:
        low, high = (low / 2, high * 2) if scale.log else (low - 1, high + 1)
    return _Axis(scale.log, low, high, start, stop)


def _grid(x: _Axis, y: _Axis, *, last: bool) -> Iterator[str]:
    for value in x.ticks():
        at = x.at(value)
        yield f'<path class="grid" d="M{at} {y.stop:g}V{y.start:g}"/>'
        if last:
            yield f'<text x="{at}" y="{y.start + 20:g}" text-anchor="middle">{value:,.10g}</text>'
    for value in y.ticks():
        at = y.at(value)
        yield f'<path class="grid" d="M{x.start:g} {at}H{x.stop:g}"/>'
        yield f'<text x="{x.start - 8:g}" y="{at + 5:g}" text-anchor="end">{value:,.10g}</text>'


def _lines(lines: Sequence[Line], others: Sequence[Line], x: _Axis, y: _Axis) -> Iterator[str]:
    yield '<g clip-path="url(#area)">'
    for line in others:
        yield f'<path class="pale" d="{_path(line, x, y)}"/>'
    for line in lines:
        yield _drawn(line, _path(line, x, y))
        if len(line.points) <= MARKED:
            for a, b in line.points:
                yield f'<circle fill="{line.colour}" cx="{x.at(a)}" cy="{y.at(b)}" r="3.2"/>'
    yield "</g>"


def _path(line: Line, x: _Axis, y: _Axis) -> str:
    return "M" + "L".join(f"{x.at(a)} {y.at(b)}" for a, b in line.points)


def _drawn(line: Line, path: str) -> str:
    return f'<path class="line{" dashed" * line.dashed}" stroke="{line.colour}" d="{path}"/>'


def _labels(lines: Sequence[Line], x: _Axis, y: _Axis) -> Iterator[str]:
    """Yield each line's label; a thin line connects it with the line's end if they are apart."""
    named = list({line.label: line for line in lines}.values())
    ends = [(x.at(a), y.at(b)) for a, b in (line.points[-1] for line in named)]
    heights = spread([b for _, b in ends], LETTERS + 3, y.start)
    at = x.stop + 14
    for line, (a, b), height in zip(named, ends, heights, strict=True):
        if abs(height - b) > 2 or x.stop - a > 2:
            yield f'<path class="pale" d="M{a + 4:g} {b}L{at - 2:g} {height:g}"/>'
        yield _drawn(line, f"M{at:g} {height:g}h{KEY}")
        yield f'<text x="{at + KEY + 6:g}" y="{height + 5:g}">{escape(line.label)}</text>'


def spread(positions: Sequence[float], gap: float, high: float) -> list[float]:
    """Return positions at least `gap` apart and at most `high`, in the same order.

    Positions grow down the page. Each one moves down to keep the gap to those above it. It moves up
    again where the last one would pass `high`.
    """
    placed = list(positions)
    order = sorted(range(len(placed)), key=placed.__getitem__)
    for before, here in pairwise(order):
        placed[here] = max(placed[here], placed[before] + gap)
    for here in reversed(order):
        placed[here] = min(placed[here], high)
        high = placed[here] - gap
    return placed
