"""docs/results/rivals.md: other forks beside this project's layer; and their rows in README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases.rivals import OURS, TARGET
from benchmarks.engine.results import DATA, Run
from benchmarks.report.documents import page, run_of
from benchmarks.report.markdown import Column, columns

NAME = "rivals"


def rows(run: Run) -> list[dict[str, Any]]:
    """Return a row for each tree, this project first, then the fastest at `TARGET` tokens."""
    found: dict[str, dict[str, Any]] = {}
    for entry in run.entries:
        row = found.setdefault(entry.by, {"name": entry.by, "failures": []})
        if entry.failure:
            row["failures"].append(f"{entry.of.get('what', 'speed')}: {entry.failure}")
        elif entry.table == "speed":
            row[f"speed {entry.of['tokens']}"] = entry.figures["tokens_per_sec"]
            row[f"memory {entry.of['tokens']}"] = entry.figures["vram_mb"] * 2**20
        else:
            worst = max(entry.errors.values(), default=None)
            row[str(entry.of["what"])] = {**entry.figures, **entry.texts, "error": worst}
    fast = f"speed {TARGET}"
    return sorted(found.values(), key=lambda row: (row["name"] != OURS, -row.get(fast, 0)))


def fastest(run: Run) -> list[dict[str, Any]]:
    """Return the rows of the fastest other fork, if any was timed, and of this project."""
    timed = [row for row in rows(run) if f"speed {TARGET}" in row]
    return [*[row for row in timed if row["name"] != OURS][:1], *timed[:1]]


def label(row: dict[str, Any]) -> str:
    return OURS if row["name"] == OURS else f"fastest competitor's public fork, `{row['name']}`"


def measured() -> bool:
    return (DATA / f"{NAME}.json").exists()


def short_table() -> str:
    """Return README.md's rows; "" if no fork was measured."""
    found = fastest(run_of(NAME)) if measured() else []
    if len(found) < 2:
        return ""
    titles: dict[str, Column] = {
        "a million tokens, in one run": label,
        "M tokens/s": f"{{speed {TARGET}:M.3g}}",
        "memory, GiB": f"{{memory {TARGET}:GiB.1f}}",
        "operator's error": "{operator.error:.1%}",
        "cosine": "{operator.cosine:.3f}",
        "weights without gradient": "{gradients.without}",
    }
    return columns(found, titles)


def documents() -> dict[Path, str]:
    if not measured():
        return {}
    run = run_of(NAME)
    lengths = sorted({int(entry.of["tokens"]) for entry in run.table("speed")}, reverse=True)
    return page(NAME, rows=rows(run), rivals=run, lengths=lengths)
