"""A chart of lines over two logarithmic axes, as SVG; the same figures give the same bytes.

Benchmarks draw with it, and the training of a model its loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

WIDTH, HEIGHT = 560, 440
LEFT, RIGHT, TOP, BOTTOM = 66, 124, 45, 58
BEYOND = 0.025
"""Share of a decade by which a point may lie beyond an axis: 2**20 needs no decade after 10**6."""
LETTERS = 15
"""Size of all text. A telephone is 360 to 430 pixels wide, so that it shows ten pixels of it."""


class Line(NamedTuple):
    """One line: its points from left to right, and how it is drawn."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


class _Axis(NamedTuple):
    """Maps the decades from `low` to `high` to pixels from `start` to `stop`."""

    low: int
    high: int
    start: float
    stop: float

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 1)


def _axis(values: Sequence[float], start: float, stop: float) -> _Axis:
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)) - BEYOND)
    return _Axis(low, max(high, low + 1), start, stop)


def line_plot(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """Return the SVG of `lines`, all values positive, each line labelled at its right end."""
    points = [point for line in lines for point in line.points]
    x = _axis([p[0] for p in points], LEFT, WIDTH - RIGHT)
    y = _axis([p[1] for p in points], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="{LETTERS}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="12" y="26">{escape(title)}</text>',
        *_grid(x, y),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle">'
        f"{escape(x_label)}</text>",
        f'<text transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_label)}</text>',
    ]
    heights = _apart([y.at(line.points[-1][1]) for line in lines])
    for line, height in zip(lines, heights, strict=True):
        parts += _drawn(line, x, y, height)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(x: _Axis, y: _Axis) -> list[str]:
    parts = []
    for power in range(x.low, x.high + 1):
        at = x.at(10.0**power)
        parts.append(f'<path d="M{at} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        text = f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"
        parts.append(
            f'<text x="{at}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{text}</text>'
        )
    for power in range(y.low, y.high + 1):
        at = y.at(10.0**power)
        parts.append(f'<path d="M{LEFT} {at}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4}" text-anchor="end">{10.0**power:g}</text>')
    return parts


def _drawn(line: Line, x: _Axis, y: _Axis, label_height: float) -> list[str]:
    places = [(x.at(a), y.at(b)) for a, b in line.points]
    path = "L".join(f"{a} {b}" for a, b in places)
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    dots = [f'<circle cx="{a}" cy="{b}" r="3" fill="{line.colour}"/>' for a, b in places]
    return [
        f'<path d="M{path}" fill="none" stroke="{line.colour}" stroke-width="2.5"{dash}/>',
        *dots,
        f'<text x="{places[-1][0] + 10}" y="{label_height + 4}" fill="{line.colour}">'
        f"{escape(line.label)}</text>",
    ]


def _apart(heights: Sequence[float], gap: float = LETTERS + 3) -> list[float]:
    """Move labels down until no two are closer than `gap`."""
    placed = list(heights)
    order = sorted(range(len(placed)), key=placed.__getitem__)
    for above, below in pairwise(order):
        placed[below] = max(placed[below], placed[above] + gap)
    return placed
