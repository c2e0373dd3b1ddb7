"""What a run of inference.py says, as schema-checked models, and the limits it must keep.

An implementation is named `triton` or `cuda` (this project's) or `peer` (flash-linear-attention's
delta rule); what a run leaves out has no entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from pydantic import Field

from benchmarks.engine.limits import Criterion
from benchmarks.results import Frozen, Positive, Run

Entry = TypeVar("Entry")

FORWARD_MS = {
    "triton": {2048: 0.06, 16_384: 0.15, 100_000: 0.55, 1_000_000: 4.5},
    "cuda": {2048: 0.03, 16_384: 0.07, 100_000: 0.24, 1_000_000: 1.8},
}
"""Longest accepted time of the forward pass by tokens, graph replay: none may become slower.

CUDA must also be done before Triton is, in the same run and at every length.
"""

ERRORS = {"layer-like": 6e-3, "correlated 10%": 9e-3, "correlated 1%": 9e-3}
"""Largest accepted relative RMS error by kind of keys.

CUDA's must also be at most Triton's, in the same run and at every length.
"""

SEARCH_COST = 1.05
"""How much longer a call may take that looks for a place to stop and finds none."""

MEMORY_TIMES_OUTPUT = 1.2
FIRST_CALL_SECONDS = 8.0
COPY_SHARE = 0.8
"""Share of a copy's bandwidth, of equal size, that decoding at the largest batch must reach."""


class Timing(Frozen):
    """Median milliseconds of a call."""

    graph_ms: Positive
    eager_ms: Positive
    rested_ms: Positive | None = Field(
        None, description="ten replays after a rest, as validators time; of forward passes alone"
    )


class Speed(Frozen):
    """One length's times by implementation; B = 1, H = 8, S = 64, bf16."""

    tokens: int
    times: dict[str, Timing]


class Error(Frozen):
    """Relative RMS error of the output against float64."""

    overall: Positive
    worst_eighth: Positive = Field(description="the largest over eight equal parts of T")


class Accuracy(Frozen):
    """One length's errors by implementation, for one kind of keys."""

    tokens: int
    keys: str
    errors: dict[str, Error]


class Forgetting(Frozen):
    """CUDA's forward pass where all heads forget but some: stopping early, and in full."""

    tokens: int
    slow_heads: int = Field(description="of 8, that forget nothing within a segment")
    graph_ms: Positive
    rested_ms: Positive
    full_graph_ms: Positive
    full_rested_ms: Positive
    error: Positive = Field(description="relative RMS of the output, where pass 1 may stop")


class Memory(Frozen):
    """Peak bytes that one forward call allocates beside its inputs, its output included."""

    tokens: int
    output_bytes: int
    peak_bytes: dict[str, int]


class Decoding(Frozen):
    """One token of `batch` sequences, the state kept."""

    batch: int
    state_bytes: int = Field(description="read once and written once")
    sets: int = Field(description="states taken in turn")
    times: dict[str, Timing]
    copy_ms: Positive = Field(description="copying such a state, graph replay, in the same turn")
    errors: dict[str, Positive] = Field(description="relative RMS of o")


class FirstCall(Frozen):
    """A fresh process with empty kernel caches."""

    import_seconds: Positive = Field(description="importing the operator, after torch")
    call_seconds: Positive = Field(description="the first call, compiling and tuning included")


class OperatorResults(Run):
    """A whole run on one GPU."""

    protocol: str
    peer: str | None = Field(description="the peer's package and version")
    copy_gb_per_s: Positive = Field(description="device copy of 1 GiB, both directions counted")
    forward: tuple[Speed, ...]
    forgetting: tuple[Forgetting, ...] = Field(description="none without CUDA")
    accuracy: tuple[Accuracy, ...]
    memory: Memory
    decoding: tuple[Decoding, ...]
    first_call: dict[str, FirstCall]


def ours(entries: Mapping[str, Entry]) -> Iterator[tuple[str, Entry]]:
    """Return the names and entries of this project's implementations."""
    return ((name, entry) for name, entry in entries.items() if name != "peer")


def operator_criteria(results: OperatorResults) -> Iterator[Criterion]:
    """Yield every limit with its figure."""
    yield from _speed_criteria(results)
    for row in results.accuracy:
        for name, error in ours(row.errors):
            text, limit = f"error of {row.tokens} tokens, {row.keys}, {name}", ERRORS[row.keys]
            yield Criterion(text, error.overall, limit)
            yield Criterion(f"{text}, worst eighth", error.worst_eighth, limit * 1.05)
        if "cuda" in row.errors:
            text = f"error of {row.tokens} tokens, {row.keys}, cuda over triton"
            yield Criterion(text, row.errors["cuda"].overall / row.errors["triton"].overall, 1.0)
    for case in results.forgetting:
        text = f"{case.tokens} tokens, {case.slow_heads} slow heads"
        yield Criterion(f"error of {text}", case.error, ERRORS["layer-like"])
        share = case.rested_ms / case.full_rested_ms
        yield Criterion(f"forward of {text}, over in full", share, SEARCH_COST)
    for name, peak in ours(results.memory.peak_bytes):
        share = peak / results.memory.output_bytes
        yield Criterion(f"peak memory over the output, {name}", share, MEMORY_TIMES_OUTPUT)
    for name, first in ours(results.first_call):
        yield Criterion(f"first call, {name}, s", first.call_seconds, FIRST_CALL_SECONDS)


def _speed_criteria(results: OperatorResults) -> Iterator[Criterion]:
    for row in results.forward:
        text = f"forward of {row.tokens} tokens"
        for name, time in ours(row.times):
            if (limit := FORWARD_MS[name].get(row.tokens)) is not None:
                yield Criterion(f"{text}, {name}, ms", time.graph_ms, limit)
        if "cuda" in row.times:
            share = row.times["cuda"].graph_ms / row.times["triton"].graph_ms
            yield Criterion(f"{text}, cuda over triton", share, 1.0)
    largest = max(results.decoding, key=lambda row: row.batch)
    share = largest.copy_ms / largest.times["triton"].graph_ms
    yield Criterion(f"share of copy bandwidth, B = {largest.batch}", share, COPY_SHARE, True)
    for token in results.decoding:
        if "peer" in token.times:
            for kind in ("graph_ms", "eager_ms"):
                mine, theirs = (getattr(token.times[name], kind) for name in ("triton", "peer"))
                yield Criterion(f"decoding at B = {token.batch}, {kind}", mine, theirs)
