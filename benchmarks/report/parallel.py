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
    ("operator", "forward"): 2,
    ("operator", "training"): 3,
    ("layer", "forward"): 2,
    ("layer", "training"): 5,
}
"""Folds of a call: two per forward pass, which the layer's backward pass repeats, and one in a
backward pass."""
GB_PER_S = 50.0
"""Assumed rate between hosts of 8 GPUs."""
ON_HOST = 8
COLOURS = (RED, GREEN, PURPLE, BLUE)
"""Those of the calls, in their order."""


def times_of(run: Run, table: str, what: str) -> tuple[float, float, float]:
    """Return the milliseconds of one GPU, of a million tokens on each, and of a million in all."""
    one, each, shared = (entry.figures[f"{what}_ms"] for entry in figures_of(run, table))
    return one, each, shared


def projected_ms(run: Run, table: str, what: str, gpus: int) -> float:
    """Return the milliseconds for a million tokens on each of `gpus` GPUs.

    They are the time of two GPUs plus that of the further folds and exchanged bytes. The fold was
    timed in a loop in which the host's launches take longer than the GPU.
    """
    (terms,) = run.table("terms")
    fold = terms.figures["fold_of_8_ms"] / 7
    if gpus > ON_HOST:
        exchange = gpus * terms.figures["exchanged_bytes"] / GB_PER_S / 1e6
    else:
        exchange = 0.0
    return times_of(run, table, what)[1] + FOLDS[table, what] * ((gpus - 2) * fold + exchange)


def speeds(run: Run) -> str:
    """Return the table of times."""
    return records(
        {
            "": f"{table}, {what}",
            "one GPU, 1M, ms": milliseconds(one),
            "two, 1M each, ms": milliseconds(each),
            "over one": times(each / one, 3),
            "two, 1M in all, ms": milliseconds(shared),
            "times as fast": times(one / shared, 2),
        }
        for table, what in FOLDS
        for one, each, shared in [times_of(run, table, what)]
    )


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
                f"{t}, {what}, ms": milliseconds(projected_ms(run, t, what, gpus))
                for t, what in FOLDS
            },
        }
        for gpus in (8, 64)
    )


def long_calls(run: Run) -> str:
    """Return the table of the longest calls, and the list of failed ones."""
    entries = run.table("long")
    rows = records(
        {
            "GPUs": f"{entry.of['gpus']}",
            "tokens a GPU": f"{entry.of['tokens_per_gpu']:,}",
            "in all": f"{int(entry.of['tokens_per_gpu']) * int(entry.of['gpus']):,}",
            "layer, training, ms": milliseconds(entry.figures["training_ms"]),
            "memory of a GPU, GiB": gib(entry.figures["peak_bytes"]),
        }
        for entry in entries
        if entry.failure is None
    )
    failed = ((f"{e.of['tokens_per_gpu']:,} tokens a GPU", e.failure) for e in entries if e.failure)
    return rows + not_timed(failed)


def gated(run: Run) -> str:
    """Return the table of the gated delta rule by fla and by this package."""
    entries = run.table("gated")
    rows, missing = [], []
    for by, name in (("fla", "fla"), ("cuda", "this package")):
        for what in ("forward", "training"):
            of = [e for e in entries if (e.by, e.of["pass"]) == (by, what)]
            timed = [e.figures["ms"] for e in of if e.failure is None]
            if len(timed) == 2:
                row = {
                    "": f"{name}, {what}",
                    "one GPU, ms": milliseconds(timed[0]),
                    "two, as many tokens each, ms": milliseconds(timed[1]),
                    "over one": times(timed[1] / timed[0], 3),
                }
                rows.append(row)
            if by == "cuda" and not of:
                missing.append(what)
    text = records(rows)
    if missing:
        text += f"\n\nThe run ended before this package's {' and '.join(missing)} passes."
    return text + not_timed((f"{e.by}, {e.of['pass']}", e.failure) for e in entries if e.failure)


def plot(run: Run) -> str:
    """Return the SVG of times over one GPU's: measured up to two GPUs, then projected, dashed."""
    lines = []
    for (table, what), colour in zip(FOLDS, COLOURS, strict=True):
        one, two, _ = times_of(run, table, what)
        label = f"{table}, {what}"
        far = [(n, projected_ms(run, table, what, n) / one) for n in PROJECTED]
        lines.append(Line(label, colour, far, dashed=True))
        lines.append(Line(label, colour, [(1, 1.0), (2, two / one)]))
    title = f"A million tokens a GPU over one GPU's time, {run.gpu}; dashed: projected"
    return line_plot(title, "GPUs", "times as long", lines, y=Scale(log=False, low=0))


def documents() -> Mapping[Path, str]:
    """Return the texts of docs/results/parallel.md and its plot, by their paths."""
    run = load(RUN)
    sections = {
        "limits": summary([*parallel.limits(run)]),
        "speeds": speeds(run),
        "equality": equality(run),
        "long": long_calls(run),
        "gated": gated(run),
        "projection": projection(run),
        "where": facts(run.where() | {"protocol": run.protocol}),
    }
    return page("parallel", sections) | {PLOT: plot(run)}
