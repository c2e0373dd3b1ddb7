"""Committed runs with one figure replaced."""

from __future__ import annotations

from typing import Any, TypeVar

from benchmarks.results import Run

Kind = TypeVar("Kind", bound=Run)


def changed(run: Kind, path: str, value: object) -> Kind:
    """Return the run with one figure replaced; `path` is as in `outputs.0.cosine`."""
    body: Any = run.model_dump(mode="json")
    *parents, last = (int(key) if key.isdecimal() else key for key in path.split("."))
    place = body
    for key in parents:
        place = place[key]
    assert place[last] != value
    place[last] = value
    return type(run).model_validate(body)
