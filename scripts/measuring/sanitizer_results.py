"""Models of the file that sanitize_kernels.py writes, and what it must say."""

from __future__ import annotations

from pydantic import Field

from measuring.results import Frozen, Run

TOOLS = ("memcheck", "racecheck", "initcheck")
"""compute-sanitizer's tools that are used."""


class Watched(Frozen):
    """How much one tool found: errors or hazards; 0 is clean."""

    calls: tuple[str, ...] = Field(description="of what: operator, layer")
    findings: int = Field(ge=0)
    faulty: int = Field(ge=1, description="findings in a faulty kernel, as there must be")
    handshake: int | None = Field(default=None, ge=0, description="findings in a right kernel")


class SanitizerResults(Run):
    """A whole run on one GPU."""

    sanitizer: str = Field(description="compute-sanitizer's version")
    calls: dict[str, int] = Field(description="watched and compared with float64")
    tools: dict[str, Watched]


def misses(results: SanitizerResults) -> list[str]:
    """Name every tool that found something, or did not run."""
    seen = {tool: results.tools.get(tool) for tool in TOOLS}
    return [
        f"{tool} was not run" if one is None else f"{tool}: {one.findings} findings"
        for tool, one in seen.items()
        if one is None or one.findings
    ]
