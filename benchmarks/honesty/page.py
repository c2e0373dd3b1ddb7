"""The figures of docs/honesty.md and its plot, from what simulate.py found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.documents import filled
from benchmarks.honesty.results import ClaimSimulation, load
from benchmarks.limits import Criterion, summary
from benchmarks.markdown import table
from benchmarks.results import ROOT

DATA = ROOT / "benchmarks" / "honesty.json"
DOCUMENT = ROOT / "docs" / "honesty.md"

REFUTED_MOST = 1e-4
"""Largest chance, under every shape of noise, that a validator's one run misses the claim."""

RATIO_LEAST = 0.97
"""Least claim beside the median on a healthy GPU."""


def limits(run: ClaimSimulation | None = None) -> list[Criterion]:
    """Return every promise with its figure, of the committed simulation unless one is given."""
    run = run or load(DATA)
    found = [
        Criterion(f"{one.shape}: refuted", one.refuted, REFUTED_MOST, digits=".1e")
        for one in run.shapes
    ]
    healthy = [one for one in run.shapes if one.healthy]
    return found + [
        Criterion(f"{one.shape}: claim / median", one.ratio, RATIO_LEAST, at_least=True)
        for one in healthy
    ]


def simulation(run: ClaimSimulation) -> str:
    """Return the table of every shape of noise, below whether the promises are kept."""
    header = ("noise between processes", "refuted", "claim / median", "in 5% below", "runs")
    rows = [
        (
            one.shape + (" (healthy)" if one.healthy else ""),
            f"{one.refuted:.1e}" if one.refuted else "0",
            f"{one.ratio:.3f}",
            f"{one.ratio_low:.3f}",
            f"{one.runs:.1f}",
        )
        for one in run.shapes
    ]
    where = f"{run.trials:,} claims of each shape, {run.created}, commit {run.commit}."
    return f"{summary(limits(run))}\n\n{table(header, rows)}\n\n{where}"


def documents() -> Mapping[Path, str]:
    """Return the text of docs/honesty.md, by its path."""
    text = filled(DOCUMENT, DOCUMENT.read_text(), {"simulation": simulation(load(DATA))})
    return {DOCUMENT: text}
