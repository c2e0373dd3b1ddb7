"""The layer's documents: docs/results/benchmarks.md, its plots and README.md's table."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import layer, layer_accuracy, layer_training
from benchmarks.cases.layer import by_length
from benchmarks.engine.limits import Criterion, missed
from benchmarks.engine.results import ROOT, Entry, Run, versions
from benchmarks.report import rivals
from benchmarks.report.documents import RESULTS, filled, page, run_of
from benchmarks.report.layer_steps import profile_table
from benchmarks.report.markdown import WIDTH, columns
from harness.hardware.gpus import known, published_bound
from harness.hardware.machine import Environment
from harness.hardware.roofline import hardware_bound, speed_of_light
from quasar_kernels.line_plot import BLUE, GREEN, GREY, RED, Line, line_plot

IN_README = (512, 2048, 16384, 100_000, 1_000_000)
TREES = {
    "public-fork": ("public fork", GREY),
    "baseline": ("baseline", RED),
    "overlay-ops": ("operator only", BLUE),
    "overlay": ("this project", GREEN),
}
"""Label and colour of each tree."""
Runs = Mapping[str, Run]
"""The runs by the names of their files."""
OTHERS = ("layer-profile", "layer-profile-ops", "layer-accuracy", "layer-training")
PLOTS = {
    "speed": ("Tokens a second in the validator's loop", "M tokens/s"),
    "memory": ("Peak memory in that loop", "GiB"),
    "first_call": ("First call of a fresh process with empty kernel caches", "seconds"),
}
"""Title and unit of each plotted figure."""


def figures(processes: Sequence[Entry]) -> dict[str, float | None]:
    """Return the figures of one length: medians of speeds, and the largest of other values."""
    speeds = [p.figures["tokens_per_sec"] / 1e6 for p in processes]
    cold = [p.figures["first_call_seconds"] for p in processes if p.texts["cache"] == "cold"]
    return {
        "speed": median(speeds),
        "fastest": max(speeds),
        "spread": (max(speeds) - min(speeds)) / median(speeds),
        "memory": max(p.figures["vram_mb"] for p in processes) / 1024,
        "first_call": max(cold, default=None),
    }


def lengths(runs: Runs, bound: float | None = None) -> list[dict[str, Any]]:
    """Return a row for each length of this project's layer, with the figures of each tree.

    Args:
        bound: the hardware bound in M tokens/s, for the shares of it.
    """
    by_tree = {name: by_length(runs[name]) for name in TREES}
    rows = []
    for tokens in by_tree["overlay"]:
        row: dict[str, Any] = {"tokens": tokens, "bound": bound}
        row |= {name: figures(of[tokens]) for name, of in by_tree.items() if tokens in of}
        if bound is not None:
            row["closed"] = {
                name: speed_of_light(row["overlay"]["speed"], bound, row[name]["speed"])
                for name in ("public-fork", "baseline")
                if name in row
            }
        rows.append(row)
    return rows


def plot(runs: Runs, name: str) -> str:
    lines = []
    for tree, (label, colour) in TREES.items():
        rows = [(n, figures(of)[name]) for n, of in by_length(runs[tree]).items()]
        points = [(n, value) for n, value in rows if value is not None]
        if points:  # a tree that failed its check has no figures
            lines.append(Line(label, colour, points))
    title, unit = PLOTS[name]
    return line_plot(f"{title}, {runs['overlay'].gpu}", "tokens", unit, lines)


def short_table(runs: Runs) -> str:
    """Return README.md's table of speeds, its conditions, and the number of limits that are met."""
    shown = columns(
        [row for row in lengths(runs) if row["tokens"] in IN_README],
        {
            "tokens": "{tokens:,}",
            "public fork": "{public-fork.speed:.3g}",
            "baseline": "{baseline.speed:.3g}",
            "this project": "{overlay.speed:.3g}",
            "times the baseline": "{overlay.speed/baseline.speed:.1f}",
        },
    )
    ours = runs["overlay"]
    machine = ours.environment
    where = f"{machine.gpu}, driver {machine.driver}, {versions(machine)}" if machine else "unknown"
    if len({run.environment.gpu_uuid for name in TREES if (run := runs[name]).environment}) > 1:
        where = f"{where}. Each tree ran alone on one of the machine's GPUs"
    every = limits(runs)
    out = missed(every)
    text = (
        f"Measured in one run on {ours.created} at commit "
        f"{(ours.commit or 'unknown')[:12]}: {where}. The layer meets "
        f"{len(every) - len(out)} of its {len(every)} limits for speed, memory and accuracy."
    )
    parts = (shown, textwrap.fill(text, WIDTH, break_on_hyphens=False), rivals.short_table())
    return "\n\n".join(filter(None, parts))


def checks(run: Run) -> str:
    """Return the number of processes of a tree, its checked lengths, its failures, and its date."""
    timed = by_length(run)
    counts = sorted({len(processes) for processes in timed.values()})
    every = [p for processes in timed.values() for p in processes]
    passed = sorted({p.figures["checked_tokens"] for p in every if "checked_tokens" in p.figures})
    checked = ", ".join(f"{n:,}" for n in passed)
    reasons: dict[str, list[str]] = {}
    for entry in run.table("processes"):
        if entry.failure:
            reasons.setdefault(entry.failure, []).append(f"{entry.of['tokens']:,}")
    parts = [
        f"processes per length: {' to '.join(map(str, counts)) or 'none'}",
        f"passed the correctness check at {checked} tokens" if checked else "not checked",
        *(f"{', '.join(n)} tokens gave nothing ({why})" for why, n in reasons.items()),
        f"{run.created}, commit {(run.commit or 'unknown')[:12]}",
    ]
    return "; ".join(parts)


def bound_of(machine: Environment) -> float | None:
    """Return the hardware bound on the tokens/s of a GPU; None for an unknown GPU."""
    card = known(machine.gpu or "")
    return hardware_bound(machine) or (published_bound(card) if card else None)


def load_runs() -> Runs:
    """Read the runs.

    Raises:
        OSError, pydantic.ValidationError: a file is missing, or is not a run.
    """
    return {name: run_of(name) for name in (*TREES, *OTHERS)}


def limits(runs: Runs) -> list[Criterion]:
    return [
        *layer.tree_limits(runs["overlay"], runs["overlay-ops"]),
        *layer_accuracy.limits(runs["layer-accuracy"]),
        *layer_training.limits(runs["layer-training"]),
    ]


def documents() -> dict[Path, str]:
    runs = load_runs()
    machine = runs["overlay"].environment
    if machine is None:
        raise SystemExit("the overlay's run names no machine: measure again")
    bound = bound_of(machine)
    text = page(
        "benchmarks",
        checks={label: checks(runs[name]) for name, (label, _) in TREES.items()},
        criteria=limits(runs),
        lengths=lengths(runs, bound and bound / 1e6),
        ours=runs["overlay"],
        profiles=[profile_table(runs[name]) for name in OTHERS[:2]],
    )
    readme = ROOT / "README.md"
    return {
        **text,
        readme: filled(readme, "speed", short_table(runs)),
        **{RESULTS / f"layer-{name.replace('_', '-')}.svg": plot(runs, name) for name in PLOTS},
    }
