"""The tables and plots of docs/models.md: what models of each choice of branches learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from benchmarks.learning.results import EVERY, LearnedRecall, LearnedText, Trained
from benchmarks.markdown import facts, records
from benchmarks.results import DATA, ROOT, load, told
from quasar_kernels.line_plot import Line, line_plot

RECALL, TEXT = DATA / "learned-recall.json", DATA / "learned-text.json"
PLOTS = {RECALL: ROOT / "docs" / "learned-recall.svg", TEXT: ROOT / "docs" / "learned-text.svg"}
NAMES = {"rwkv6": "RWKV-6", "mamba2": "Mamba-2", "quasar": "Quasar"}
COLOURS = {
    ("quasar",): "#0b6e4f",
    ("rwkv6",): "#8a5fb0",
    ("mamba2",): "#c28a00",
    ("rwkv6", "mamba2"): "#2a5ca8",
    ("rwkv6", "quasar"): "#b5432a",
    ("mamba2", "quasar"): "#00838f",
}
ALL = "#111111"
"""The colour of the hybrid with every branch."""

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
    e = run.environment
    machine = run.where(f"torch {e.torch}") if e.gpu else {
        "machine": f"{e.cpu}, torch {e.torch}", "date, commit": f"{run.created}, {run.commit}",
    }  # fmt: skip
    have, wanted = len(run.trainings), run.seeds * (2 ** len(NAMES) - 1)
    ended = "all" if have == wanted else f"{have}: the run was stopped before the others ended"
    return {f"of {wanted} trainings": ended, **machine, "protocol": run.protocol}


def plot(title: str, curves: Mapping[tuple[str, ...], Sequence[Sequence[float]]]) -> str:
    """Return the SVG of each choice's losses by steps: means over its seeds while all go on."""
    lines = []
    for mixers, seeds in curves.items():
        means = [fmean(losses) for losses in zip(*seeds, strict=False)]
        points = [(EVERY * (n + 1), loss) for n, loss in enumerate(means)]
        short = "+".join(NAMES[name][0] for name in mixers)
        lines.append(Line(short, COLOURS.get(mixers, ALL), points, dashed=len(mixers) == 1))
    return line_plot(title, "steps", "nats", lines)


def plots() -> dict[Path, str]:
    """Return the plots of the runs that are there, by path."""
    found = {}
    if RECALL.exists():
        recalled = by_choice(load(LearnedRecall, RECALL).trainings)
        curves = {mixers: [t.curve.losses for t in ts] for mixers, ts in recalled.items()}
        found[PLOTS[RECALL]] = plot("Loss of recall: R RWKV-6, M Mamba-2, Q Quasar", curves)
    if TEXT.exists():
        read = by_choice(load(LearnedText, TEXT).trainings)
        curves = {mixers: [t.losses for t in ts] for mixers, ts in read.items()}
        found[PLOTS[TEXT]] = plot("Loss on a text: R RWKV-6, M Mamba-2, Q Quasar", curves)
    return found


def sections() -> dict[str, str]:
    """Return what docs/models.md says of both runs, by the names of its places."""
    return {"recall": told(LearnedRecall, RECALL, recall), "text": told(LearnedText, TEXT, text)}
