"""What a run of training.py says, as schema-checked models, and its limits.

Forward and backward of the operator, with gradients of q, k, v and beta; implementations are named
as in results.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import Field

from benchmarks.engine.limits import Criterion
from benchmarks.operator.results import Timing, ours
from benchmarks.results import Frozen, Positive, Run


class Shape(NamedTuple):
    """Of q, k and v."""

    batch: int
    tokens: int
    heads: int
    width: int


TRAINING_MS = {Shape(1, 16_384, 8, 64): 0.28, Shape(1, 1_000_000, 8, 64): 9.0}
"""Longest accepted time of CUDA by shape, graph replay."""

TRAINING_LEAD = {"triton": 0.85, "cuda": 2.5}
"""How many times faster than the peer forward and backward must be, at every shape.

Triton serves where CUDA cannot. It is slower than the peer at one shape: batches, heads of 128.
"""

GRADIENT_ERROR = 1e-2
"""Largest accepted relative RMS error of a gradient."""


class Training(Frozen):
    """One shape's times by implementation, bf16."""

    shape: Shape
    times: dict[str, Timing]


class Gradients(Frozen):
    """Relative RMS errors of the gradients, by implementation and tensor; shape as a layer's."""

    tokens: int
    errors: dict[str, dict[str, Positive]]


class TrainingResults(Run):
    """A whole run on one GPU."""

    protocol: str
    peer: str | None = Field(description="the peer's package and version")
    training: tuple[Training, ...]
    gradients: Gradients


def training_criteria(results: TrainingResults) -> Iterator[Criterion]:
    """Yield every limit with its figure."""
    for row in results.training:
        text = "forward and backward of {} x {} x {} x {}".format(*row.shape)
        for name, time in ours(row.times):
            if "peer" in row.times:
                lead = row.times["peer"].graph_ms / time.graph_ms
                yield Criterion(f"{text}, {name}, times the peer", lead, TRAINING_LEAD[name], True)
        if "cuda" in row.times and row.shape in TRAINING_MS:
            yield Criterion(f"{text}, cuda, ms", row.times["cuda"].graph_ms, TRAINING_MS[row.shape])
    for name, errors in ours(results.gradients.errors):
        for tensor, value in errors.items():
            yield Criterion(f"error of the gradient of {tensor}, {name}", value, GRADIENT_ERROR)
