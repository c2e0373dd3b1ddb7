"""docs/results/parallel.md: one sequence over several GPUs, measured and projected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases.parallel import comparisons
from benchmarks.engine.results import Entry, Run
from benchmarks.report.documents import RESULTS, page, run_of
from quasar_kernels.line_plot import BLUE, GREEN, PURPLE, RED, Line, Scale, line_plot

PROJECTED = (8, 16, 32, 64)
FOLDS = {
    ("operator", "forward"): 2,
    ("operator", "training"): 3,
    ("layer", "forward"): 2,
    ("layer", "training"): 5,
}
"""How often a call combines the ranks' maps: twice per forward pass, which the layer's backward
pass repeats, and once in a backward pass."""
GB_PER_S = 50.0
"""Assumed rate between hosts of 8 GPUs."""
ON_HOST = 8
COLOURS = (RED, GREEN, PURPLE, BLUE)
"""Those of the calls, in their order."""


def projected_ms(terms: Entry, call: dict[str, Any], gpus: int) -> float:
    """Return the milliseconds for a million tokens on each of `gpus` GPUs.

    They are the time of `call`'s GPUs plus the times of combining the further ranks' maps and of
    exchanging bytes. Combining was timed in a loop that the host's launches limit.
    """
    fold = terms.figures["fold_of_8_ms"] / 7
    exchange = gpus * terms.figures["exchanged_bytes"] / GB_PER_S / 1e6 if gpus > ON_HOST else 0.0
    ms: float = call["each"]
    return ms + FOLDS[call["table"], call["way"]] * ((gpus - int(call["gpus"])) * fold + exchange)


def plot(run: Run, terms: Entry, calls: list[dict[str, Any]]) -> str:
    """Return the SVG of times over one GPU's: measured, then projected from `calls`, dashed."""
    lines = []
    for call, colour in zip(calls, COLOURS, strict=True):
        table, way, one = call["table"], call["way"], call["one"]
        near = [(1.0, 1.0)]
        for row in comparisons(run):
            if (row["table"], row["way"]) == (table, way):
                near.append((row["gpus"], row["each"] / one))
        far = [near[-1], *((n, projected_ms(terms, call, n) / one) for n in PROJECTED)]
        lines.append(Line(f"{table}, {way}", colour, far, dashed=True))
        lines.append(Line(f"{table}, {way}", colour, near))
    title = f"A million tokens a GPU over one GPU's time, {run.gpu}; dashed: projected"
    return line_plot(title, "GPUs", "times as long", lines, y=Scale(log=False, low=0))


def documents() -> dict[Path, str]:
    run, two, long = map(
        run_of, ("../h200x4/parallel", "../h200x2/parallel", "../h200x2/parallel-earlier")
    )
    (terms,) = run.table("terms")
    rows = list(comparisons(run))
    calls = [row for row in rows if row["gpus"] == 4]
    projection = [
        {"gpus": n} | {f"{c['table']} {c['way']}": projected_ms(terms, c, n) for c in calls}
        for n in (8, 64)
    ]
    earlier = list(comparisons(two))
    rows += [row for row in earlier if row["table"] == "gated"]
    context = {"two": two, "long": long, "rows": rows, "calls": calls, "projection": projection}
    context["other"] = next(row["quarter"] for row in earlier if row["table"] == "layer")
    return page("parallel", **context) | {RESULTS / "parallel.svg": plot(run, terms, calls)}
