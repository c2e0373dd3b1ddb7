"""The tables of runs of speed.py, as docs/results/delta-rule.md shows them.

One run has every call, beside the host library alone; another had more libraries installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.delta_rule.libraries import LIBRARIES, WIDTH, takes
from benchmarks.delta_rule.results import (
    ROWS,
    Decoding,
    DeltaRuleResults,
    Row,
    call_name,
    delta_rule_criteria,
    lead,
    share_of_best,
)
from benchmarks.engine.limits import summary
from benchmarks.operator.results import Timing
from benchmarks.report.documents import page
from benchmarks.report.markdown import facts, milliseconds, not_timed, records
from benchmarks.results import DATA, told

RUN, LIBRARIES_RUN = DATA / "delta-rule.json", DATA / "delta-rule-libraries.json"
LABELS = {
    "triton": "Triton",
    "cuda": "CUDA",
    "host": "host",
    "flashqla": "FlashQLA",
    "flashinfer": "FlashInfer",
}
EVERYWHERE = ("triton", "cuda", "host")
"""The implementations that take every call."""


def _ms(time: Timing | None, kind: str = "graph_ms") -> str:
    return milliseconds(None if time is None else getattr(time, kind))


def _times(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def speeds(results: DeltaRuleResults) -> str:
    """Return the table of whole sequences, and where it was measured."""

    def cells(row: Row) -> dict[str, str]:
        times = {f"{LABELS[name]}, ms": _ms(row.times.get(name)) for name in EVERYWHERE}
        return {
            "sequences x tokens x heads x width": call_name(row.rule, row.way, row.shape),
            **times,
            "host / CUDA": _times(lead(row)),
            "host / Triton": _times(lead(row, "triton")),
            "CUDA from rest, ms": _ms(row.times.get("cuda"), "rested_ms"),
            "host from rest, ms": _ms(row.times.get("host"), "rested_ms"),
            "host / CUDA, from rest": _times(lead(row, kind="rested_ms")),
            "CUDA eager, ms": _ms(row.times.get("cuda"), "eager_ms"),
        }

    where = results.where() | {"host": results.host, "protocol": results.protocol}
    missing = (
        (f"{LABELS[name]}, {call_name(row.rule, row.way, row.shape)}", why)
        for row in results.rows
        for name, why in row.failures.items()
    )
    table = f"{records(map(cells, results.rows))}{not_timed(missing)}"
    return f"{facts(where)}\n\n{table}{_not_reached(results)}"


def _not_reached(results: DeltaRuleResults) -> str:
    """Return a paragraph that names the calls that a run was cut off before."""
    measured = {(row.rule, row.way, row.shape) for row in results.rows}
    left = [call_name(*row) for row in ROWS if row not in measured]
    return f"\n\nThe run was cut off before: {'; '.join(left)}." if left else ""


def libraries(results: DeltaRuleResults) -> str:
    """Return the table of the calls that other libraries serve, and where it was measured.

    Among them are the host's own gated gradients, which need TileLang on Hopper.
    """

    def cells(row: Row) -> dict[str, str]:
        names = ("cuda", "host", *LIBRARIES)
        return {
            "sequences x tokens x heads x width": call_name(row.rule, row.way, row.shape),
            **{f"{LABELS[name]}, ms": _ms(row.times.get(name)) for name in names},
            "fastest other / CUDA": _times(share_of_best(row), 2),
        }

    rows = [
        row
        for row in results.rows
        if (row.rule, row.way) == ("gated delta rule", "forward and backward")
        or any(takes(n, row.rule, row.way, row.shape) for n in LIBRARIES)
    ]
    table = records(map(cells, rows)) if rows else f"No call with heads of {WIDTH} was measured."
    versions = [f"{LABELS[name]} {version}" for name, version in results.libraries.items()]
    where = results.where() | {"libraries": ", ".join([results.host, *versions])}
    missing = not_timed((LABELS[name], why) for name, why in results.missing.items())
    limits = summary([*delta_rule_criteria(results)])
    return f"{facts(where)}\n\n{table}{missing}\n\n{limits}"


def errors(results: DeltaRuleResults) -> str:
    """Return the table of the largest error of each call, by implementation."""

    def worst(of: Mapping[str, float] | None) -> str:
        if not of:
            return "-"
        tensor, error = max(of.items(), key=lambda item: item[1])
        return f"{error:.1e} ({tensor})"

    shown = [name for name in LABELS if any(name in row.errors for row in results.rows)]

    def cells(row: Row) -> dict[str, str]:
        found = {LABELS[name]: worst(row.errors.get(name)) for name in shown}
        return {"call": call_name(row.rule, row.way, row.shape), **found}

    return records(map(cells, results.rows))


def decoding(results: DeltaRuleResults) -> str:
    """Return the table of one token's times."""

    def cells(row: Decoding) -> dict[str, str]:
        ours, theirs = row.times.get("triton"), row.times.get("host")
        return {
            "rule": row.rule,
            "sequences": str(row.batch),
            "width": str(row.width),
            "Triton, us": "-" if ours is None else f"{ours.graph_ms * 1e3:.2f}",
            "host, us": "-" if theirs is None else f"{theirs.graph_ms * 1e3:.2f}",
            "copy, us": f"{row.copy_ms * 1e3:.2f}",
            "share of the copy": "-" if ours is None else f"{row.copy_ms / ours.graph_ms:.0%}",
        }

    return records(map(cells, results.decoding))


SECTIONS: Mapping[str, Callable[[DeltaRuleResults], str]] = {
    "Whole sequences": speeds,
    "One token": decoding,
    "Largest errors against float64, by tensor": errors,
    "Limits": lambda results: summary([*delta_rule_criteria(results)]),
}
"""What makes the figures below each title, in the document's order."""


def measured(results: DeltaRuleResults) -> str:
    """Return all sections, each below its title."""
    return "\n\n".join(f"## {title}\n\n{tell(results)}" for title, tell in SECTIONS.items())


def documents() -> Mapping[Path, str]:
    """Return the text of docs/results/delta-rule.md, by its path."""
    sections = {
        "measured": told(DeltaRuleResults, RUN, measured),
        "libraries": told(DeltaRuleResults, LIBRARIES_RUN, libraries),
    }
    return page("delta-rule", sections)
