"""docs/results/parallel.md: one sequence over several GPUs, measured and projected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases.parallel import figures_of
from benchmarks.engine.results import Run
from benchmarks.report.documents import RESULTS, page, run_of
from quasar_kernels.line_plot import BLUE, GREEN, PURPLE, RED, Line, Scale, line_plot

PROJECTED = (2, 4, 8, 16, 32, 64)
FOLDS = {
    ("operator", "forward"): 2,
    ("operator", "training"): 3,
    ("layer", "forward"): 2,
    ("layer", "training"): 5,
}
"""Folds of a call: two per forward pass, which the layer's backward pass repeats, and one in a
backward pass."""
GB_PER_S = 50.0
"""Assumed rate between hosts of 8 GPUs."""
ON_HOST = 8
COLOURS = (RED, GREEN, PURPLE, BLUE)
"""Those of the calls, in their order."""


def calls(run: Run) -> list[dict[str, Any]]:
    """Return the milliseconds of one GPU, of a million tokens on each, and of a million in all."""
    rows = []
    for table, way in FOLDS:
        one, each, shared = (entry.figures[f"{way}_ms"] for entry in figures_of(run, table))
        rows.append({"table": table, "way": way, "one": one, "each": each, "shared": shared})
    return rows


def projected_ms(run: Run, call: dict[str, Any], gpus: int) -> float:
    """Return the milliseconds for a million tokens on each of `gpus` GPUs.

    They are the time of two GPUs plus that of the further folds and exchanged bytes. The fold was
    timed in a loop in which the host's launches take longer than the GPU.
    """
    (terms,) = run.table("terms")
    fold = terms.figures["fold_of_8_ms"] / 7
    exchange = gpus * terms.figures["exchanged_bytes"] / GB_PER_S / 1e6 if gpus > ON_HOST else 0.0
    each: float = call["each"]
    return each + FOLDS[call["table"], call["way"]] * ((gpus - 2) * fold + exchange)


def gated(run: Run) -> list[dict[str, Any]]:
    """Return the milliseconds of the gated delta rule on one GPU and on two."""
    timed: dict[tuple[str, str], list[Any]] = {}
    for entry in run.table("gated"):
        if entry.failure is None:
            timed.setdefault((entry.by, str(entry.of["pass"])), []).append(entry.figures["ms"])
    names = {"fla": "fla", "cuda": "this package"}
    return [
        {"name": names[by], "way": way, "one": ms[0], "two": ms[1]}
        for (by, way), ms in timed.items()
        if len(ms) == 2
    ]


def plot(run: Run) -> str:
    """Return the SVG of times over one GPU's: measured up to two GPUs, then projected, dashed."""
    lines = []
    for call, colour in zip(calls(run), COLOURS, strict=True):
        label = f"{call['table']}, {call['way']}"
        far = [(n, projected_ms(run, call, n) / call["one"]) for n in PROJECTED]
        lines.append(Line(label, colour, far, dashed=True))
        lines.append(Line(label, colour, [(1, 1.0), (2, call["each"] / call["one"])]))
    title = f"A million tokens a GPU over one GPU's time, {run.gpu}; dashed: projected"
    return line_plot(title, "GPUs", "times as long", lines, y=Scale(log=False, low=0))


def documents() -> dict[Path, str]:
    run = run_of("../h200x2/parallel")
    projection = [
        {"gpus": gpus}
        | {f"{c['table']} {c['way']}": projected_ms(run, c, gpus) for c in calls(run)}
        for gpus in (8, 64)
    ]
    text = page("parallel", calls=calls(run), gated=gated(run), projection=projection)
    return text | {RESULTS / "parallel.svg": plot(run)}
