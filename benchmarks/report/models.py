"""docs/results/models.md: costs of each mechanism and of WKV6, and results of small models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.cases.learned_text import EVERY
from benchmarks.cases.mechanisms import bound_ms
from benchmarks.engine.comparison import WAYS
from benchmarks.engine.mechanism import FLA, SEQUENTIAL
from benchmarks.engine.results import Entry, Run
from benchmarks.mechanisms import implementations
from benchmarks.report.documents import RESULTS, page, run_of
from quasar_kernels.line_plot import (
    BLUE,
    CYAN,
    FROM_ZERO,
    GREEN,
    GREY,
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

Record = Mapping[str, Any]
DETAILED_TOKENS = 65_536
"""The length whose memory, share of the bound and errors are shown."""
FAMILIES: Mapping[str, Mapping[str, str]] = {
    "Quasar and the delta rule": {"Quasar": GREEN, "delta rule": BLUE},
    "Decays: gated delta rule, KDA, GLA": {
        "gated delta rule": RED,
        "KDA": CYAN,
        "GLA": PURPLE,
    },
    "RWKV": {"RWKV-6": PURPLE, "RWKV-7": YELLOW},
    "Mamba-2, and a block of RWKV-6, Mamba-2 and Quasar": {
        "Mamba-2": BLUE,
        "hybrid block": PINK,
    },
}
"""The panels of a plot: which mechanisms are in each, and their colours there."""
REFERENCE = "softmax attention"
"""The mechanism that is in every panel, in grey."""

NAMES = {"rwkv6": "RWKV-6", "mamba2": "Mamba-2", "quasar": "Quasar"}
COLOURS = {
    "Quasar": GREEN,
    "RWKV-6": PURPLE,
    "Mamba-2": YELLOW,
    "RWKV-6 + Mamba-2": BLUE,
    "RWKV-6 + Quasar": RED,
    "Mamba-2 + Quasar": CYAN,
    "RWKV-6 + Mamba-2 + Quasar": PINK,
}
"""Colours of models by their branches."""
SHOWN = 5
"""Upper end of the text's plot, as a multiple of the lowest loss; all models soon are below it."""


def label(name: str) -> str:
    one = implementations()[name]
    return f"{one.mechanism}, {one.by}"


def timed(run: Run, way: str, *, packed: bool = False) -> dict[str, dict[int, Entry]]:
    """Return the timed calls, by implementation and tokens."""
    result: dict[str, dict[int, Entry]] = {}
    for entry in run.table("calls"):
        if not entry.failure and (entry.of["way"], entry.of["packed"]) == (way, packed):
            result.setdefault(entry.by, {})[int(entry.of["tokens"])] = entry
    return result


def per_second(entry: Entry, ms: str = "ms") -> str:
    """Return millions of tokens of all sequences in a second."""
    tokens = int(entry.of["batch"]) * int(entry.of["tokens"])
    return f"{tokens / entry.figures[ms] / 1e3:.3g}"


def lines(run: Run, way: str) -> list[Record]:
    """Return a row for each implementation: its entries by tokens, and its longest one's speed."""
    return [
        {
            **{str(tokens): entry for tokens, entry in calls.items()},
            "name": label(name),
            "per_second": per_second(calls[max(calls)]),
        }
        for name, calls in timed(run, way).items()
    ]


def cost(run: Run, entry: Entry) -> Record:
    return {
        **entry.of,
        **entry.figures,
        **entry.texts,
        "name": label(entry.by),
        "entry": entry,
        "bound_ms": bound_ms(run, entry),
        "per_second": per_second(entry),
    }


def details(run: Run) -> list[Record]:
    """Return each implementation's call of about DETAILED_TOKENS tokens, in both ways."""
    rows: list[Record] = []
    for way in WAYS:
        packed = timed(run, way, packed=True)
        for name, calls in timed(run, way).items():
            tokens = min(calls, key=lambda n: abs(n - DETAILED_TOKENS))
            packed_call = packed.get(name, {}).get(tokens)
            packed_ms = packed_call.figures["ms"] if packed_call else None
            rows.append({**cost(run, calls[tokens]), "packed_ms": packed_ms})
    return rows


def decoding(run: Run) -> list[Record]:
    calls = timed(run, "decoding").values()
    return [cost(run, entry) for by_tokens in calls for entry in by_tokens.values()]


def absent(run: Run) -> list[Record]:
    """Return the calls that were not measured, with the reasons."""
    rows: list[Record] = []
    for entry in run.table("calls"):
        if entry.failure:
            packed = "packed " if entry.of.get("packed") else ""
            tokens = f", {packed}{entry.of['tokens']:,} tokens" if "tokens" in entry.of else ""
            what = f"{label(entry.by)}: {entry.of.get('way', 'all else')}{tokens}"
            rows.append({"what": what, "why": entry.failure.replace("|", "\\|")})
    return rows


def cost_plot(run: Run, way: str) -> str:
    """Return the SVG of the kernels' time by tokens, with dashed lines for fla's."""
    known = implementations()
    kernels = {n: calls for n, calls in timed(run, way).items() if known[n].by != SEQUENTIAL}
    panels = []
    for title, colours in FAMILIES.items():
        shown = {REFERENCE: GREY, **colours}
        drawn = [
            Line(
                one.mechanism + (", fla" if one.by == FLA else ""),
                shown[one.mechanism],
                [(tokens, calls[tokens].figures["ms"]) for tokens in sorted(calls)],
                dashed=one.by == FLA,
            )
            for name, calls in kernels.items()
            if (one := known[name]).mechanism in shown
        ]
        panels.append(Panel(title, drawn))
    title = f"{way.capitalize()}, 8 heads of 64, bf16, {run.gpu}"
    return panel_plot(title, "tokens", "milliseconds", panels)


def by_branches(run: Run) -> dict[str, list[Entry]]:
    """Return trainings by their branches, single mechanisms first."""
    entries: dict[tuple[str, ...], list[Entry]] = {}
    for entry in run.table("trainings"):
        entries.setdefault(tuple(str(entry.of["mixers"]).split("+")), []).append(entry)
    return {
        " + ".join(NAMES[name] for name in mixers): sorted(
            entries[mixers], key=lambda entry: int(entry.of["seed"])
        )
        for mixers in sorted(entries, key=lambda mixers: (len(mixers), mixers))
    }


def learned(run: Run) -> list[Record]:
    """Return a row for each model: its sizes, and its results by seed."""
    rows: list[Record] = []
    for branches, trainings in by_branches(run).items():
        figures = [one.figures for one in trainings]
        row: dict[str, Any] = {"branches": branches, **figures[0]}
        if "recall" in row:
            row["recall"] = ", ".join(f"{of['recall']:.2%}" for of in figures)
            row["steps"] = ", ".join(f"{of['steps']:,}" for of in figures)
        else:
            row["mean_loss"] = fmean(of["held_out"] for of in figures)
            row["losses"] = ", ".join(f"{of['held_out']:.4f}" for of in figures)
        rows.append(row)
    return rows


def trained(run: Run) -> dict[str, str]:
    """Return how many of the trainings a run has."""
    have, wanted = len(run.table("trainings")), int(run.number("seeds")) * (2 ** len(NAMES) - 1)
    ended = "all" if have == wanted else f"{have}: the run was stopped before the others ended"
    return {f"of {wanted} trainings": ended}


def recall_plot(run: Run) -> str:
    """Return the SVG of every training's loss by steps: a panel for each choice of branches."""
    panels = [
        Panel(name, [Line("", COLOURS[name], _by_steps(t.series["losses"])) for t in trainings])
        for name, trainings in by_branches(run).items()
    ]
    title = f"Training loss of recall, one line per seed, {run.gpu}"
    return panel_plot(title, "steps", "nats", panels, x=FROM_ZERO, columns=2)


def text_plot(run: Run) -> str:
    """Return the SVG of each choice's loss by steps, a mean over its seeds."""
    drawn = []
    for name, trainings in by_branches(run).items():
        curves = zip(*(t.series["losses"] for t in trainings), strict=True)
        points = _by_steps([fmean(losses) for losses in curves])
        drawn.append(Line(name, COLOURS[name], points, dashed="+" not in name))
    title = f"Training loss on a text, means over the seeds, {run.gpu}"
    losses = [loss for line in drawn for _, loss in line.points]
    nats = Scale(high=min(SHOWN * min(losses), max(losses)))
    return line_plot(title, "steps", "nats per byte", drawn, FROM_ZERO, nats)


def _by_steps(losses: Sequence[float]) -> list[tuple[float, float]]:
    return [(EVERY * (n + 1), loss) for n, loss in enumerate(losses)]


def documents() -> dict[Path, str]:
    functions = (lines, details, decoding, absent, per_second, learned, trained)
    costs = run_of("mechanisms")
    return {
        **page("models", **{function.__name__: function for function in functions}),
        RESULTS / "mechanisms-forward.svg": cost_plot(costs, WAYS[0]),
        RESULTS / "mechanisms-training.svg": cost_plot(costs, WAYS[1]),
        RESULTS / "learned-recall.svg": recall_plot(run_of("learned-recall")),
        RESULTS / "learned-text.svg": text_plot(run_of("learned-text")),
    }
