"""The tables of docs/kernels.md that Nsight Compute's and compute-sanitizer's runs make."""

from __future__ import annotations

import math

from measuring.markdown_tables import facts, table
from measuring.profile_results import CallProfile, Profile, bytes_ms, floor_ms, products_ms
from measuring.sanitizer_results import SanitizerResults, verdict

PLACES = {
    "dram": "DRAM",
    "tensor": "tensor cores",
    "shared": "shared memory",
    "issue": "issue slots",
}
"""Utilisations that a kernel may meet its limit in, and their columns."""


def profile(run: Profile) -> str:
    """Return the tables of a profile: how it was made, and each call's kernels."""
    return "\n\n".join([ceilings(run), *(call_profile(run, name) for name in run.calls)])


def ceilings(profile: Profile) -> str:
    """Return the table of where, when and how the kernels were profiled."""
    e, rates = profile.environment, profile.product_tflops
    return facts(
        {
            "GPU": f"{e.gpu}, driver {e.driver}; torch {e.torch}; Nsight Compute {profile.ncu}",
            "ceilings": f"copies {profile.copy_gb_per_s / 1000:.2f} TB/s; products "
            + ", ".join(f"{kind} {rate:.0f}" for kind, rate in rates.items())
            + " TFLOP/s",
            "date, commit": f"{profile.created}, {profile.commit}",
            "protocol": profile.protocol,
        }
    )


def call_profile(profile: Profile, name: str) -> str:
    """Return the table of a call's kernels, and of the call as a whole."""
    call = profile.calls[name]
    header = (
        f"{name}, {call.tokens:,} tokens", "ms", *(f"{x}, %" for x in PLACES.values()), "warps, %",
        "registers", "GB moved", "floor, ms", "times the floor",
    )  # fmt: skip
    rows = []
    for kernel in call.kernels:
        floor = floor_ms(profile, kernel)
        rows.append(
            [
                kernel.name,
                f"{kernel.ms:.3f}",
                *(f"{kernel.percent[place]:.0f}" for place in (*PLACES, "warps")),
                str(kernel.registers),
                f"{kernel.dram_bytes / 1e9:.2f}",
                f"{floor:.3f}",
                f"{kernel.ms / floor:.1f}" if floor else "-",
            ]
        )
    return table(header, [*rows, _together(profile, call)])


def _together(profile: Profile, call: CallProfile) -> list[str]:
    ms = math.fsum(kernel.ms for kernel in call.kernels)
    products = math.fsum(products_ms(profile, kernel) for kernel in call.kernels)
    floor = max(bytes_ms(profile, call.least_bytes), products)
    moved = math.fsum(kernel.dram_bytes for kernel in call.kernels)
    blank = [""] * (len(PLACES) + 2)
    return [
        "all of it",
        f"{ms:.3f}",
        *blank,
        f"{moved / 1e9:.2f}",
        f"{floor:.3f}",
        f"{ms / floor:.1f}",
    ]


def sanitizer(results: SanitizerResults) -> str:
    """Return the table of compute-sanitizer's findings, and what a tool left out."""
    e = results.environment
    where = facts(
        {
            "GPU": f"{e.gpu}, driver {e.driver}; compute-sanitizer {results.sanitizer}",
            "date, commit": f"{results.created}, {results.commit}",
            "wall time": f"{results.seconds:.0f} s, all tools side by side",
        }
    )
    rows, left_out = [], []
    for tool, one in results.tools.items():
        calls = " and ".join(f"{results.calls[name]} of the {name}" for name in one.calls)
        rows.append((tool, calls, verdict(one), str(one.faulty), f"{one.seconds:.0f}"))
        left_out += [
            f"{tool} did not watch the {name}'s kernels: it reports {one.handshake} hazards in a "
            "right kernel that hands chunks over as they do."
            for name in results.calls
            if name not in one.calls
        ]
    header = ("tool", "calls", "found", "in a faulty kernel", "wall time, s")
    return "\n\n".join([where, table(header, rows), *left_out])
