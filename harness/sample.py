"""A sample: the result of one timed process, its correctness check, and reasons to reject it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from harness.hardware.machine import Environment, Frozen, NotNegative, Positive, Telemetry
from harness.hardware.roofline import hardware_bound

Kind = Literal[
    "timeout",
    "out_of_memory",
    "limit",
    "gate",
    "import",
    "crash",
    "protocol",
    "disturbed",
    "stopped",
]
"""Reasons for a missing sample. `limit`: a limit of the confinement was exceeded; `gate`: the
correctness check failed; `import`: this Python lacks a module."""

OTHER_MEMORY_MB = 1024.0
"""Memory in use on the GPU before this process used it, above which the GPU is disturbed."""

THERMAL_SHARE = 0.01
"""Largest share of the timed period in which the driver may throttle the clocks for heat."""

TAINTS = frozenset(
    {"hardware slowdown", "thermal slowdown", "hardware thermal slowdown", "power brake"}
)
"""Slowdowns that a healthy GPU does not report. The power cap is omitted: fast kernels reach it."""


class Check(Frozen):
    """The worst figure of one kind, and its limit. A figure that is not finite is None."""

    name: str
    where: str = Field(description="the length or the tensor that gave this figure")
    value: Annotated[float, Field(allow_inf_nan=False)] | None
    limit: Annotated[float, Field(allow_inf_nan=False)]
    at_least: bool = Field(default=False, description="the limit is a smallest value")
    passed: bool

    def worse_than(self, other: Check) -> bool:
        """Return whether this figure is worse than another one of the same kind."""
        if self.value is None or other.value is None:
            return self.value is None
        return self.value < other.value if self.at_least else self.value > other.value

    def __str__(self) -> str:
        relation = ">=" if self.at_least else "<="
        value = "not finite" if self.value is None else f"{self.value:.3g}"
        return f"{self.name} ({self.where}) is {value}, must be {relation} {self.limit:g}"


class Correctness(Frozen):
    """Result of the correctness check of `source_digest`, on inputs from the secret `seed`."""

    passed: bool
    checks: tuple[Check, ...]
    device: str
    dtype: str
    longest: int = Field(description="longest sequence compared with the oracle, in tokens")
    seconds: NotNegative
    seed: str
    source_digest: str

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)


class Sample(Frozen):
    """The result of one fresh process that was timed at one length.

    The worker creates it; the runner adds the result of the correctness check.
    """

    length: int = Field(gt=0, description="sequence length in tokens")
    tokens_per_sec: Positive
    vram_mb: NotNegative = Field(description="peak memory allocated, MiB; 0 on a CPU")
    elapsed_seconds: Positive = Field(description="all timed calls together")
    host_seconds: NotNegative | None = Field(
        default=None, description="of these, until the last call had returned to the host"
    )
    process_seconds: NotNegative | None = Field(
        default=None, description="from the process's start to its last timed call, without waits"
    )
    call_seconds: tuple[Positive, ...] = Field(
        default=(), description="single calls after the loop by CUDA events, each with a cold L2"
    )
    runs: int = Field(gt=0, description="timed calls between the two synchronizes")
    first_call_seconds: NotNegative = Field(description="the first call, compilation included")
    import_seconds: NotNegative = Field(description="importing the layer, after torch")
    cache: Literal["shared", "cold"] = Field(description="kernel caches at the start")
    source_file: str = Field(description="fla.ops.quasar.chunk as loaded, relative to the tree")
    layer_file: str
    source_digest: str = Field(description="SHA-256 over the files below the tree's fla folder")
    correctness: Correctness | None = Field(
        default=None, description="None: the code was not checked"
    )
    telemetry: Telemetry | None = None
    environment: Environment | None = None
    started_at: datetime


class Failure(Frozen):
    """A length without a sample."""

    length: int = Field(gt=0)
    kind: Kind
    reason: str


def rejection(sample: Sample) -> str | None:
    """Return why a sample does not count, or None if it counts."""
    return next(_reasons(sample), None)


def _reasons(sample: Sample) -> Iterator[str]:
    correctness = sample.correctness
    if correctness is None:
        yield "its correctness was not checked"
    elif not correctness.passed:
        yield "its correctness check failed"
    elif correctness.source_digest != sample.source_digest:
        yield "its correctness check tested other code"
    bound = hardware_bound(sample.environment)
    if bound is not None and sample.tokens_per_sec > bound:
        yield (
            f"{sample.tokens_per_sec:,.0f} tokens/s exceed the hardware bound of this GPU, "
            f"{bound:,.0f}"
        )
    if sample.telemetry is not None:
        yield from _disturbances(sample.telemetry, sample.elapsed_seconds)


def _disturbances(telemetry: Telemetry, elapsed_seconds: float) -> Iterator[str]:
    before, after = telemetry.before, telemetry.after
    if before.memory_used_mb is not None and before.memory_used_mb > OTHER_MEMORY_MB:
        yield f"other processes held {before.memory_used_mb:.0f} MiB of the GPU"
    if before.processes:
        yield f"other processes ({before.processes}) computed on the GPU"
    if before.thermal_throttle_ns is not None and after.thermal_throttle_ns is not None:
        throttled = (after.thermal_throttle_ns - before.thermal_throttle_ns) / 1e9
        if throttled > THERMAL_SHARE * elapsed_seconds:
            yield f"the GPU was throttled for heat for {throttled:.3f} s"
    for state in (*telemetry.during, after):
        for slowdown in sorted(TAINTS.intersection(state.slowdowns)):
            yield f"the GPU reported a {slowdown} at {state.temperature_c} C, {state.power_w} W"
    if (
        before.ecc_uncorrected is not None
        and after.ecc_uncorrected is not None
        and after.ecc_uncorrected > before.ecc_uncorrected
    ):
        yield "uncorrected memory errors appeared"


def accepted(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples that count, in their order."""
    return [sample for sample in samples if rejection(sample) is None]
