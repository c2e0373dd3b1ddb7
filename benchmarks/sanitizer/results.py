"""Models of the file that watch.py writes, what it must say, and the table made of it."""

from __future__ import annotations

from pydantic import Field

from benchmarks.report.markdown import facts, table
from benchmarks.results import Frozen, Positive, Run

TOOLS = ("memcheck", "racecheck", "initcheck")
"""compute-sanitizer's tools that are used."""


class Watched(Frozen):
    """What one tool found."""

    calls: tuple[str, ...] = Field(description="of what: operator, layer")
    seconds: Positive = Field(description="wall time, beside the other tools")
    findings: int = Field(ge=0, description="errors or hazards, as far as it came")
    failure: str | None = Field(default=None, description="why it is not clean without findings")
    faulty: int = Field(ge=0, description="findings in a faulty kernel, as there must be")
    handshake: int | None = Field(default=None, ge=0, description="findings in a right kernel")

    @property
    def clean(self) -> bool:
        """Whether it came to its end, can tell, and found nothing."""
        return not self.findings and self.failure is None


class SanitizerResults(Run):
    """A run on one GPU, as far as it came."""

    sanitizer: str = Field(description="compute-sanitizer's version")
    seconds: float = Field(ge=0, description="wall time of all tools, side by side")
    calls: dict[str, int] = Field(description="watched and compared with float64")
    tools: dict[str, Watched]


def verdict(watched: Watched) -> str:
    """Say what a tool found: never 0 findings where it did not come to its end."""
    count = f"{watched.findings} findings"
    if watched.failure is None:
        return count
    return f"{count}; {watched.failure}" if watched.findings else watched.failure


def misses(results: SanitizerResults) -> list[str]:
    """Name every tool that found something, failed, or did not run."""
    seen = {tool: results.tools.get(tool) for tool in TOOLS}
    return [
        f"{tool} was not run" if one is None else f"{tool}: {verdict(one)}"
        for tool, one in seen.items()
        if one is None or not one.clean
    ]


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
