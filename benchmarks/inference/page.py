"""The figures of docs/results/inference.md about the inference server, from what speed.py found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.engine.limits import Criterion, summary
from benchmarks.inference.results import InferenceRun
from benchmarks.report.documents import page
from benchmarks.report.markdown import facts, records
from benchmarks.results import DATA, load, told

RUN = DATA / "inference.json"
SERVER, STATIC = "server", "generate, static cache"


def criteria(run: InferenceRun) -> Iterator[Criterion]:
    """Yield the promise: no slower than transformers' fastest decoding of one sequence."""
    speeds = {row.way: row.tokens_per_sec for row in run.rows}
    if SERVER in speeds and STATIC in speeds:
        what = "tokens/s over generate's with a static cache"
        yield Criterion(what, speeds[SERVER] / speeds[STATIC], 1.0, at_least=True)


def limits() -> list[Criterion]:
    """Return every promise with its figure, of the committed run."""
    return list(criteria(load(InferenceRun, RUN))) if RUN.exists() else []


def shown(run: InferenceRun) -> str:
    """Return the tables of a run, below whether the promise is kept."""
    where = {
        "model": f"Qwen2 of {run.size}, {run.parameters / 1e6:.0f} M parameters, {run.dtype}",
        "request": f"{run.new} tokens behind a prompt of {run.prompt}",
        **run.where(f"transformers {run.transformers}"),
        "protocol": run.protocol,
    }
    if run.compile_seconds is not None:
        where["compiled in"] = f"{run.compile_seconds:.0f} s, while the server loads"
    rows = records(
        {
            "way": row.way,
            "tokens/s": f"{row.tokens_per_sec:.1f}",
            "first token, ms": f"{row.first_token_ms:.1f}",
        }
        for row in run.rows
    )
    return f"{summary(list(criteria(run)))}\n\n{rows}\n\n{facts(where)}"


def documents() -> Mapping[Path, str]:
    """Return the text of docs/results/inference.md, by its path."""
    return page("inference", {"inference": told(InferenceRun, RUN, shown)})
