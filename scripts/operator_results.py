"""What a run of benchmark_operator.py says, as schema-checked models, and the limits it must keep.

An implementation is named `overlay` (this project's operator) or `peer` (flash-linear-attention's
delta rule); a run without the peer has no entries of that name.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.report import Environment

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

FORWARD_MS = {2048: 0.06, 16_384: 0.15, 100_000: 0.55, 1_000_000: 4.5}
"""Longest accepted time of the forward pass by tokens, graph replay."""

ERRORS = {"layer-like": 6e-3, "correlated 10%": 9e-3, "correlated 1%": 9e-3}
"""Largest accepted relative RMS error by kind of keys."""

TRAINING_LEAD = {16_384: 2.0, 262_144: 2.0}
"""How many times faster than the peer forward and backward must be, by tokens."""

GRADIENT_ERROR = 1e-2
MEMORY_TIMES_OUTPUT = 1.2
FIRST_CALL_SECONDS = 8.0
COPY_SHARE = 0.8
"""Share of a copy's bandwidth, of equal size, that decoding at the largest batch must reach."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Timing(_Frozen):
    """Median milliseconds of a call."""

    graph_ms: Positive
    eager_ms: Positive


class Speed(_Frozen):
    """One length's times by implementation; B = 1, H = 8, S = 64, bf16."""

    tokens: int
    times: dict[str, Timing]


class Error(_Frozen):
    """Relative RMS error of the output against float64."""

    overall: Positive
    worst_eighth: Positive = Field(description="the largest over eight equal parts of T")


class Accuracy(_Frozen):
    """One length's errors by implementation, for one kind of keys."""

    tokens: int
    keys: str
    errors: dict[str, Error]


class Gradients(_Frozen):
    """Relative RMS errors of the gradients, by implementation and tensor."""

    tokens: int
    errors: dict[str, dict[str, Positive]]


class Memory(_Frozen):
    """Peak bytes that one forward call allocates beside its inputs, its output included."""

    tokens: int
    output_bytes: int
    peak_bytes: dict[str, int]


class Decoding(_Frozen):
    """One token of `batch` sequences, the state kept."""

    batch: int
    state_bytes: int = Field(description="read once and written once")
    sets: int = Field(description="states taken in turn")
    times: dict[str, Timing]
    copy_ms: Positive = Field(description="copying such a state, graph replay, in the same turn")
    errors: dict[str, Positive] = Field(description="relative RMS of o, overlay and peer")


class FirstCall(_Frozen):
    """A fresh process with empty kernel caches."""

    import_seconds: Positive = Field(description="importing the operator, after torch")
    call_seconds: Positive = Field(description="the first call, compiling and tuning included")


class OperatorResults(_Frozen):
    """A whole run on one GPU."""

    schema_version: Literal[1] = 1
    created: date
    commit: str | None
    protocol: str
    backend: str = Field(description="QUASAR_BACKEND, which chooses the overlay's kernels")
    environment: Environment
    peer: str | None = Field(description="the peer's package and version")
    copy_gb_per_s: Positive = Field(description="device copy of 2 GiB, both directions counted")
    forward: tuple[Speed, ...]
    forward_backward: tuple[Speed, ...]
    accuracy: tuple[Accuracy, ...]
    gradients: Gradients
    memory: Memory
    decoding: tuple[Decoding, ...]
    first_call: dict[str, FirstCall]


def load(path: Path) -> OperatorResults:
    """Read a run's file; pydantic.ValidationError when it is not one."""
    return OperatorResults.model_validate_json(path.read_text(encoding="utf-8"))


def misses(results: OperatorResults) -> list[str]:
    """Name every figure outside of its limit."""
    return [
        f"{name}: {value:.4g}, limit {limit:g}"
        for name, value, limit, at_least in _checks(results)
        if not (value >= limit if at_least else value <= limit)
    ]


def _checks(results: OperatorResults) -> Iterator[tuple[str, float, float, bool]]:
    """Yield name, value, limit, and whether the limit is a smallest value."""
    for row in results.forward:
        if row.tokens in FORWARD_MS:
            value = row.times["overlay"].graph_ms
            yield f"forward of {row.tokens} tokens, ms", value, FORWARD_MS[row.tokens], False
    for row in results.forward_backward:
        if row.tokens in TRAINING_LEAD and "peer" in row.times:
            lead = row.times["peer"].graph_ms / row.times["overlay"].graph_ms
            name = f"forward and backward of {row.tokens} tokens, times the peer"
            yield name, lead, TRAINING_LEAD[row.tokens], True
    for accuracy in results.accuracy:
        name = f"error of {accuracy.tokens} tokens, {accuracy.keys}"
        error, limit = accuracy.errors["overlay"], ERRORS[accuracy.keys]
        yield name, error.overall, limit, False
        yield f"{name}, worst eighth", error.worst_eighth, limit * 1.05, False
    for tensor, value in results.gradients.errors["overlay"].items():
        yield f"error of the gradient of {tensor}", value, GRADIENT_ERROR, False
    memory = results.memory.peak_bytes["overlay"] / results.memory.output_bytes
    yield "peak memory over the output", memory, MEMORY_TIMES_OUTPUT, False
    yield "first call, s", results.first_call["overlay"].call_seconds, FIRST_CALL_SECONDS, False
    yield from _decoding_checks(results)


def _decoding_checks(results: OperatorResults) -> Iterator[tuple[str, float, float, bool]]:
    largest = max(results.decoding, key=lambda row: row.batch)
    share = largest.copy_ms / largest.times["overlay"].graph_ms
    yield f"share of copy bandwidth, B = {largest.batch}", share, COPY_SHARE, True
    for row in results.decoding:
        if "peer" in row.times:
            for kind in ("graph_ms", "eager_ms"):
                ours, theirs = (getattr(row.times[name], kind) for name in ("overlay", "peer"))
                yield f"decoding at B = {row.batch}, {kind}", ours, theirs, False
