"""Small pure functions over repeated measurements: which runs count, and how far they spread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness.report import Measurement

OTHER_MEMORY_MB = 1024.0
"""Memory in use on the GPU before this process touched it; above, somebody else works there."""

THERMAL_SHARE = 0.01
"""Share of the timed period that the driver may have throttled the clocks for heat."""


def spread(values: Sequence[float]) -> float:
    """Return (max - min) / min of positive values; 0 for a single one.

    Raises:
        ValueError: no values, or one that is not a positive finite number.
    """
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"spread needs positive finite values, not {list(values)}")
    return (max(values) - min(values)) / min(values)


def rejection(measurement: Measurement) -> str | None:
    """Return why a run does not count, or None when it does."""
    if measurement.gate is None:
        return "its correctness was not checked"
    if not measurement.gate.passed:
        return "its correctness gate is red"
    if measurement.gate.source_digest != measurement.source_digest:
        return "its gate checked other code"
    telemetry = measurement.telemetry
    if telemetry is None:
        return None
    before, after = telemetry.before, telemetry.after
    if before.memory_used_mb is not None and before.memory_used_mb > OTHER_MEMORY_MB:
        return f"other processes held {before.memory_used_mb:.0f} MiB of the GPU"
    if before.thermal_throttle_ns is not None and after.thermal_throttle_ns is not None:
        throttled = (after.thermal_throttle_ns - before.thermal_throttle_ns) / 1e9
        if throttled > THERMAL_SHARE * measurement.elapsed_seconds:
            return f"the GPU was throttled for heat for {throttled:.3f} s"
    if (
        before.ecc_uncorrected is not None
        and after.ecc_uncorrected is not None
        and after.ecc_uncorrected > before.ecc_uncorrected
    ):
        return "uncorrected memory errors appeared"
    return None


def accepted(runs: Iterable[Measurement]) -> list[Measurement]:
    """Return the runs that count, in their order."""
    return [run for run in runs if rejection(run) is None]
