"""docs/results/inference.md: the inference server's decoding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.cases import inference
from benchmarks.engine.limits import summary
from benchmarks.engine.results import DATA, Run, load
from benchmarks.report.documents import page
from benchmarks.report.markdown import facts, records

RUN = DATA / "inference.json"


def decoding(run: Run) -> str:
    """Return whether the limit is kept, and the tables of a run."""
    of = run.settings
    size = f"{run.number('parameters') / 1e6:.0f} M parameters"
    where = {
        "model": f"Qwen2 of {of['size']}, {size}, {of['dtype']}",
        "request": f"{of['new']} tokens behind a prompt of {of['prompt']}",
        **run.where(f"transformers {run.versions['transformers']}"),
        "protocol": run.protocol,
    }
    ways = run.table("ways")
    for entry in ways:
        if (seconds := entry.figures.get("compile_seconds")) is not None:
            where["compiled in"] = f"{seconds:.0f} s, while the server loads"
    rows = records(
        {
            "way": entry.by,
            "tokens/s": f"{entry.figures['tokens_per_sec']:.1f}",
            "first token, ms": f"{entry.figures['first_token_ms']:.1f}",
        }
        for entry in ways
    )
    return f"{summary([*inference.limits(run)])}\n\n{rows}\n\n{facts(where)}"


def documents() -> Mapping[Path, str]:
    """Return the text of docs/results/inference.md, by its path."""
    return page("inference", {"inference": decoding(load(RUN))})
