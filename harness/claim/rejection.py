"""Why a run does not count: unchecked code, a disturbed GPU, or a speed that cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from harness.hardware.roofline import ceiling
from harness.report import Measurement, Telemetry

OTHER_MEMORY_MB = 1024.0
"""Memory in use on the GPU before this process touched it; above, somebody else works there."""

THERMAL_SHARE = 0.01
"""Share of the timed period that the driver may have throttled the clocks for heat."""

TAINTS = frozenset({"hardware slowdown", "thermal slowdown", "hardware thermal slowdown",
                    "power brake"})  # fmt: skip
"""Slowdowns that a healthy GPU does not have. The power cap is none: fast kernels meet it."""


def rejection(measurement: Measurement) -> str | None:
    """Return why a run does not count, or None when it does."""
    return next(_reasons(measurement), None)


def _reasons(measurement: Measurement) -> Iterator[str]:
    gate = measurement.gate
    if gate is None:
        yield "its correctness was not checked"
    elif not gate.passed:
        yield "its correctness gate is red"
    elif gate.source_digest != measurement.source_digest:
        yield "its gate checked other code"
    bound = ceiling(measurement.environment)
    if bound is not None and measurement.tokens_per_sec > bound:
        yield (
            f"{measurement.tokens_per_sec:,.0f} tokens/s cannot be: this GPU's memory and "
            f"arithmetic end at {bound:,.0f}"
        )
    if measurement.telemetry is not None:
        yield from _disturbances(measurement.telemetry, measurement.elapsed_seconds)


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


def accepted(runs: Iterable[Measurement]) -> list[Measurement]:
    """Return the runs that count, in their order."""
    return [run for run in runs if rejection(run) is None]
