"""docs/results/delta-rule.md: one run of every call, and one with more libraries installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.cases.delta_rule import (
    FLA,
    GATED,
    LIBRARY_WIDTH,
    call_name,
    limits,
    share_of_best,
    takes,
)
from benchmarks.cases.delta_rule_libraries import LIBRARIES
from benchmarks.engine.comparison import shape_of
from benchmarks.engine.limits import summary
from benchmarks.engine.results import DATA, Row, Run, load
from benchmarks.report.documents import page
from benchmarks.report.markdown import (
    facts,
    microseconds,
    milliseconds,
    not_timed,
    records,
    share,
    times,
    worst,
)

RUN, LIBRARIES_RUN = DATA / "delta-rule.json", DATA / "delta-rule-libraries.json"
LABELS = {
    "triton": "Triton",
    "cuda": "CUDA",
    "fla": "fla",
    "flashqla": "FlashQLA",
    "flashinfer": "FlashInfer",
}
CALL = "sequences x tokens x heads x width"


def speeds(run: Run) -> str:
    """Return the table of whole sequences, and its conditions."""

    def cells(row: Row) -> dict[str, str]:
        everywhere = ("triton", "cuda", FLA)
        return {
            CALL: call_name(row),
            **{f"{LABELS[n]}, ms": milliseconds(row.figure(n, "graph_ms")) for n in everywhere},
            "fla / CUDA": times(row.ratio("graph_ms", FLA, "cuda")),
            "fla / Triton": times(row.ratio("graph_ms", FLA, "triton")),
            "CUDA from rest, ms": milliseconds(row.figure("cuda", "rested_ms")),
            "fla from rest, ms": milliseconds(row.figure(FLA, "rested_ms")),
            "fla / CUDA, from rest": times(row.ratio("rested_ms", FLA, "cuda")),
            "CUDA eager, ms": milliseconds(row.figure("cuda", "eager_ms")),
        }

    rows = run.rows("calls")
    where = run.where() | {"fla": f"fla-core {run.versions['fla-core']}", "protocol": run.protocol}
    missing = (
        (f"{LABELS[name]}, {call_name(row)}", why) for row in rows for name, why in row.failures()
    )
    table = f"{records(map(cells, rows))}{not_timed(missing)}"
    return f"{facts(where)}\n\n{table}"


def libraries(run: Run) -> str:
    """Return the table of the calls that other libraries have, and of fla's gated gradients."""

    def cells(row: Row) -> dict[str, str]:
        names = ("cuda", FLA, *LIBRARIES)
        return {
            CALL: call_name(row),
            **{f"{LABELS[n]}, ms": milliseconds(row.figure(n, "graph_ms")) for n in names},
            "fastest other / CUDA": times(share_of_best(row), 2),
        }

    def is_shown(row: Row) -> bool:
        rule, way = row.of["rule"], row.of["way"]
        able = any(takes(name, rule, way, shape_of(row.of)) for name in LIBRARIES)
        return able or (rule, way) == (GATED, "forward and backward")

    rows = [row for row in run.rows("calls") if is_shown(row)]
    none = f"No call with heads of {LIBRARY_WIDTH} was measured."
    table = records(map(cells, rows)) if rows else none
    others = [f"{LABELS[n]} {run.versions[n]}" for n in LIBRARIES if n in run.versions]
    where = run.where() | {
        "libraries": ", ".join([f"fla-core {run.versions['fla-core']}", *others])
    }
    reasons = ((LABELS[n], run.settings.get(f"{n} is missing")) for n in LIBRARIES)
    missing = not_timed((name, str(why)) for name, why in reasons if why)
    return f"{facts(where)}\n\n{table}{missing}\n\n{summary([*limits(run)])}"


def errors(run: Run) -> str:
    """Return the table of the largest error of each call, by implementation."""
    rows = run.rows("calls")
    names = [n for n in LABELS if any(n in row.by and row.by[n].errors for row in rows)]
    return records(
        {"call": call_name(row), **{LABELS[n]: worst(row.by.get(n)) for n in names}} for row in rows
    )


def decoding(run: Run) -> str:
    """Return the table of one token's times."""
    return records(
        {
            "rule": row.of["rule"],
            "sequences": str(row.of["batch"]),
            "width": str(row.of["width"]),
            "Triton, us": microseconds(row.figure("triton", "graph_ms")),
            "fla, us": microseconds(row.figure(FLA, "graph_ms")),
            "copy, us": microseconds(row.figure("copy", "graph_ms")),
            "share of the copy": share(row.ratio("graph_ms", "copy", "triton")),
        }
        for row in run.rows("decoding")
    )


def measured(run: Run) -> str:
    """Return all sections, each below its title."""
    sections = {
        "Whole sequences": speeds(run),
        "One token": decoding(run),
        "Largest errors against float64, by tensor": errors(run),
        "Limits": summary([*limits(run)]),
    }
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())


def documents() -> Mapping[Path, str]:
    """Return the text of docs/results/delta-rule.md, by its path."""
    return page(
        "delta-rule",
        {"measured": measured(load(RUN)), "libraries": libraries(load(LIBRARIES_RUN))},
    )
