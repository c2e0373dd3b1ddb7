"""The tables of Nsight Compute's profile, of the GPU tests and of compute-sanitizer."""

from __future__ import annotations

import math

from benchmarks.cases import gpu_tests, nsight, sanitizer
from benchmarks.cases.sanitizer_calls import TOOLS
from benchmarks.engine.results import Entry, Run
from benchmarks.report.markdown import facts, table

UTILISATION = {
    "dram": "DRAM",
    "tensor": "tensor cores",
    "shared": "shared memory",
    "issue": "issue slots",
    "warps": "warps",
}
"""Names of the columns with percentages of a peak."""


def profile(run: Run) -> str:
    """Return the profile's conditions, and a table of each call's kernels."""
    rates = ", ".join(f"{k} {run.number(f'{k}_tflops'):.0f}" for k in nsight.OPERATIONS)
    copies = f"copies {run.number('copy_gb_per_s') / 1000:.2f} TB/s"
    where = run.where(f"Nsight Compute {run.versions['Nsight Compute']}")
    measured = {"rates": f"{copies}; products {rates} TFLOP/s", "protocol": run.protocol}
    parts = [call_profile(run, call) for call in run.table("calls")]
    return "\n\n".join([facts({**where, **measured}), *parts])


def call_profile(run: Run, call: Entry) -> str:
    """Return the table of a call's kernels, and of the call as a whole."""
    name = call.of["call"]
    header = (
        f"{name}, {call.of['tokens']:,} tokens",
        "ms",
        *(f"{x}, %" for x in UTILISATION.values()),
        "registers",
        "GB moved",
        "floor, ms",
        "times the floor",
    )

    def line(what: str, ms: float, counters: list[str], moved: float, floor: float) -> list[str]:
        over = f"{ms / floor:.1f}" if floor else "-"
        return [what, f"{ms:.3f}", *counters, f"{moved / 1e9:.2f}", f"{floor:.3f}", over]

    kernels = [kernel for kernel in run.table("kernels") if kernel.of["call"] == name]
    rows = []
    for kernel in kernels:
        of = kernel.figures
        counters = [f"{of[f'{place}_percent']:.0f}" for place in UTILISATION]
        counters.append(str(of["registers"]))
        floor = nsight.floor_ms(run, kernel)
        rows.append(line(kernel.texts["kernel"], of["ms"], counters, of["dram_bytes"], floor))
    ms, moved = (math.fsum(k.figures[of] for k in kernels) for of in ("ms", "dram_bytes"))
    products = math.fsum(nsight.products_ms(run, kernel) for kernel in kernels)
    floor = max(nsight.bytes_ms(run, call.figures["least_bytes"]), products)
    return table(
        header, [*rows, line("whole call", ms, [""] * (len(UTILISATION) + 1), moved, floor)]
    )


def tests(run: Run) -> str:
    """Return the GPU tests' machine, results by file, and the names of failed and missing tests."""
    outcomes = ("passed", "failed", "skipped")
    files = sorted(run.entries, key=lambda e: str(e.of["file"]))
    rows = [(str(e.of["file"]), *(str(e.figures[o]) for o in outcomes)) for e in files]
    totals = (str(sum(e.figures[o] for e in run.entries)) for o in outcomes)
    notes = [f"Failed: {', '.join(named)}." for named in [gpu_tests.misses(run)] if named]
    left_out = run.settings.get("left out")
    notes += [f"Not part of this run: {left_out}."] if left_out else []
    whole = table(("file", *outcomes), [*rows, ("all files", *totals)])
    return "\n\n".join([facts(run.where()), whole, *notes])


_NAMES = {"operator": "operator", "layer": "layer", "wide": "wide projection"}


def sanitizer_findings(run: Run) -> str:
    """Return the table of compute-sanitizer's findings, and the calls that a tool did not check."""
    where = run.where(f"compute-sanitizer {run.versions['compute-sanitizer']}")
    where["wall time"] = f"{run.number('seconds'):.0f} s, all tools in parallel"
    counts = {n: run.settings[f"{n} calls"] for n in sanitizer.CALLS}
    rows, left_out = [], []
    for one in sorted(run.table("tools"), key=lambda one: TOOLS.index(one.by)):
        watched = one.texts["calls"].split()
        calls = ", ".join(f"{counts[name]} of the {_NAMES[name]}" for name in watched)
        planted, seconds = str(one.figures["faulty"]), f"{one.figures['seconds']:.0f}"
        rows.append((one.by, calls, sanitizer.verdict(one), planted, seconds))
        left_out += [
            f"{one.by} did not check the {_NAMES[name]}'s kernels: it reports "
            f"{one.figures['handshake']} hazards in a correct kernel that synchronises its warps "
            "as they do."
            for name in counts
            if name not in watched
        ]
    header = ("tool", "calls", "found", "in a faulty kernel", "wall time, s")
    return "\n\n".join([facts(where), table(header, rows), *left_out])
