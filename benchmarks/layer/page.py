"""The layer's documents: docs/results/benchmarks.md, its plots and README.md's table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.engine.limits import Criterion, limits_table, missed
from benchmarks.layer.limits import criteria
from benchmarks.layer.results import LayerAccuracy, LayerProfile
from benchmarks.layer.tables.accuracy import accuracy_tables
from benchmarks.layer.tables.bound import shares_of_bound
from benchmarks.layer.tables.steps import profile_table
from benchmarks.layer.training_results import Training, training_criteria, training_tables
from benchmarks.report.documents import RESULTS, filled
from benchmarks.report.markdown import facts, table
from benchmarks.results import DATA, ROOT, load, versions
from harness.report import Report, load_report
from harness.sample import Sample
from quasar_kernels.line_plot import Line, line_plot

PROFILES = ("layer-profile", "layer-profile-ops")
IN_README = (512, 2048, 16384, 100_000, 1_000_000)

TREES = {
    "public-fork": ("public fork", "#777777"),
    "peer": ("baseline", "#b5432a"),
    "overlay-ops": ("operator only", "#2a5ca8"),
    "overlay": ("this project", "#0b6e4f"),
}
"""Label and colour of each report."""

Value = Callable[[Sequence[Sample]], float | None]
Reports = Mapping[str, Report]


class Quantity(NamedTuple):
    """What is compared: the plot's file, its title, and the figure of one length's processes."""

    plot: str
    title: str
    axis: str
    of: Value
    digits: str


SPEED = Quantity(
    "layer-speed.svg",
    "Tokens a second in the validator's loop",
    "M tokens/s",
    lambda runs: median(m.tokens_per_sec for m in runs) / 1e6,
    ".3g",
)
MEMORY = Quantity(
    "layer-memory.svg",
    "Peak memory in that loop",
    "GiB",
    lambda runs: max(m.vram_mb for m in runs) / 1024,
    ".2f",
)
FIRST_CALL = Quantity(
    "layer-first-call.svg",
    "First call of a fresh process with empty kernel caches",
    "seconds",
    lambda runs: max((m.first_call_seconds for m in runs if m.cache == "cold"), default=None),
    ".1f",
)


def figures(reports: Reports, quantity: Quantity) -> dict[str, dict[int, float]]:
    """Return a quantity by tree and length; a tree may lack lengths."""
    found: dict[str, dict[int, float]] = {name: {} for name in reports}
    for name, report in reports.items():
        for length, runs in sorted(report.by_length().items()):
            value = quantity.of(runs)
            if value is not None:
                found[name][length] = value
    return found


def plot(reports: Reports, quantity: Quantity) -> str:
    """Return the SVG of a quantity against the length."""
    found = figures(reports, quantity)
    lines = [
        Line(label, colour, list(found[name].items()))
        for name, (label, colour) in TREES.items()
        if found[name]  # a tree whose gate was red has no figures
    ]
    machine = reports["overlay"].environment
    title = f"{quantity.title}, {machine.gpu if machine else 'unknown GPU'}"
    return line_plot(title, "tokens", quantity.axis, lines)


def header(quantity: Quantity) -> list[str]:
    """Return the header of a table by length and tree."""
    return ["tokens", *(f"{label}, {quantity.axis}" for label, _ in TREES.values())]


def cells(reports: Reports, quantity: Quantity, n: int, trees: Iterable[str] = TREES) -> list[str]:
    """Return a quantity at a length, tree by tree; a dash where there is none."""
    found = figures(reports, quantity)
    return [f"{found[t][n]:{quantity.digits}}" if n in found[t] else "-" for t in trees]


def comparison(reports: Reports, quantity: Quantity) -> str:
    """Return the table of a quantity by length and tree."""
    lengths = figures(reports, quantity)["overlay"]
    return table(header(quantity), [[f"{n:,}", *cells(reports, quantity, n)] for n in lengths])


def speeds(reports: Reports) -> str:
    """Return the table of speeds, with how often ours is faster, and how far runs lie apart."""
    found, ours = figures(reports, SPEED), reports["overlay"].by_length()
    rows = []
    for n, fastest in found["overlay"].items():
        row = [f"{n:,}", *cells(reports, SPEED, n)]
        for other in ("public-fork", "peer"):
            row.append(f"{fastest / found[other][n]:.0f}" if n in found[other] else "-")
        runs = [m.tokens_per_sec for m in ours[n]]
        spread = (max(runs) - min(runs)) / median(runs)
        rows.append([*row, f"{spread:.1%}", f"{max(runs) / 1e6:{SPEED.digits}}"])
    names = "times the fork", "times the baseline", "spread", "fastest process"
    return table([*header(SPEED), *names], rows)


def short_table(runs: Runs) -> str:
    """Return README.md's table of speeds, where it was measured, and the limits it missed."""
    reports = runs.reports
    speed, names = figures(reports, SPEED), ("public-fork", "peer", "overlay")
    rows = []
    for n in IN_README:
        times = speed["overlay"][n] / speed["peer"][n]
        rows.append([f"{n:,}", *cells(reports, SPEED, n, names), f"{times:.1f}"])
    labels = [TREES[name][0] for name in names]
    shown = table(["tokens", *labels, "times the baseline"], rows)
    ours = reports["overlay"]
    machine = ours.environment
    where = f"{machine.gpu}, driver {machine.driver}, {versions(machine)}" if machine else "unknown"
    measured = f"Measured {ours.created_at:%Y-%m-%d} at commit {(ours.commit or 'unknown')[:12]}"
    out = missed(limits(runs))
    kept = f"{len(limits(runs)) - len(out)} of {len(limits(runs))} limits of this run are kept"
    lost = f"; missed: {'; '.join(out)}" if out else ""
    return f"{shown}\n\n{measured}: {where}. {kept}{lost}."


def losses(report: Report) -> list[str]:
    """Say once for each reason which lengths gave nothing."""
    lengths: dict[str, list[str]] = {}
    for failure in report.failures:
        lengths.setdefault(f"{failure.kind}: {failure.reason}", []).append(f"{failure.length:,}")
    return [f"{', '.join(n)} tokens gave nothing ({why})" for why, n in lengths.items()]


def gates(reports: Reports) -> str:
    """Say of each tree where it passed the gate, when it was measured, and what gave nothing."""
    lines = []
    for name, (label, _) in TREES.items():
        report = reports[name]
        counts = sorted({len(runs) for runs in report.by_length().values()})
        passed = sorted(
            {m.correctness.longest for m in report.measurements if m.correctness is not None}
        )
        checked = "not checked"
        if passed:
            checked = f"passed the correctness gate at {', '.join(f'{n:,}' for n in passed)} tokens"
        text = "no figures"
        if counts:
            processes = " to ".join(map(str, sorted({counts[0], counts[-1]})))
            text = f"{processes} process{'es' * (processes != '1')} a length, {checked}"
        lost = losses(report)
        when = f"{report.created_at:%Y-%m-%d %H:%M} UTC, commit {(report.commit or 'unknown')[:12]}"
        lines.append(f"- {label}: {'; '.join([text, *lost, when])}.")
    return "\n".join(lines)


class Runs(NamedTuple):
    """What the documents are made of."""

    reports: Reports
    profiles: tuple[LayerProfile, ...]
    accuracy: LayerAccuracy
    training: Training


def load_runs() -> Runs:
    """Read the runs.

    Raises:
        ReportError, OSError, pydantic.ValidationError: a file is missing, or is no run of its kind.
    """
    return Runs(
        {name: load_report(DATA / f"{name}.json") for name in TREES},
        tuple(load(LayerProfile, DATA / f"{name}.json") for name in PROFILES),
        load(LayerAccuracy, DATA / "layer-accuracy.json"),
        load(Training, DATA / "layer-training.json"),
    )


def limits(runs: Runs) -> list[Criterion]:
    """Return every limit of the layer with its figure."""
    found = criteria(runs.reports["overlay"], runs.reports["overlay-ops"], runs.accuracy)
    return [*found, *training_criteria(runs.training)]


def document(runs: Runs) -> str:
    """Return the text of docs/results/benchmarks.md."""
    reports, ours = runs.reports, runs.reports["overlay"]
    machine = ours.environment
    if machine is None:
        raise SystemExit("the overlay's report names no machine: measure again")
    kernels = "\n\n".join(map(profile_table, runs.profiles))
    where = {
        "GPU": f"{machine.gpu}, driver {machine.driver}",
        "torch, Triton": f"{machine.torch}, {machine.triton}",
        "CUDA, Python": f"{machine.cuda}, {machine.python}",
        "date": f"{ours.created_at:%Y-%m-%d}",
        "commit": f"{ours.commit}",
        "protocol": ours.protocol,
    }
    return f"""# Benchmarks

Generated by `python -m benchmarks.report` from the files in `benchmarks/h200/`, which
`speed`, `profile` and `accuracy` of `benchmarks.layer` wrote on a
machine as below; each tree's line, profile and table of errors says of which commit.
[requirements/lock.txt](../../requirements/lock.txt) installs newer versions of torch and Triton
than the machine had.

{facts(where)}

Four trees are compared. The *public fork* is timed as it is and not checked, since it computes
something else than the recurrence. The *baseline* is the fork's layer over flash-linear-attention's
`chunk_delta_rule`, with the step size computed by torch
([benchmarks/peer](../../benchmarks/peer/fla/ops/quasar/chunk.py)). It is timed unchecked too: with
correlated keys its error exceeds the gate's limit slightly (1.7e-2 in an eighth of the output,
limit 1.5e-2). *Operator only* is the fork's layer, unchanged, over this project's operator
(`FORK_SCOPE=ops`); *this project* replaces the layer too (`FORK_SCOPE=layer`, the default).

{gates(reports)}

Speeds are medians over the processes, memory and first calls the largest. Processes import side by
side and are timed one after another. The first process of a length starts with empty kernel caches,
except for the baseline, which tunes for half a minute at any length and does so at the shortest
alone.
Spread is largest less smallest over median. Up to 4,096 tokens a call waits for the host, whose
pace differs between processes and machines by up to two: the fastest process shows a quiet one.

## Tokens a second

![M tokens/s against tokens]({SPEED.plot})

{speeds(reports)}

## Speed of light

What no kernel exceeds on this GPU is the lesser of two rates: the input read and the output written
once at the memory's bandwidth, and the products of a layer at the rate of the tensor cores, both as
the vendor states them. *Of bound* is this project's speed as a share of that; *gap closed* is the
share of the time between another tree and the bound that this project removes: 0% is as slow as
that tree, 100% the bound.

{shares_of_bound(machine, figures(reports, SPEED))}

## Memory

![peak GiB against tokens]({MEMORY.plot})

{comparison(reports, MEMORY)}

## First call

![seconds of the first call against tokens]({FIRST_CALL.plot})

{comparison(reports, FIRST_CALL)}

## Training

{training_tables(runs.training)}

## Where the time goes

{kernels}

## What it computes

{accuracy_tables(runs.accuracy)}

## Limits

{limits_table(limits(runs))}
"""


def documents(runs: Runs) -> dict[Path, str]:
    """Return the documents that the runs make, as they must be."""
    readme = ROOT / "README.md"
    return {
        RESULTS / "benchmarks.md": document(runs),
        readme: filled(readme, readme.read_text(), {"speed": short_table(runs)}),
        **{RESULTS / q.plot: plot(runs.reports, q) for q in (SPEED, MEMORY, FIRST_CALL)},
    }
