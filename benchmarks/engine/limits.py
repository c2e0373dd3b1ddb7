"""A limit beside what was measured, and how both are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.report.markdown import table


class Criterion(NamedTuple):
    """One limit beside what was measured."""

    what: str
    value: float
    limit: float
    at_least: bool = False
    scale: float = 1.0  # of both numbers when they are written
    digits: str = ".3g"

    @property
    def met(self) -> bool:
        """Whether the value keeps the limit; a value that is not a number never does."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def cells(self) -> tuple[str, str, str, str]:
        """Return what, the value, the limit and the verdict as text."""
        relation = "at least" if self.at_least else "at most"
        value, limit = (f"{x * self.scale:{self.digits}}" for x in (self.value, self.limit))
        return self.what, value, f"{relation} {limit}", "met" if self.met else "missed"


def missed(criteria: Iterable[Criterion]) -> list[str]:
    """Describe what misses its limit."""
    return [
        f"{c.what}: {c.value * c.scale:.4g}, limit {c.limit * c.scale:g}"
        for c in criteria
        if not c.met
    ]


def summary(criteria: Sequence[Criterion]) -> str:
    """Say how many limits are kept, and name every one that is missed."""
    out = missed(criteria)
    if not out:
        return f"All {len(criteria)} limits are kept."
    listed = "\n".join(f"- {line}" for line in out)
    return f"{len(out)} of {len(criteria)} limits are missed:\n\n{listed}"


def limits_table(criteria: Sequence[Criterion]) -> str:
    """Return every limit beside its figure, met or missed, below their summary."""
    header = ("what", "measured", "limit", "verdict")
    return f"{summary(criteria)}\n\n{table(header, [c.cells() for c in criteria])}"
