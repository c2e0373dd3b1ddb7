"""The section of docs/results/models.md about RWKV-6's operator."""

from __future__ import annotations

from benchmarks.cases.wkv6 import CHUNK, NAMES
from benchmarks.engine.results import Row, Run
from benchmarks.report.markdown import facts, gib, milliseconds, not_timed, records, times, worst

LABELS = {"triton": "Triton", "cuda": "CUDA C++"}


def speeds(run: Run) -> str:
    """Return the table of times, memory and errors, and its conditions."""
    rows = run.rows("calls")
    # a run may be without this project's second implementation
    timed = {name for row in rows for name, entry in row.by.items() if entry.figures}
    labels = {name: LABELS.get(name, name) for name in NAMES if name != "cuda" or name in timed}

    def cells(row: Row) -> dict[str, str]:
        detailed = [name for name in ("triton", "cuda", CHUNK) if name in labels]
        cells = {"way": row.of["way"], "tokens": f"{row.of['tokens']:,}"}
        for name, label in labels.items():
            cells[f"{label}, ms"] = milliseconds(row.figure(name, "graph_ms"))
        for kind in ("graph", "eager"):
            lead = row.ratio(f"{kind}_ms", CHUNK, "triton")
            cells[f"chunk_rwkv6 / Triton, {kind}"] = times(lead, 2)
        for name in detailed:
            cells[f"{labels[name]}, GiB"] = gib(row.figure(name, "peak_bytes"))
            cells[f"{labels[name]}, error"] = worst(row.by.get(name))
        return cells

    where = run.where() | {"fla": f"fla-core {run.versions['fla-core']}", "protocol": run.protocol}
    missing = (
        (f"{labels[name]}, {row.of['way']}, {row.of['tokens']:,} tokens", why)
        for row in rows
        for name, why in row.failures()
    )
    return f"{facts(where)}\n\n{records(map(cells, rows))}{not_timed(missing)}"
