"""Measured figures with their limits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

OUTPUT_ERROR, GRADIENT_ERROR = 6e-3, 1e-2
"""Largest accepted relative RMS errors of an operator's outputs and gradients in bf16."""
COPY_SHARE = 0.8
"""Decoding at the largest batch must reach this share of an equally large copy's bandwidth."""


class Criterion(NamedTuple):
    """A measured figure and its limit."""

    what: str
    value: float
    limit: float
    at_least: bool = False
    scale: float = 1.0  # factor of both numbers when they are printed

    @property
    def met(self) -> bool:
        """Whether the value keeps the limit; false for NaN."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def missed(criteria: Iterable[Criterion]) -> list[str]:
    """Return a line for each figure that misses its limit."""
    return [
        f"{c.what}: {c.value * c.scale:.4g}, limit {c.limit * c.scale:g}"
        for c in criteria
        if not c.met
    ]
