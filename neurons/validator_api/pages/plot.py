"""The plot of a submission's speeds by length, as SVG; both axes are logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

Speeds = Sequence[tuple[int, float]]
"""Length in tokens and tokens per second, the shortest first."""

WIDTH, HEIGHT = 360, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 26, 28, 44
"""Margins. The plot fits a telephone of 360 to 430 pixels, so letters are not scaled there."""
LETTERS = 12
LETTER_WIDTH, LABEL_GAP = 7.2, 6
"""Pixels of a label's letter, and between two labels of lengths."""
MOST_TICKS = 7
"""Most labels of speeds."""


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


def plot(timed: Speeds, claim: Speeds, measured: Speeds) -> Markup:
    """Return the figure; the style sheet has its colours.

    Args:
        timed: the miner's measurements, joined by a line.
        claim: the claim at its length.
        measured: the validator's measurements. At least one figure in all is needed.
    """
    points = [*timed, *claim, *measured]
    x = _axis([length for length, _ in points], LEFT + 10, WIDTH - RIGHT - 10)
    ticks = _ticks([speed for _, speed in points])
    y = _axis(ticks, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-size="{LETTERS}" aria-label="{_spoken(timed, claim, measured)}">',
        f'<text x="4" y="{LETTERS}">tokens/s</text>',
        *_heights(ticks, y),
        *_lengths(sorted({length for length, _ in points}), x),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        "sequence length in tokens</text>",
    ]
    if timed:
        line = "L".join(f"{x.at(a)} {y.at(b)}" for a, b in timed)
        parts.append(f'<path class="timed" d="M{line}" fill="none"/>')
    for name, figures in (("timed", timed), ("measured", measured), ("claim", claim)):
        parts += [_mark(name, x.at(a), y.at(b)) for a, b in figures]
    return Markup("".join([*parts, "</svg>"]))  # noqa: S704 — numbers, and what was escaped


def legend(name: str) -> Markup:
    """Return the mark of a series (`timed`, `claim` or `measured`) for the text of a legend."""
    return Markup(  # noqa: S704 — constants
        f'<svg class="plot mark" viewBox="0 0 16 16" aria-hidden="true">{_mark(name, 8, 8)}</svg>'
    )


def _mark(name: str, x: float, y: float) -> str:
    if name == "timed":
        return f'<circle class="timed" cx="{x}" cy="{y}" r="4"/>'
    if name == "measured":
        return f'<rect class="measured" x="{x - 5}" y="{y - 5}" width="10" height="10"/>'
    return f'<path class="claim" d="M{x} {y - 6}l6 6l-6 6l-6 -6z"/>'


def short(value: float) -> str:
    """Return a figure in three digits and its unit: 1.23M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _axis(values: Sequence[float], start: float, stop: float) -> _Axis:
    low, high = math.log10(min(values)), math.log10(max(values))
    if high - low < 1e-6:
        low, high = low - 0.5, high + 0.5
    return _Axis(low, high, start, stop)


def _ticks(speeds: Sequence[float]) -> list[float]:
    """Return at most `MOST_TICKS` round figures, the first and last of them around all speeds."""
    low, high = math.log10(min(speeds)), math.log10(max(speeds))
    powers = range(math.floor(low) - 1, math.ceil(high) + 2)
    for digits in ((1, 2, 5), (1,)):
        steps = [digit * 10.0**power for power in powers for digit in digits]
        below = max(n for n, step in enumerate(steps) if step <= min(speeds) * (1 + 1e-9))
        above = min(n for n, step in enumerate(steps) if step >= max(speeds) * (1 - 1e-9))
        ticks = steps[below : max(above, below + 1) + 1]
        if len(ticks) <= MOST_TICKS:
            break
    return ticks[:: math.ceil(len(ticks) / MOST_TICKS)] + ticks[-1:]


def _heights(ticks: Sequence[float], y: _Axis) -> list[str]:
    parts = []
    for tick in dict.fromkeys(ticks):
        at = y.at(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4}" text-anchor="end">{short(tick)}</text>')
    return parts


def _lengths(lengths: list[int], x: _Axis) -> list[str]:
    """Label the lengths from the longest down; omit labels that would overlap."""
    labelled: list[int] = []
    for length in reversed(lengths):
        letters = len(f"{length:,}{labelled[-1]:,}") if labelled else 0
        room = x.at(labelled[-1]) - x.at(length) if labelled else math.inf
        if room >= LETTER_WIDTH * letters / 2 + LABEL_GAP:
            labelled.append(length)
    base = HEIGHT - BOTTOM
    return [f'<path class="grid" d="M{x.at(n)} {TOP}V{base}"/>' for n in lengths] + [
        f'<text x="{x.at(n)}" y="{base + 18}" text-anchor="middle">{n:,}</text>' for n in labelled
    ]


def _spoken(timed: Speeds, claim: Speeds, measured: Speeds) -> str:
    """Return the text of the figure for screen readers."""
    series = (
        ("Measured by the miner", timed),
        ("claimed", claim),
        ("measured by the validator", measured),
    )
    texts = [
        f"{name}: " + ", ".join(f"{speed:,.0f} tokens/s at {n:,} tokens" for n, speed in figures)
        for name, figures in series
        if figures
    ]
    return str(escape("; ".join(texts)))
