"""docs/results/layer.md: models that learn to recall, trained in every way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.cases.recall import WAYS
from benchmarks.engine.results import DATA, Entry, Run, load
from benchmarks.report.documents import RESULTS, page
from benchmarks.report.markdown import facts, records
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

RUN = DATA / "recall.json"
PLOT = RESULTS / "recall.svg"
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


def tasks(run: Run) -> list[list[Entry]]:
    """Return the trainings of each task."""
    by_tokens: dict[int, list[Entry]] = {}
    for entry in run.table("trainings"):
        by_tokens.setdefault(int(entry.of["tokens"]), []).append(entry)
    return list(by_tokens.values())


def plot(run: Run) -> str:
    """Return the SVG of the first task's losses against the steps: a panel for each way."""
    every, trainings = int(run.number("every")), tasks(run)[0]
    panels = []
    for entry in trainings:
        points = [(every * (n + 1), loss) for n, loss in enumerate(entry.series["losses"])]
        name = WAYS[entry.by].replace("`", "")
        panels.append(Panel(name, [Line("", COLOURS[entry.by], points)]))
    title = f"Loss of recall over {trainings[0].of['tokens']:,} tokens, {run.gpu}"
    return panel_plot(title, "steps", "nats", panels, x=FROM_ZERO, columns=2)


def apart(entry: Entry, exact: Entry, every: int) -> float:
    """Return the largest relative difference of two curves over their first `ALIKE` steps."""
    pairs = zip(entry.series["losses"], exact.series["losses"], strict=False)
    return max(abs(a - b) / b for a, b in list(pairs)[: ALIKE // every])


def trainings(run: Run) -> str:
    """Return the table of every training."""
    rows = []
    for curves in tasks(run):
        exact = next(entry for entry in curves if entry.by == "fp32")
        for entry in curves:
            off = "" if entry is exact else f"{apart(entry, exact, int(run.number('every'))):.1e}"
            of = entry.figures
            row = {
                "tokens, training": f"{entry.of['tokens']:,}, {WAYS[entry.by]}",
                "GPUs": str(of["gpus"]),
                "recall": f"{of['recall']:.2%}",
                "steps": f"{of['steps']:,}",
                "loss at the end": f"{entry.series['losses'][-1]:.1e}",
                f"from fp32's, {ALIKE} steps": off,
                "a step, ms": f"{of['step_ms']:.1f}",
                "in all, s": f"{of['seconds']:.0f}",
            }
            rows.append(row)
    return records(rows)


TASK = (
    "{batch} x {tokens:,} tokens, {pairs} pairs, vocabulary {vocabulary:,}, "
    "at most {most_steps:,} steps"
)


def recall(run: Run) -> str:
    """Return where and how it was measured, and the tables."""
    cuda = run.environment.cuda if run.environment else None
    rows = {
        **run.where(f"CUDA {cuda}"),
        "model": "{layers} blocks of {width} channels, {heads} heads".format(**run.settings),
        "rate": f"{run.number('rate'):g}",
        "tasks": "; ".join(TASK.format(**curves[0].of) for curves in tasks(run)),
        "protocol": run.protocol,
    }
    return f"![loss against steps]({PLOT.name})\n\n{trainings(run)}\n\n{facts(rows)}"


def documents() -> Mapping[Path, str]:
    """Return docs/results/layer.md and its plot by path."""
    run = load(RUN)
    return {**page("layer", {"recall": recall(run)}), PLOT: plot(run)}
