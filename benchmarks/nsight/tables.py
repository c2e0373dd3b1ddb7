"""The tables of docs/kernels.md that Nsight Compute's run makes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.nsight.results import Profile, bytes_ms, floor_ms, products_ms
from benchmarks.report.markdown import facts, table

PLACES = {
    "dram": "DRAM",
    "tensor": "tensor cores",
    "shared": "shared memory",
    "issue": "issue slots",
}
"""Utilisations that a kernel may meet its limit in, and their columns."""


def profile_tables(run: Profile) -> str:
    """Return the tables of a profile: how it was made, and each call's kernels."""
    return "\n\n".join([ceilings(run), *(call_profile(run, name) for name in run.calls)])


def ceilings(profile: Profile) -> str:
    """Return the table of where, when and how the kernels were profiled."""
    rates = ", ".join(f"{kind} {rate:.0f}" for kind, rate in profile.product_tflops.items())
    ceilings = f"copies {profile.copy_gb_per_s / 1000:.2f} TB/s; products {rates} TFLOP/s"
    where = profile.where(f"Nsight Compute {profile.ncu}")
    return facts({**where, "ceilings": ceilings, "protocol": profile.protocol})


def call_profile(profile: Profile, name: str) -> str:
    """Return the table of a call's kernels, and of the call as a whole."""
    call = profile.calls[name]
    header = (
        f"{name}, {call.tokens:,} tokens", "ms", *(f"{x}, %" for x in PLACES.values()), "warps, %",
        "registers", "GB moved", "floor, ms", "times the floor",
    )  # fmt: skip
    rows = []
    for kernel in call.kernels:
        percent = [f"{kernel.percent[place]:.0f}" for place in (*PLACES, "warps")]
        counters, floor = [*percent, str(kernel.registers)], floor_ms(profile, kernel)
        rows.append(_line(kernel.name, kernel.ms, counters, kernel.dram_bytes, floor))
    ms = math.fsum(kernel.ms for kernel in call.kernels)
    moved = math.fsum(kernel.dram_bytes for kernel in call.kernels)
    products = math.fsum(products_ms(profile, kernel) for kernel in call.kernels)
    floor = max(bytes_ms(profile, call.least_bytes), products)
    return table(header, [*rows, _line("all of it", ms, [""] * (len(PLACES) + 2), moved, floor)])


def _line(what: str, ms: float, counters: Sequence[str], moved: float, floor: float) -> list[str]:
    times = f"{ms / floor:.1f}" if floor else "-"
    return [what, f"{ms:.3f}", *counters, f"{moved / 1e9:.2f}", f"{floor:.3f}", times]
