"""The verdict: what a submission scores for what was measured. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from neurons.protocol import Benchmarks

TOLERANCE = 0.9
"""A claim holds when the measured speed reaches this share of it."""


@dataclass(frozen=True)
class Verdict:
    """A score, and the sentence that explains it.

    Attributes:
        score: measured over claimed speed, or 0.0 for a submission that failed.
        actual: tokens per second measured at the target length, when it came to that.
        measured: everything that was timed, by length.
    """

    score: float
    reason: str
    actual: float | None = None
    measured: Benchmarks = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the submission may rank."""
        return self.score > 0.0


def reject(reason: str) -> Verdict:
    """Return the verdict on a submission that could not be measured."""
    return Verdict(0.0, reason)


def is_claim(claim: float | None) -> bool:
    """Tell whether a claim is a speed at all."""
    return claim is not None and math.isfinite(claim) and claim > 0.0


def judge(claim: float | None, actual: float) -> Verdict:
    """Compare the claimed with the measured speed at the target length, in tokens per second."""
    if claim is None or not is_claim(claim):
        return reject(f"The claim of {claim} tokens/s is no speed.")
    share = f"Measured {actual:.1f} of the claimed {claim:.1f} tokens/s"
    if not math.isfinite(actual) or actual < TOLERANCE * claim:
        return Verdict(0.0, f"{share}: less than {TOLERANCE:.0%}.", actual)
    return Verdict(actual / claim, f"{share}.", actual)
