"""The figures of docs/reliability.md about the API under load, from what load.py found."""

from __future__ import annotations

from benchmarks.api.results import Backend, Load
from benchmarks.limits import Criterion, summary
from benchmarks.markdown import table
from benchmarks.results import ROOT

DATA = ROOT / "benchmarks" / "api_load.json"

P99_MOST_MS = 150.0
"""On PostgreSQL, at the rate that load.py sends."""

FULL = 0.97
"""The share of the rate that must be answered: a run ends a little after its last request."""


def load() -> Load:
    """Read the committed run."""
    return Load.model_validate_json(DATA.read_text(encoding="utf-8"))


def limits(run: Load | None = None) -> list[Criterion]:
    """Return every promise with its figure, of the committed run unless one is given."""
    run = run or load()
    found = []
    for one in run.backends[0].traffic:
        if one.asked is not None:
            what = f"{run.backends[0].database}, {one.requests} at {one.asked:.0f}/s"
            share = one.answered / one.asked
            found.append(Criterion(f"{what}: answered/s over sent/s", share, FULL, at_least=True))
            found.append(Criterion(f"{what}: p99, ms", one.p99_ms, P99_MOST_MS))
    return found + [Criterion(f"{one.database}: lost", one.lost, 0.0) for one in run.backends]


def section(run: Load) -> str:
    """Return the table, below whether the promises are kept."""
    header = ("database, requests", "sent/s", "answered/s", "failed", "p50, ms", "p99, ms")
    rows = [row for backend in run.backends for row in _rows(backend)]
    slow = run.slow_client_seconds
    cut = "never cut off" if slow is None else f"cut off after {slow:.0f} s"
    killed = "; ".join(
        f"{one.database}: {one.acknowledged:,} acknowledged, {one.lost} lost, back in "
        f"{one.restart_seconds:.1f} s"
        for one in run.backends
    )
    where = (
        f"{run.rows:,} submissions before; {run.cores} cores ({run.processor}) that client, server "
        f"and database share, with a load average of {run.load_before:.1f} before the run; "
        f"{run.created}, commit {(run.commit or 'unknown'):.7}."
    )
    return (
        f"{summary(limits(run))}\n\n{table(header, rows)}\n\nA client that does not finish its "
        f"request is {cut}. `kill -9` among commits: {killed}.\n\n{where}"
    )


def _rows(backend: Backend) -> list[tuple[str, ...]]:
    return [
        (
            f"{backend.database}, {one.requests}",
            f"{one.asked:.0f}" if one.asked else "all at once",
            f"{one.answered:.0f}",
            f"{one.failed}",
            f"{one.p50_ms:.0f}",
            f"{one.p99_ms:.0f}",
        )
        for one in backend.traffic
    ]
