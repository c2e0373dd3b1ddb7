"""Runs for tests: made of entries, and committed ones with one value replaced."""

from datetime import date
from typing import Any

from benchmarks.engine.results import Entry, Run
from tests.harness.samples import environment


def run_of(case: str, *entries: Entry, **fields: Any) -> Run:
    """Return a run with made-up conditions."""
    values = {"environment": environment(gpu="a GPU"), "protocol": "made up", **fields}
    return Run(case=case, created=date(2026, 1, 2), commit="abc", entries=entries, **values)


def changed(run: Run, table: str, name: str, value: object, **of: object) -> Run:
    """Return the run with one value replaced.

    Args:
        table: the entry's table, or `settings`.
        name: as in `figures/ms`.
        of: the entry's key, `by` included; the first entry that matches is changed.
    """
    body: Any = run.model_dump(mode="json")
    if table == "settings":
        place = body["settings"]
    else:
        place = next(
            entry
            for entry in body["entries"]
            if entry["table"] == table and of.items() <= {"by": entry["by"], **entry["of"]}.items()
        )
    *keys, last = name.split("/")
    for key in keys:
        place = place[key]
    assert place.get(last) != value
    place[last] = value
    return Run.model_validate(body)
