"""docs/results/kernels.md and its plot: the operator's kernels."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engine.results import Run
from benchmarks.report.documents import RESULTS, page, run_of
from quasar_kernels.line_plot import BLUE, GREEN, RED, Line, line_plot

LINES = {"triton": ("Triton", GREEN), "cuda": ("CUDA", BLUE), "baseline": ("baseline", RED)}
"""Label and colour of each implementation."""


def plot(run: Run) -> str:
    lines = []
    for name, (label, colour) in LINES.items():
        rows = [row for row in run.rows("forward") if name in row.by]
        for kind, dashed in (("graph", False), ("eager", True)):
            points = [(row.of["tokens"], row.by[name].figures[f"{kind}_ms"]) for row in rows]
            if points:
                lines.append(Line(f"{label}, {kind}", colour, points, dashed))
    title = f"Forward pass, B=1, H=8, S=64, bf16, {run.gpu}"
    return line_plot(title, "tokens", "milliseconds", lines)


def documents() -> dict[Path, str]:
    return {**page("kernels"), RESULTS / "operator.svg": plot(run_of("operator"))}
