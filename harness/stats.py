"""Pure functions over repeated measurements: which runs count, how far they spread, a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness.report import Failure, Measurement

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


def table(measurements: Sequence[Measurement], failures: Iterable[Failure] = ()) -> str:
    """Return a line for each length: the slowest run, the spread, and why it may not count."""
    rows = [
        f"{'tokens':>9} {'slowest tokens/s':>17} {'spread':>7} {'MiB':>9} {'first call':>11}  note"
    ]
    for length in sorted({m.length for m in measurements}):
        runs = [m for m in measurements if m.length == length]
        speeds = [m.tokens_per_sec for m in runs]
        notes = sorted({reason for m in runs if (reason := rejection(m))})
        rows.append(
            f"{length:>9} {min(speeds):>17,.0f} {spread(speeds):>7.1%} "
            f"{max(m.vram_mb for m in runs):>9,.0f} "
            f"{max(m.first_call_seconds for m in runs):>9.2f} s  " + ("; ".join(notes) or "checked")
        )
    alike: dict[str, list[int]] = {}
    for failure in failures:
        alike.setdefault(f"{failure.kind}: {failure.reason}", []).append(failure.length)
    rows += [f"{', '.join(map(str, lengths)):>9} {reason}" for reason, lengths in alike.items()]
    return "\n".join(rows)
