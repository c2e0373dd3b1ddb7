"""Reasons to reject a sample: unchecked code, a disturbed GPU, or an impossible speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from harness.hardware.machine import Telemetry
from harness.hardware.roofline import hardware_bound
from harness.sample import Sample

OTHER_MEMORY_MB = 1024.0
"""Memory in use on the GPU before this process used it, above which the GPU is disturbed."""

THERMAL_SHARE = 0.01
"""Largest share of the timed period in which the driver may throttle the clocks for heat."""

TAINTS = frozenset(
    {"hardware slowdown", "thermal slowdown", "hardware thermal slowdown", "power brake"}
)
"""Slowdowns that a healthy GPU does not report. The power cap is omitted: fast kernels reach it."""


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
