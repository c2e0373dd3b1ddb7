"""The table of a run of speed.py."""

from __future__ import annotations

from benchmarks.report.markdown import facts, milliseconds, not_timed, records
from benchmarks.results import DATA, told
from benchmarks.wkv6.results import Row, WKV6Results, lead

RUN = DATA / "wkv6.json"
LABELS = {
    "triton": "Triton", "cuda": "CUDA C++",
    "chunk": "chunk_rwkv6", "recurrent": "fused_recurrent_rwkv6",
}  # fmt: skip


def speeds(results: WKV6Results) -> str:
    """Return the table of times, memory and errors, and where it was measured."""

    # a run may be without this project's second implementation
    timed = {name for row in results.rows for name in row.times}
    shown = {name: label for name, label in LABELS.items() if name != "cuda" or name in timed}

    def cells(row: Row) -> dict[str, str]:
        tokens = row.shape[1]
        cells = {"way": row.way, "tokens": f"{tokens:,}"}
        for name, label in shown.items():
            time = row.times.get(name)
            cells[f"{label}, ms"] = milliseconds(None if time is None else time.graph_ms)
        for eager in (False, True):
            ahead = lead(row, eager=eager)
            kind = "eager" if eager else "graph"
            cells[f"chunk_rwkv6 / Triton, {kind}"] = "-" if ahead is None else f"{ahead:.2f}"
        for name in ("triton", "cuda", "chunk"):
            if name not in shown:
                continue
            peak = row.peak_bytes.get(name)
            cells[f"{LABELS[name]}, GiB"] = "-" if peak is None else f"{peak / 2**30:.2f}"
            worst = max(row.errors.get(name, {}).items(), key=lambda e: e[1], default=None)
            cells[f"{LABELS[name]}, error"] = "-" if not worst else f"{worst[1]:.1e} ({worst[0]})"
        return cells

    where = results.where() | {"host": results.host, "protocol": results.protocol}
    missing = (
        (f"{LABELS[name]}, {row.way}, {row.shape[1]:,} tokens", why)
        for row in results.rows
        for name, why in row.failures.items()
    )
    return f"{facts(where)}\n\n{records(map(cells, results.rows))}{not_timed(missing)}"


def section() -> str:
    """Return what docs/models.md says of the run."""
    return told(WKV6Results, RUN, speeds)
