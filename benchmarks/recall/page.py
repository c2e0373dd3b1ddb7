"""docs/results/layer.md: models that learn to recall, trained in every way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.recall.results import WAYS, Curve, Recall, Setting
from benchmarks.report.documents import RESULTS, page
from benchmarks.report.markdown import facts, records
from benchmarks.results import DATA, load
from quasar_kernels.line_plot import FROM_ZERO, Line, Panel, panel_plot

RUN = DATA / "recall.json"
PLOT = RESULTS / "recall.svg"
ALIKE = 100
"""Steps over which losses are compared; when a model begins to recall is a matter of rounding."""
COLOURS = {
    "fp32": "#777777",
    "bf16": "#0b6e4f",
    "compiled": "#2a5ca8",
    "checkpointed": "#b5432a",
    "ddp": "#8a5fb0",
    "fsdp": "#a87400",
}


def plot(setting: Setting, gpu: str) -> str:
    """Return the SVG of the losses against the steps: a panel for each way of training."""
    every = setting.recipe.every
    panels = []
    for curve in setting.curves:
        points = [(every * (n + 1), loss) for n, loss in enumerate(curve.losses)]
        name = WAYS[curve.way].replace("`", "")
        panels.append(Panel(name, [Line("", COLOURS[curve.way], points)]))
    title = f"Loss of recall over {setting.task.tokens:,} tokens, {gpu}"
    return panel_plot(title, "steps", "nats", panels, x=FROM_ZERO, columns=2)


def apart(curve: Curve, exact: Curve, every: int) -> float:
    """Return the largest relative difference of two curves over their first `ALIKE` steps."""
    pairs = zip(curve.losses, exact.losses, strict=False)
    return max(abs(a - b) / b for a, b in list(pairs)[: ALIKE // every])


def trainings(run: Recall) -> str:
    """Return the table of every training."""
    rows = []
    for setting in run.settings:
        exact = next(curve for curve in setting.curves if curve.way == "fp32")
        for curve in setting.curves:
            off = "" if curve is exact else f"{apart(curve, exact, setting.recipe.every):.1e}"
            row = {
                "tokens, training": f"{setting.task.tokens:,}, {WAYS[curve.way]}",
                "GPUs": str(curve.gpus),
                "recall": f"{curve.recall:.2%}",
                "steps": f"{curve.steps:,}",
                "loss at the end": f"{curve.losses[-1]:.1e}",
                f"from fp32's, {ALIKE} steps": off,
                "a step, ms": f"{curve.step_ms:.1f}",
                "in all, s": f"{curve.seconds:.0f}",
            }
            rows.append(row)
    return records(rows)


def _task(setting: Setting) -> str:
    vocabulary, tokens, pairs, batch = setting.task
    return f"{batch} x {tokens:,} tokens, {pairs} pairs, vocabulary {vocabulary:,}"


def recall(run: Recall) -> str:
    """Return where and how it was measured, and the tables."""
    tasks = "; ".join(f"{_task(s)}, at most {s.recipe.most_steps:,} steps" for s in run.settings)
    model = run.settings[0].recipe
    rows = {
        **run.where(f"CUDA {run.environment.cuda}"),
        "model": f"{model.layers} blocks of {model.width} channels, {model.heads} heads",
        "rate": f"{model.rate:g}",
        "tasks": tasks,
        "protocol": run.protocol,
    }
    return f"![loss against steps]({PLOT.name})\n\n{trainings(run)}\n\n{facts(rows)}"


def documents() -> Mapping[Path, str]:
    """Return docs/results/layer.md and its plot by path; nothing before the first run."""
    if not RUN.exists():
        return {}
    run = load(Recall, RUN)
    drawn = plot(run.settings[0], run.environment.gpu or "unknown GPU")
    return {**page("layer", {"recall": recall(run)}), PLOT: drawn}
