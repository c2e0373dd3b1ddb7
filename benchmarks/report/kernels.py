"""docs/results/kernels.md and its plot: the operator, its kernels' profile, tests and sanitizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import operator, operator_training
from benchmarks.cases.operator import BASELINE, OURS
from benchmarks.engine.comparison import shape_of
from benchmarks.engine.limits import COPY_SHARE, GRADIENT_ERROR, summary
from benchmarks.engine.results import DATA, Row, Run, load
from benchmarks.report.documents import RESULTS, page
from benchmarks.report.kernel_tools import profile, sanitizer_findings, tests
from benchmarks.report.markdown import (
    facts,
    microseconds,
    milliseconds,
    records,
    share,
    table,
    times,
)
from quasar_kernels.line_plot import BLUE, GREEN, RED, Line, line_plot

PLOT = RESULTS / "operator.svg"
LABELS = {"triton": "Triton", "cuda": "CUDA", BASELINE: "baseline"}
COLOURS = {"triton": GREEN, "cuda": BLUE, BASELINE: RED}


def _baseline(run: Run) -> str:
    version = run.versions.get("fla-core")
    return f"fla-core {version}" if version else "not measured"


def machine(run: Run) -> str:
    """Return the table of where and when."""
    e = run.environment
    software = f"CUDA {e.cuda}, Python {e.python}" if e else ""
    where = run.where(software, f"copies {run.number('copy_gb_per_s') / 1000:.2f} TB/s")
    return facts({**where, "baseline": _baseline(run), "protocol": run.protocol})


def _speeds(what: str, rows: Sequence[tuple[str, Row, str]], limit: str) -> str:
    """Return a table of times; each row is its label, its entries, and its limit."""
    names = list(rows[0][1].by)
    leads = [name for name in names if name in OURS and BASELINE in names]
    rested = [name for name in names if rows[0][1].figure(name, "rested_ms") is not None]

    def ms(row: Row, name: str, kind: str) -> str:
        return milliseconds(row.figure(name, kind))

    def cells(label: str, row: Row, most: str) -> dict[str, str]:
        lead = {n: row.ratio("graph_ms", BASELINE, n) for n in leads}
        return {
            what: label,
            **{f"{LABELS[n]}, ms": ms(row, n, "graph_ms") for n in names},
            **{f"{LABELS[BASELINE]} / {LABELS[n]}": times(lead[n]) for n in leads},
            **{
                f"{LABELS[n]} from rest, ms": milliseconds(row.figure(n, "rested_ms"))
                for n in rested
            },
            **{f"{LABELS[n]} eager, ms": ms(row, n, "eager_ms") for n in names},
            limit: most,
        }

    return records(cells(*row) for row in rows)


def forward(run: Run) -> str:
    """Return the table of the forward pass."""

    def limit(tokens: int) -> str:
        limits = [(name, ms[tokens]) for name, ms in operator.FORWARD_MS.items() if tokens in ms]
        return ", ".join(f"{LABELS[name]} {ms:g}" for name, ms in limits)

    rows = [(f"{row.of['tokens']:,}", row, limit(row.of["tokens"])) for row in run.rows("forward")]
    return _speeds("tokens", rows, "limit")


def forgetting(run: Run) -> str:
    """Return the table of the gains of stopping early."""
    header = (
        *("tokens", "slow heads", "from rest, ms", "in full"),
        *("without a pause, ms", "in full", "error"),
    )
    kinds = ("rested_ms", "full_rested_ms", "graph_ms", "full_graph_ms")
    rows = [
        (
            f"{entry.of['tokens']:,}",
            f"{entry.of['slow_heads']} of 8",
            *(milliseconds(entry.figures[kind]) for kind in kinds),
            f"{entry.errors['o']:.1e}",
        )
        for entry in run.table("forgetting")
    ]
    return table(header, rows)


def training(run: Run) -> str:
    """Return the table of forward and backward passes, and its conditions."""
    rows = []
    for row in run.rows("calls"):
        shape = shape_of(row.of)
        most = operator_training.MOST_MS.get(shape)
        limit = f"{most:g} ms, " if most else ""
        limit += f"{operator_training.LEADS['cuda']:g} times the baseline"
        rows.append((str(shape), row, limit))
    where = run.where() | {"baseline": _baseline(run), "protocol": run.protocol}
    speeds = _speeds("sequences x tokens x heads x width", rows, "CUDA's limit")
    return f"{facts(where)}\n\n{speeds}"


def accuracy(run: Run) -> str:
    """Return the table of the output's errors."""
    rows = run.rows("accuracy")
    names = list(rows[0].by)
    ours = [name for name in names if name in OURS]

    def cells(row: Row) -> dict[str, str]:
        errors = {n: row.by[n].errors if n in row.by else None for n in names}
        whole = {LABELS[n]: f"{e['o']:.1e}" if e else "" for n, e in errors.items()}
        parts = {f"{LABELS[n]}, worst eighth": row.by[n].errors["worst eighth"] for n in ours}
        return {
            "tokens, keys": f"{row.of['tokens']:,}, {row.of['keys']}",
            **whole,
            **{name: f"{error:.1e}" for name, error in parts.items()},
            "limit": f"{operator.ERRORS[row.of['keys']]:g}",
        }

    return records(map(cells, rows))


def gradients(run: Run) -> str:
    """Return the table of the gradients' errors."""
    return records(
        {
            f"{entry.of['tokens']:,} tokens": LABELS[entry.by],
            **{f"d{tensor}": f"{error:.1e}" for tensor, error in entry.errors.items()},
            "limit": f"{GRADIENT_ERROR:g}" if entry.by in OURS else "",
        }
        for entry in run.table("gradients")
    )


def costs(run: Run) -> str:
    """Return the table of memory and the first call."""
    longest = run.rows("forward")[-1]
    limits = (f"{operator.MEMORY_TIMES_OUTPUT:g}", f"{operator.FIRST_CALL_SECONDS:g}")
    header = (
        "",
        f"peak bytes at {longest.of['tokens']:,} tokens",
        "times the output",
        "limit",
        "first call, s",
        "limit",
        "import before it, s",
    )
    rows = []
    for first in run.table("first call"):
        peak = longest.by[first.by].figures["peak_bytes"]
        most, latest = limits if first.by in OURS else ("", "")
        seconds = (first.figures[f"{kind}_seconds"] for kind in ("call", "import"))
        call, before = (f"{value:.1f}" for value in seconds)
        over = f"{peak / longest.of['output_bytes']:.3f}"
        rows.append((LABELS[first.by], f"{peak:,}", over, most, call, latest, before))
    return table(header, rows)


def decoding(run: Run) -> str:
    """Return the table of one token's times."""

    def cells(row: Row) -> dict[str, str]:
        ours, size = row.by["triton"].figures["graph_ms"], row.of["state_bytes"]
        return {
            "sequences": str(row.of["batch"]),
            "state, MB": f"{size / 1e6:.2f}",
            "Triton, us": microseconds(ours),
            "copy, us": microseconds(row.figure("copy", "graph_ms")),
            "share of the copy": share(row.ratio("graph_ms", "copy", "triton")),
            "TB/s": f"{2 * size / ours / 1e9:.2f}",
            "baseline, us": microseconds(row.figure(BASELINE, "graph_ms"), 1),
            "Triton eager, us": microseconds(row.figure("triton", "eager_ms"), 1),
            "baseline eager, us": microseconds(row.figure(BASELINE, "eager_ms"), 1),
        }

    text = f"The share at the largest batch must be {COPY_SHARE:.0%} or more."
    return f"{records(map(cells, run.rows('decoding')))}\n\n{text}"


def plot(run: Run) -> str:
    """Return the SVG of the forward pass's times against T."""
    lines = []
    for name, colour in COLOURS.items():
        rows = [row for row in run.rows("forward") if name in row.by]
        for kind, dashed in (("graph", False), ("eager", True)):
            points = [(row.of["tokens"], row.by[name].figures[f"{kind}_ms"]) for row in rows]
            if points:
                lines.append(Line(f"{LABELS[name]}, {kind}", colour, points, dashed))
    title = f"Forward pass, B=1, H=8, S=64, bf16, {run.gpu}"
    return line_plot(title, "tokens", "milliseconds", lines)


RUNS = ("operator", "operator_training", "profile", "sanitizer", "gpu-tests")


def documents() -> dict[Path, str]:
    """Return the page and its plot by path."""
    whole, trained, profiled, watched, tested = (load(DATA / f"{name}.json") for name in RUNS)
    limits = [*operator.limits(whole), *operator_training.limits(trained)]
    sections = {
        "machine": machine(whole),
        "forward": forward(whole),
        "forgetting": forgetting(whole),
        "training": training(trained),
        "decoding": decoding(whole),
        "costs": costs(whole),
        "profile": profile(profiled),
        "accuracy": accuracy(whole),
        "gradients": gradients(trained),
        "limits": summary(limits),
        "gpu_tests": tests(tested),
        "sanitizer": sanitizer_findings(watched),
    }
    return {**page("kernels", sections), PLOT: plot(whole)}
