"""The tables and plots of docs/results/models.md: what models of each choice of branches learn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from benchmarks.learning.results import EVERY, LearnedRecall, LearnedText, Trained
from benchmarks.report.documents import RESULTS
from benchmarks.report.markdown import facts, records
from benchmarks.results import DATA, load, told
from quasar_kernels.line_plot import FROM_ZERO, Line, Panel, Scale, line_plot, panel_plot

RECALL, TEXT = DATA / "learned-recall.json", DATA / "learned-text.json"
PLOTS = {RECALL: RESULTS / "learned-recall.svg", TEXT: RESULTS / "learned-text.svg"}
NAMES = {"rwkv6": "RWKV-6", "mamba2": "Mamba-2", "quasar": "Quasar"}
COLOURS = {
    ("quasar",): "#0b6e4f",
    ("rwkv6",): "#8a5fb0",
    ("mamba2",): "#a87400",
    ("rwkv6", "mamba2"): "#2a5ca8",
    ("rwkv6", "quasar"): "#b5432a",
    ("mamba2", "quasar"): "#00838f",
}
ALL = "#111111"
"""The colour of the hybrid with every branch."""
SHOWN = 5
"""The plot of the text ends at so many times its lowest loss: all models pass that at once."""

Training = TypeVar("Training", bound=Trained)


def by_choice(trainings: Sequence[Training]) -> dict[tuple[str, ...], list[Training]]:
    """Return trainings by their branches, single mechanisms first."""
    found: dict[tuple[str, ...], list[Training]] = {}
    for training in sorted(trainings, key=lambda t: (len(t.mixers), t.mixers, t.seed)):
        found.setdefault(training.mixers, []).append(training)
    return found


def label(mixers: tuple[str, ...]) -> str:
    """Return what a table calls a model."""
    return " + ".join(NAMES[name] for name in mixers)


def _sizes(trainings: Sequence[Trained]) -> dict[str, str]:
    one = trainings[0]
    return {"parameters": f"{one.parameters:,}", "MLP's width": str(one.inner)}


def recall(run: LearnedRecall) -> str:
    """Return the table of recall, and how it was taught."""
    rows = []
    for mixers, trainings in by_choice(run.trainings).items():
        curves = [t.curve for t in trainings]
        rows.append(
            {
                "branches": label(mixers),
                **_sizes(trainings),
                "recall by seed": ", ".join(f"{c.recall:.2%}" for c in curves),
                "steps": ", ".join(f"{c.steps:,}" for c in curves),
            }
        )
    task = run.task
    how = {
        "task": f"{task.batch} x {task.tokens:,} tokens, {task.pairs} pairs, "
        f"vocabulary {task.vocabulary:,}; at most {run.recipe.most_steps:,} steps",
        "model": f"{run.recipe.layers} blocks of {run.recipe.width} channels",
    }
    return (
        f"![recall's loss]({PLOTS[RECALL].name})\n\n{records(rows)}\n\n{facts(how | _where(run))}"
    )


def text(run: LearnedText) -> str:
    """Return the table of the losses on the text that was held out, and how it was learned."""
    rows = []
    for mixers, trainings in by_choice(run.trainings).items():
        losses = [t.held_out for t in trainings]
        rows.append(
            {
                "branches": label(mixers),
                **_sizes(trainings),
                "nats a byte, held out": f"{fmean(losses):.4f}",
                "by seed": ", ".join(f"{loss:.4f}" for loss in losses),
            }
        )
    r = run.recipe
    how = {
        "text": run.text,
        "model": f"{r.layers} blocks of {r.width} channels, {r.heads} heads",
        "training": f"{r.steps:,} steps of {r.batch} x {r.tokens:,} bytes, rate {r.rate:g}",
    }
    return f"![loss on a text]({PLOTS[TEXT].name})\n\n{records(rows)}\n\n{facts(how | _where(run))}"


def _where(run: LearnedRecall | LearnedText) -> dict[str, str]:
    have, wanted = len(run.trainings), run.seeds * (2 ** len(NAMES) - 1)
    ended = "all" if have == wanted else f"{have}: the run was stopped before the others ended"
    return {f"of {wanted} trainings": ended, **run.where(), "protocol": run.protocol}


def recall_plot(run: LearnedRecall) -> str:
    """Return the SVG of every training's loss by steps: a panel for each choice of branches."""
    panels = [
        Panel(
            label(mixers),
            [Line("", COLOURS.get(mixers, ALL), _by_steps(t.curve.losses)) for t in trainings],
        )
        for mixers, trainings in by_choice(run.trainings).items()
    ]
    title = f"Training loss of recall, a line a seed{_on(run)}"
    return panel_plot(title, "steps", "nats", panels, x=FROM_ZERO, columns=2)


def text_plot(run: LearnedText) -> str:
    """Return the SVG of each choice's loss by steps, a mean over its seeds."""
    lines = []
    for mixers, trainings in by_choice(run.trainings).items():
        means = [fmean(losses) for losses in zip(*(t.losses for t in trainings), strict=True)]
        single = len(mixers) == 1
        lines.append(Line(label(mixers), COLOURS.get(mixers, ALL), _by_steps(means), single))
    title = f"Training loss on a text, means over the seeds{_on(run)}"
    losses = [loss for line in lines for _, loss in line.points]
    nats = Scale(high=min(SHOWN * min(losses), max(losses)))
    return line_plot(title, "steps", "nats a byte", lines, FROM_ZERO, nats)


def _on(run: LearnedRecall | LearnedText) -> str:
    return f", {run.environment.gpu}" if run.environment.gpu else ""


def _by_steps(losses: Sequence[float]) -> list[tuple[float, float]]:
    return [(EVERY * (n + 1), loss) for n, loss in enumerate(losses)]


def plots() -> dict[Path, str]:
    """Return the plots of the runs that are there, by path."""
    found = {}
    if RECALL.exists():
        found[PLOTS[RECALL]] = recall_plot(load(LearnedRecall, RECALL))
    if TEXT.exists():
        found[PLOTS[TEXT]] = text_plot(load(LearnedText, TEXT))
    return found


def sections() -> dict[str, str]:
    """Return what docs/results/models.md says of both runs, by the names of its places."""
    return {"recall": told(LearnedRecall, RECALL, recall), "text": told(LearnedText, TEXT, text)}
