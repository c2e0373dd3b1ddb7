"""What a run of speed.py says, as schema-checked models, and the limits it must keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from benchmarks.engine.limits import Criterion
from benchmarks.operator.results import Timing
from benchmarks.operator.training_results import GRADIENT_ERROR, Shape
from benchmarks.results import Frozen, Positive, Run

Way = Literal["forward", "forward and backward"]

LEAD_AT, LEAD = Shape(1, 65_536, 8, 64), 1.5
"""Where and by how many times the host library's chunks must be outrun, graph replay."""
ERROR = 6e-3
"""Largest accepted relative RMS error of an output, as for QuasarAttention."""


class Row(Frozen):
    """One call's times by implementation, its memory, and its errors against float64."""

    way: Way
    shape: Shape
    times: dict[str, Timing]
    peak_bytes: dict[str, int] = Field(
        description="most that was allocated during a call, inputs and results included"
    )
    errors: dict[str, dict[str, Positive]] = Field(
        description="relative RMS by implementation and tensor: of the output, or of gradients"
    )
    failures: dict[str, str] = Field({}, description="why an implementation was not timed")


class WKV6Results(Run):
    """A whole run on one GPU."""

    protocol: str
    host: str = Field(description="the host library's package and version")
    rows: tuple[Row, ...]


def lead(row: Row, over: str = "chunk", eager: bool = False) -> float | None:
    """Return how many times faster than another implementation Triton is, where both were timed."""
    if "triton" not in row.times or over not in row.times:
        return None
    ours, theirs = row.times["triton"], row.times[over]
    return theirs.eager_ms / ours.eager_ms if eager else theirs.graph_ms / ours.graph_ms


def wkv6_criteria(results: WKV6Results) -> Iterator[Criterion]:
    """Yield every limit with its figure."""
    for row in results.rows:
        text = f"{row.way}, {row.shape}"
        least = LEAD if row.shape == LEAD_AT else 1
        for eager in (False, True):
            ahead = lead(row, eager=eager)
            if ahead is not None:
                how = "eager" if eager else "graph"
                least = least if not eager else 1
                yield Criterion(f"{text}, times chunk_rwkv6, {how}", ahead, least, True)
        if "triton" in row.failures:
            yield Criterion(f"{text}, timed", False, True, True)
        limit = ERROR if row.way == "forward" else GRADIENT_ERROR
        for tensor, error in row.errors.get("triton", {}).items():
            yield Criterion(f"{text}, error of {tensor}", error, limit)
