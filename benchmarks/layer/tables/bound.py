"""How near the layer comes to what no kernel exceeds on the GPU, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.report.markdown import table
from harness.hardware.gpus import ceiling as card_ceiling
from harness.hardware.gpus import known
from harness.hardware.machine import Environment
from harness.hardware.roofline import ceiling, speed_of_light


def bound_of(machine: Environment) -> float | None:
    """Return the tokens/s that nothing exceeds on a GPU; None where nobody knows it."""
    card = known(machine.gpu or "")
    return ceiling(machine) or (card_ceiling(card) if card else None)


def shares_of_bound(machine: Environment, speeds: Mapping[str, Mapping[int, float]]) -> str:
    """Return how near the layer comes to the hardware's bound, and how much of the gap it closes.

    Args:
        speeds: M tokens/s by tree and length; where another tree has none stands a dash.
    """
    exact = bound_of(machine)
    if exact is None:
        return "The bound of this GPU is not known."
    bound = exact / 1e6
    rows = []
    for n, ours in speeds["overlay"].items():
        closed = [
            f"{speed_of_light(ours, bound, speeds[other][n]):.1%}" if n in speeds[other] else "-"
            for other in ("public-fork", "peer")
        ]
        rows.append([f"{n:,}", f"{ours / bound:.1%}", *closed])
    names = (
        "tokens",
        "of bound",
        "gap closed, from the public fork",
        "gap closed, from the baseline",
    )
    return f"{table(names, rows)}\n\nThe bound is {bound:.0f} M tokens/s."
