"""The layer's documents: docs/results/benchmarks.md, its plots and README.md's table."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.cases import layer, layer_accuracy, layer_training
from benchmarks.cases.layer import by_length
from benchmarks.engine.limits import Criterion, limits_table, missed
from benchmarks.engine.results import DATA, ROOT, Entry, Run, load, versions
from benchmarks.report.documents import RESULTS, WIDTH, filled, page
from benchmarks.report.layer_steps import profile_table
from benchmarks.report.layer_tables import accuracy, training
from benchmarks.report.markdown import facts, table, times
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


class Quantity(NamedTuple):
    """A compared quantity: its plot's file and title, and its figure of one length's processes."""

    plot: str
    title: str
    axis: str
    of: Callable[[Sequence[Entry]], float | None]
    digits: str


def _cold(processes: Sequence[Entry]) -> float | None:
    cold = (p.figures["first_call_seconds"] for p in processes if p.texts["cache"] == "cold")
    return max(cold, default=None)


SPEED = Quantity(
    "layer-speed.svg",
    "Tokens a second in the validator's loop",
    "M tokens/s",
    lambda processes: median(p.figures["tokens_per_sec"] for p in processes) / 1e6,
    ".3g",
)
MEMORY = Quantity(
    "layer-memory.svg",
    "Peak memory in that loop",
    "GiB",
    lambda processes: max(p.figures["vram_mb"] for p in processes) / 1024,
    ".2f",
)
FIRST_CALL = Quantity(
    "layer-first-call.svg",
    "First call of a fresh process with empty kernel caches",
    "seconds",
    _cold,
    ".1f",
)


def figures(runs: Runs, quantity: Quantity) -> dict[str, dict[int, float]]:
    """Return a quantity by tree and length; a tree may lack lengths."""
    values: dict[str, dict[int, float]] = {name: {} for name in TREES}
    for name in TREES:
        for length, processes in by_length(runs[name]).items():
            value = quantity.of(processes)
            if value is not None:
                values[name][length] = value
    return values


def plot(runs: Runs, quantity: Quantity) -> str:
    """Return the SVG of a quantity against the length."""
    values = figures(runs, quantity)
    lines = [
        Line(label, colour, list(values[name].items()))
        for name, (label, colour) in TREES.items()
        if values[name]  # a tree that failed its check has no figures
    ]
    title = f"{quantity.title}, {runs['overlay'].gpu}"
    return line_plot(title, "tokens", quantity.axis, lines)


def cells(runs: Runs, quantity: Quantity, n: int, trees: Iterable[str] = TREES) -> list[str]:
    """Return a quantity at a length, tree by tree; a dash for None."""
    values = figures(runs, quantity)
    return [f"{values[t][n]:{quantity.digits}}" if n in values[t] else "-" for t in trees]


def comparison(runs: Runs, quantity: Quantity) -> str:
    """Return the table of a quantity by length and tree."""
    header = ["tokens", *(f"{label}, {quantity.axis}" for label, _ in TREES.values())]
    lengths = figures(runs, quantity)["overlay"]
    return table(header, [[f"{n:,}", *cells(runs, quantity, n)] for n in lengths])


def speeds(runs: Runs) -> str:
    """Return the table of speeds, with how often ours is faster, and how far processes differ."""
    speeds, ours = figures(runs, SPEED), by_length(runs["overlay"])
    rows = []
    for n, median_speed in speeds["overlay"].items():
        row = [f"{n:,}", *cells(runs, SPEED, n)]
        for other in ("public-fork", "baseline"):
            row.append(f"{median_speed / speeds[other][n]:.0f}" if n in speeds[other] else "-")
        speed = [p.figures["tokens_per_sec"] for p in ours[n]]
        spread = (max(speed) - min(speed)) / median(speed)
        rows.append([*row, f"{spread:.1%}", f"{max(speed) / 1e6:{SPEED.digits}}"])
    header = ["tokens", *(f"{label}, {SPEED.axis}" for label, _ in TREES.values())]
    names = "times the fork", "times the baseline", "spread", "fastest process"
    return table([*header, *names], rows)


def short_table(runs: Runs) -> str:
    """Return README.md's table of speeds, its conditions, and the missed limits."""
    speed, names = figures(runs, SPEED), ("public-fork", "baseline", "overlay")
    rows = [
        [
            f"{n:,}",
            *cells(runs, SPEED, n, names),
            times(speed["overlay"][n] / speed["baseline"][n]),
        ]
        for n in IN_README
    ]
    shown = table(["tokens", *(TREES[name][0] for name in names), "times the baseline"], rows)
    ours = runs["overlay"]
    machine = ours.environment
    where = f"{machine.gpu}, driver {machine.driver}, {versions(machine)}" if machine else "unknown"
    every = limits(runs)
    out = missed(every)
    lost = f"; missed: {'; '.join(out)}" if out else ""
    text = (
        f"Measured {ours.created} at commit {(ours.commit or 'unknown')[:12]}: {where}. "
        f"{len(every) - len(out)} of {len(every)} limits of this run are kept{lost}."
    )
    return f"{shown}\n\n{textwrap.fill(text, WIDTH, break_on_hyphens=False)}"


def checks(runs: Runs) -> str:
    """Return for each tree the checked lengths, the time of its measurement, and its failures."""
    lines = []
    for name, (label, _) in TREES.items():
        run = runs[name]
        lengths = by_length(run)
        counts = sorted({len(processes) for processes in lengths.values()})
        every = [p for processes in lengths.values() for p in processes]
        passed = sorted(
            {int(p.figures["checked_tokens"]) for p in every if "checked_tokens" in p.figures}
        )
        checked = "not checked"
        if passed:
            where = ", ".join(f"{n:,}" for n in passed)
            checked = f"passed the correctness check at {where} tokens"
        text = "no figures"
        if counts:
            processes = " to ".join(map(str, sorted({counts[0], counts[-1]})))
            text = f"{processes} process{'es' * (processes != '1')} a length, {checked}"
        when = f"{run.created}, commit {(run.commit or 'unknown')[:12]}"
        lines.append(f"- {label}: {'; '.join([text, *failed(run), when])}.")
    return "\n".join(lines)


def failed(run: Run) -> list[str]:
    """Return for each reason the lengths without a result."""
    lengths: dict[str, list[str]] = {}
    for entry in run.table("processes"):
        if entry.failure:
            lengths.setdefault(entry.failure, []).append(f"{entry.of['tokens']:,}")
    return [f"{', '.join(n)} tokens gave nothing ({why})" for why, n in lengths.items()]


def bound_of(machine: Environment) -> float | None:
    """Return the hardware bound on the tokens/s of a GPU; None for an unknown GPU."""
    card = known(machine.gpu or "")
    return hardware_bound(machine) or (published_bound(card) if card else None)


def shares_of_bound(machine: Environment, speeds: Mapping[str, Mapping[int, float]]) -> str:
    """Return how near the layer comes to the hardware bound, and how much of the gap it closes.

    Args:
        speeds: M tokens/s by tree and length; a dash marks another tree's missing speed.
    """
    exact = bound_of(machine)
    if exact is None:
        return "The bound of this GPU is not known."
    bound = exact / 1e6
    rows = []
    for n, ours in speeds["overlay"].items():
        closed = [
            f"{speed_of_light(ours, bound, speeds[other][n]):.1%}" if n in speeds[other] else "-"
            for other in ("public-fork", "baseline")
        ]
        rows.append([f"{n:,}", f"{ours / bound:.1%}", *closed])
    names = (
        "tokens",
        "of bound",
        *(f"gap closed, from the {x}" for x in ("public fork", "baseline")),
    )
    return f"{table(names, rows)}\n\nThe bound is {bound:.0f} M tokens/s."


def load_runs() -> Runs:
    """Read the runs.

    Raises:
        OSError, pydantic.ValidationError: a file is missing, or is not a run.
    """
    return {name: load(DATA / f"{name}.json") for name in (*TREES, *OTHERS)}


def limits(runs: Runs) -> list[Criterion]:
    """Return every limit of the layer with its figure."""
    return [
        *layer.tree_limits(runs["overlay"], runs["overlay-ops"]),
        *layer_accuracy.limits(runs["layer-accuracy"]),
        *layer_training.limits(runs["layer-training"]),
    ]


def documents() -> dict[Path, str]:
    """Return the page, README.md and the plots by path."""
    runs = load_runs()
    ours = runs["overlay"]
    machine = ours.environment
    if machine is None:
        raise SystemExit("the overlay's run names no machine: measure again")
    where = {
        "GPU": f"{machine.gpu}, driver {machine.driver}",
        "torch, Triton": f"{machine.torch}, {machine.triton}",
        "CUDA, Python": f"{machine.cuda}, {machine.python}",
        "date": f"{ours.created}",
        "commit": f"{ours.commit}",
        "protocol": ours.protocol,
    }
    sections = {
        "machine": facts(where),
        "checks": checks(runs),
        "speed": speeds(runs),
        "bound": shares_of_bound(machine, figures(runs, SPEED)),
        "memory": comparison(runs, MEMORY),
        "first_call": comparison(runs, FIRST_CALL),
        "training": training(runs["layer-training"]),
        "kernels": "\n\n".join(profile_table(runs[name]) for name in OTHERS[:2]),
        "accuracy": accuracy(runs["layer-accuracy"]),
        "limits": limits_table(limits(runs)),
    }
    readme = ROOT / "README.md"
    return {
        **page("benchmarks", sections),
        readme: filled(readme, readme.read_text(), {"speed": short_table(runs)}),
        **{RESULTS / q.plot: plot(runs, q) for q in (SPEED, MEMORY, FIRST_CALL)},
    }
