"""Pure functions over repeated measurements: how far they spread, and a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness.claim.rejection import rejection
from harness.report import Failure, Measurement


def spread(values: Sequence[float]) -> float:
    """Return (max - min) / min of positive values; 0 for a single one.

    Raises:
        ValueError: no values, or one that is not a positive finite number.
    """
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"spread needs positive finite values, not {list(values)}")
    return (max(values) - min(values)) / min(values)


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
