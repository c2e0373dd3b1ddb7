"""docs/results/parallel.md: one sequence over several GPUs, measured and projected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.cases import parallel
from benchmarks.cases.parallel import figures_of
from benchmarks.engine.limits import summary
from benchmarks.engine.results import ROOT, Run, load
from benchmarks.report.documents import RESULTS, page
from benchmarks.report.markdown import facts, gib, milliseconds, not_timed, records, times
from quasar_kernels.line_plot import BLUE, GREEN, PURPLE, RED, Line, Scale, line_plot

RUN = ROOT / "benchmarks" / "h200x2" / "parallel.json"
PLOT = RESULTS / "parallel.svg"
PROJECTED = (2, 4, 8, 16, 32, 64)
FOLDS = {
    ("operator", "forward_ms"): 2,
    ("operator", "training_ms"): 3,
    ("layer", "forward_ms"): 2,
    ("layer", "training_ms"): 5,
}
"""Folds of a call: two per forward pass, which the layer's backward pass repeats, and one in a
backward pass."""
GB_PER_S = 50.0
"""Assumed rate between hosts of 8 GPUs."""
ON_HOST = 8
COLOURS = {"operator": GREEN, "layer": BLUE}


def projected_ms(run: Run, table: str, name: str, gpus: int) -> float:
    """Return the milliseconds for a million tokens on each of `gpus` GPUs.

    They are the time of two GPUs plus that of the further folds and exchanged bytes. The fold was
    timed in a loop in which the host's launches take longer than the GPU.
    """
    (terms,) = run.table("terms")
    _, two, _ = figures_of(run, table)
    fold = float(terms.figures["fold_of_8_ms"]) / 7
    more = FOLDS[table, name] * (gpus - 2) * fold
    if gpus > ON_HOST:
        more += FOLDS[table, name] * gpus * float(terms.figures["exchanged_bytes"]) / GB_PER_S / 1e6
    return float(two.figures[name]) + more


def speeds(run: Run) -> str:
    """Return the table of times."""
    rows = []
    for table in ("operator", "layer"):
        one, each, shared = figures_of(run, table)
        for name in ("forward_ms", "training_ms"):
            base = float(one.figures[name])
            rows.append(
                {
                    "": f"{table}, {name.removesuffix('_ms')}",
                    "one GPU, 1M, ms": milliseconds(base),
                    "two, 1M each, ms": milliseconds(float(each.figures[name])),
                    "over one": times(float(each.figures[name]) / base, 3),
                    "two, 1M in all, ms": milliseconds(float(shared.figures[name])),
                    "times as fast": times(base / float(shared.figures[name]), 2),
                }
            )
    return records(rows)


def equality(run: Run) -> str:
    """Return the table of errors."""
    return records(
        {
            "tokens, inputs": f"{entry.of['tokens']:,}, {entry.of['inputs']}",
            "same again": "bit for bit" if entry.figures["same_again"] else "no",
            **{name: f"{error:.1e}" for name, error in entry.errors.items()},
        }
        for entry in run.table("equality")
    )


def projection(run: Run) -> str:
    """Return the table of the projection."""
    return records(
        {
            "GPUs": str(gpus),
            **{
                f"{table}, {name.removesuffix('_ms')}, ms": milliseconds(
                    projected_ms(run, table, name, gpus)
                )
                for table, name in FOLDS
            },
        }
        for gpus in (8, 64)
    )


def long_calls(run: Run) -> str:
    """Return the table of the longest calls, and the list of failed ones."""
    rows = records(
        {
            "GPUs": f"{entry.of['gpus']}",
            "tokens a GPU": f"{entry.of['tokens_per_gpu']:,}",
            "in all": f"{int(entry.of['tokens_per_gpu']) * int(entry.of['gpus']):,}",
            "layer, training, ms": milliseconds(float(entry.figures["training_ms"])),
            "memory of a GPU, GiB": gib(float(entry.figures["peak_bytes"])),
        }
        for entry in run.table("long")
        if entry.failure is None
    )
    failed = [
        (f"{entry.of['tokens_per_gpu']:,} tokens a GPU", entry.failure)
        for entry in run.table("long")
        if entry.failure is not None
    ]
    return rows + not_timed(failed)


def gated(run: Run) -> str:
    """Return the table of the gated delta rule by fla and by this package."""
    entries = run.table("gated")
    rows = []
    for by, name in (("fla", "fla"), ("cuda", "this package")):
        for what in ("forward", "training"):
            of = [e for e in entries if (e.by, e.of["pass"]) == (by, what) and e.failure is None]
            if len(of) == 2:
                one, two = (float(entry.figures["ms"]) for entry in of)
                row = {
                    "": f"{name}, {what}",
                    "one GPU, ms": milliseconds(one),
                    "two, as many tokens each, ms": milliseconds(two),
                    "over one": times(two / one, 3),
                }
                rows.append(row)
    failed = ((f"{e.by}, {e.of['pass']}", e.failure) for e in entries if e.failure is not None)
    missing = [
        name
        for name in ("forward", "training")
        if not any((e.by, e.of["pass"]) == ("cuda", name) for e in entries)
    ]
    text = records(rows) if rows else "Nothing was measured."
    if missing:
        text += f"\n\nThe run ended before this package's {' and '.join(missing)} passes."
    return text + not_timed(failed)


def plot(run: Run) -> str:
    """Return the SVG of times over one GPU's: measured up to two GPUs, then projected, dashed."""
    lines = []
    for table, name in FOLDS:
        one, two, _ = figures_of(run, table)
        base = float(one.figures[name])
        colour = COLOURS[table] if name == "training_ms" else {"operator": RED}.get(table, PURPLE)
        label = f"{table}, {name.removesuffix('_ms')}"
        far = [(n, projected_ms(run, table, name, n) / base) for n in PROJECTED]
        lines.append(Line(label, colour, far, dashed=True))
        lines.append(Line(label, colour, [(1, 1.0), (2, float(two.figures[name]) / base)]))
    title = f"A million tokens a GPU over one GPU's time, {run.gpu}; dashed: projected"
    return line_plot(title, "GPUs", "times as long", lines, y=Scale(log=False, low=0))


def documents() -> Mapping[Path, str]:
    """Return the texts of docs/results/parallel.md and its plot, by their paths."""
    run = load(RUN)
    where = run.where() | {"protocol": run.protocol}
    sections = {
        "limits": summary([*parallel.limits(run)]),
        "speeds": speeds(run),
        "equality": equality(run),
        "long": long_calls(run),
        "gated": gated(run),
        "projection": projection(run),
        "where": facts(where),
    }
    return page("parallel", sections) | {PLOT: plot(run)}
