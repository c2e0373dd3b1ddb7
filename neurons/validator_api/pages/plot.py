"""The plot of a submission's speeds by length, as SVG: a dot each, both axes logarithmic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

from neurons.validator_api.pages.views import Speeds

WIDTH, HEIGHT = 360, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 26, 14, 44
"""Margins. A telephone is 360 to 430 pixels wide, so that letters keep their size there."""
LETTERS = 12
LABEL_APART = 48
"""Pixels between two labels of lengths; those that have no room are left out."""


@dataclass(frozen=True)
class _Axis:
    """Maps values to pixels by their logarithm."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 1)


def plot(claimed: Speeds, measured: Speeds) -> Markup:
    """Return the figure; colours and their dark forms are in the style sheet.

    Args:
        claimed, measured: the miner's and the validator's figures, at least one in all.
    """
    points = [*claimed, *measured]
    x = _axis([length for length, _ in points], LEFT + 10, WIDTH - RIGHT - 10)
    y = _axis([speed for _, speed in points], HEIGHT - BOTTOM, TOP, whole=True)
    parts = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-size="{LETTERS}" aria-label="{_spoken(claimed, measured)}">',
        *_heights(y),
        *_lengths(sorted({length for length, _ in points}), x),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        "tokens</text>",
    ]
    line = "L".join(f"{x.at(a)} {y.at(b)}" for a, b in claimed)
    if line:
        parts.append(f'<path class="claimed" d="M{line}" fill="none"/>')
    parts += [f'<circle class="claimed" cx="{x.at(a)}" cy="{y.at(b)}" r="4"/>' for a, b in claimed]
    parts += [
        f'<rect class="measured" x="{x.at(a) - 5}" y="{y.at(b) - 5}" width="10" height="10"/>'
        for a, b in measured
    ]
    return Markup("".join([*parts, "</svg>"]))  # noqa: S704 — numbers, and what was escaped


def short(value: float) -> str:
    """Return a figure in three digits and its unit: 1.23M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _axis(values: list[int] | list[float], start: float, stop: float, whole: bool = False) -> _Axis:
    low, high = math.log10(min(values)), math.log10(max(values))
    if whole:
        low, high = math.floor(low), math.ceil(high)
    if high - low < 1e-6:
        low, high = low - 0.5, high + 0.5
        if whole:
            low, high = math.floor(low), math.ceil(high)
    return _Axis(low, high, start, stop)


def _heights(y: _Axis) -> list[str]:
    step = max(1, math.ceil((y.high - y.low) / 5))
    parts = []
    for power in range(int(y.low), int(y.high) + 1, step):
        at = y.at(10.0**power)
        parts.append(f'<path class="grid" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>')
        label = short(10.0**power)
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4}" text-anchor="end">{label}</text>')
    return parts


def _lengths(lengths: list[int], x: _Axis) -> list[str]:
    """Label the lengths from the longest down, which is the one that counts."""
    labelled = lengths[-1:]
    for longer, length in pairwise(reversed(lengths)):
        if x.at(labelled[-1]) - x.at(length) >= LABEL_APART and length < longer:
            labelled.append(length)
    base = HEIGHT - BOTTOM
    return [f'<path class="grid" d="M{x.at(n)} {TOP}V{base}"/>' for n in lengths] + [
        f'<text x="{x.at(n)}" y="{base + 18}" text-anchor="middle">{n:,}</text>' for n in labelled
    ]


def _spoken(claimed: Speeds, measured: Speeds) -> str:
    """Return what a screen reader says in the figure's place."""
    series = (("Claimed", claimed), ("measured by a validator", measured))
    said = [
        f"{name}: " + ", ".join(f"{speed:,.0f} tokens/s at {n:,} tokens" for n, speed in figures)
        for name, figures in series
        if figures
    ]
    return str(escape("; ".join(said)))
