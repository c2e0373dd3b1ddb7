"""Runs for tests: made of entries, and committed ones with one figure replaced."""

from __future__ import annotations

from datetime import date
from typing import Any

from benchmarks.engine.results import Entry, Run
from tests.harness.samples import environment


def run_of(case: str, *entries: Entry, **fields: Any) -> Run:
    """Return a run that nobody measured."""
    values = {"environment": environment(gpu="a GPU"), "protocol": "made up", **fields}
    return Run(case=case, created=date(2026, 1, 2), commit="abc", entries=entries, **values)


def changed(run: Run, path: str, value: object) -> Run:
    """Return the run with one value replaced.

    `path` is as in `calls/0/figures/graph_ms`, where the number counts the table's entries, or as
    in `settings/claim`.
    """
    body: Any = run.model_dump(mode="json")
    first, *rest = path.split("/")
    if first == "settings":
        place, last = body["settings"], rest[0]
    else:
        table = [entry for entry in body["entries"] if entry["table"] == first]
        number, *keys, last = rest
        place = table[int(number)]
        for key in keys:
            place = place[key]
    assert place.get(last) != value
    place[last] = value
    return Run.model_validate(body)
