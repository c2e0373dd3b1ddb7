"""The table of docs/kernels.md that compute-sanitizer's run makes."""

from __future__ import annotations

from benchmarks.markdown import facts, table
from benchmarks.sanitizer.results import SanitizerResults, verdict


def sanitizer_table(results: SanitizerResults) -> str:
    """Return the table of compute-sanitizer's findings, and what a tool left out."""
    where = results.where(f"compute-sanitizer {results.sanitizer}")
    where["wall time"] = f"{results.seconds:.0f} s, all tools side by side"
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
    return "\n\n".join([facts(where), table(header, rows), *left_out])
