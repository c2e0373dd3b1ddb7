"""docs/results/layer.md: models that learn to recall, trained in every way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases.recall import WAYS
from benchmarks.engine.results import Entry, Run
from benchmarks.report.documents import RESULTS, page, run_of
from quasar_kernels.line_plot import (
    BLUE,
    FROM_ZERO,
    GREEN,
    GREY,
    PURPLE,
    RED,
    YELLOW,
    Line,
    Panel,
    panel_plot,
)

ALIKE = 100
"""Steps over which losses are compared. Later, rounding decides when a model begins to recall."""
COLOURS = {
    "fp32": GREY,
    "bf16": GREEN,
    "compiled": BLUE,
    "checkpointed": RED,
    "ddp": PURPLE,
    "fsdp": YELLOW,
}
TASK = (
    "{batch} x {tokens:,} tokens, {pairs} pairs, vocabulary {vocabulary:,}, "
    "at most {most_steps:,} steps"
)


def by_task(run: Run) -> list[list[Entry]]:
    tasks: dict[int, list[Entry]] = {}
    for entry in run.table("trainings"):
        tasks.setdefault(int(entry.of["tokens"]), []).append(entry)
    return list(tasks.values())


def plot(run: Run) -> str:
    """Return the SVG of the first task's losses against the steps: a panel for each way."""
    every, trainings = int(run.number("every")), by_task(run)[0]
    panels = []
    for entry in trainings:
        points = [(every * (n + 1), loss) for n, loss in enumerate(entry.series["losses"])]
        name = WAYS[entry.by].replace("`", "")
        panels.append(Panel(name, [Line("", COLOURS[entry.by], points)]))
    title = f"Loss of recall over {trainings[0].of['tokens']:,} tokens, {run.gpu}"
    return panel_plot(title, "steps", "nats", panels, x=FROM_ZERO, columns=2)


def apart(entry: Entry, exact: Entry, every: int) -> float | None:
    """Return the largest relative difference of two curves over their first `ALIKE` steps."""
    if entry is exact:
        return None
    pairs = list(zip(entry.series["losses"], exact.series["losses"], strict=False))
    return max(abs(a - b) / b for a, b in pairs[: ALIKE // every])


def trainings(run: Run) -> list[dict[str, Any]]:
    rows = []
    for curves in by_task(run):
        exact = next(entry for entry in curves if entry.by == "fp32")
        rows += [
            {
                **entry.figures,
                "tokens": entry.of["tokens"],
                "way": WAYS[entry.by],
                "last_loss": entry.series["losses"][-1],
                "apart": apart(entry, exact, int(run.number("every"))),
            }
            for entry in curves
        ]
    return rows


def documents() -> dict[Path, str]:
    run = run_of("recall")
    tasks = [TASK.format(**curves[0].of) for curves in by_task(run)]
    return {
        **page("layer", trainings=trainings(run), tasks=tasks),
        RESULTS / "recall.svg": plot(run),
    }
