"""The tables and plots of docs/results/models.md: results of training each choice of branches."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.cases.learned_text import EVERY
from benchmarks.engine.results import Entry, Run
from benchmarks.report.documents import RESULTS
from benchmarks.report.markdown import facts, records
from quasar_kernels.line_plot import (
    BLUE,
    CYAN,
    FROM_ZERO,
    GREEN,
    PINK,
    PURPLE,
    RED,
    YELLOW,
    Line,
    Panel,
    Scale,
    line_plot,
    panel_plot,
)

RECALL_PLOT, TEXT_PLOT = RESULTS / "learned-recall.svg", RESULTS / "learned-text.svg"
NAMES = {"rwkv6": "RWKV-6", "mamba2": "Mamba-2", "quasar": "Quasar"}
COLOURS = {
    ("quasar",): GREEN,
    ("rwkv6",): PURPLE,
    ("mamba2",): YELLOW,
    ("rwkv6", "mamba2"): BLUE,
    ("rwkv6", "quasar"): RED,
    ("mamba2", "quasar"): CYAN,
}
ALL = PINK
"""The colour of the hybrid with every branch."""
SHOWN = 5
"""Upper end of the text's plot, as a multiple of the lowest loss; all models soon are below it."""


Choice = tuple[str, ...]


def by_choice(run: Run) -> dict[Choice, list[Entry]]:
    """Return trainings by their branches, single mechanisms first."""
    by_mixers: dict[Choice, list[Entry]] = {}
    for entry in run.table("trainings"):
        by_mixers.setdefault(tuple(str(entry.of["mixers"]).split("+")), []).append(entry)
    return {
        mixers: sorted(by_mixers[mixers], key=lambda entry: int(entry.of["seed"]))
        for mixers in sorted(by_mixers, key=lambda mixers: (len(mixers), mixers))
    }


def label(mixers: Choice) -> str:
    """Return a model's name in tables."""
    return " + ".join(NAMES[name] for name in mixers)


def _cells(mixers: Choice, trainings: Sequence[Entry]) -> dict[str, str]:
    one = trainings[0].figures
    size = {"parameters": f"{one['parameters']:,}", "MLP's width": str(one["inner"])}
    return {"branches": label(mixers), **size}


def recall(run: Run) -> str:
    """Return the table of recall, and the training's settings."""
    rows = [
        _cells(mixers, trainings)
        | {
            "recall by seed": ", ".join(f"{t.figures['recall']:.2%}" for t in trainings),
            "steps": ", ".join(f"{t.figures['steps']:,}" for t in trainings),
        }
        for mixers, trainings in by_choice(run).items()
    ]
    task = (
        "{batch} x {tokens:,} tokens, {pairs} pairs, vocabulary {vocabulary:,}; "
        "at most {most_steps:,} steps"
    )
    how = {
        "task": task.format(**run.settings),
        "model": "{layers} blocks of {width} channels".format(**run.settings),
    }
    return f"![recall's loss]({RECALL_PLOT.name})\n\n{records(rows)}\n\n{facts(how | _where(run))}"


def text(run: Run) -> str:
    """Return the table of losses on the held-out text, and the training's settings."""
    rows = []
    for mixers, trainings in by_choice(run).items():
        losses = [t.figures["held_out"] for t in trainings]
        row = {
            "nats per byte, held out": f"{fmean(losses):.4f}",
            "by seed": ", ".join(f"{loss:.4f}" for loss in losses),
        }
        rows.append(_cells(mixers, trainings) | row)
    training = "{steps:,} steps of {batch} x {tokens:,} bytes, rate {rate:g}"
    how = {
        "text": str(run.settings["text"]),
        "model": "{layers} blocks of {width} channels, {heads} heads".format(**run.settings),
        "training": training.format(**run.settings),
    }
    return f"![loss on a text]({TEXT_PLOT.name})\n\n{records(rows)}\n\n{facts(how | _where(run))}"


def _where(run: Run) -> dict[str, str]:
    have, wanted = len(run.table("trainings")), int(run.number("seeds")) * (2 ** len(NAMES) - 1)
    ended = "all" if have == wanted else f"{have}: the run was stopped before the others ended"
    return {f"of {wanted} trainings": ended, **run.where(), "protocol": run.protocol}


def recall_plot(run: Run) -> str:
    """Return the SVG of every training's loss by steps: a panel for each choice of branches."""
    panels = []
    for mixers, trainings in by_choice(run).items():
        colour = COLOURS.get(mixers, ALL)
        lines = [Line("", colour, _by_steps(t.series["losses"])) for t in trainings]
        panels.append(Panel(label(mixers), lines))
    title = f"Training loss of recall, one line per seed{_on(run)}"
    return panel_plot(title, "steps", "nats", panels, x=FROM_ZERO, columns=2)


def text_plot(run: Run) -> str:
    """Return the SVG of each choice's loss by steps, a mean over its seeds."""
    lines = []
    for mixers, trainings in by_choice(run).items():
        curves = zip(*(t.series["losses"] for t in trainings), strict=True)
        points, single = _by_steps([fmean(losses) for losses in curves]), len(mixers) == 1
        lines.append(Line(label(mixers), COLOURS.get(mixers, ALL), points, single))
    title = f"Training loss on a text, means over the seeds{_on(run)}"
    losses = [loss for line in lines for _, loss in line.points]
    nats = Scale(high=min(SHOWN * min(losses), max(losses)))
    return line_plot(title, "steps", "nats per byte", lines, FROM_ZERO, nats)


def _on(run: Run) -> str:
    return f", {run.gpu}" if run.environment and run.environment.gpu else ""


def _by_steps(losses: Sequence[float]) -> list[tuple[float, float]]:
    return [(EVERY * (n + 1), loss) for n, loss in enumerate(losses)]
