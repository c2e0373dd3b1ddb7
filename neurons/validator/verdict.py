"""The verdict: pure functions from measurements to a submission's score."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from harness.terminal import one_line
from neurons.wire.protocol import Benchmarks

TOLERANCE = 0.9
"""A claim holds when the measured speed reaches this share of it."""

CONFIRMED = "Confirmed: "


@dataclass(frozen=True)
class Verdict:
    """A score, and the sentence that explains it."""

    score: float  # measured over claimed speed, or 0.0 for a submission that failed
    reason: str
    # tokens per second measured at the target length; None if it was not timed
    actual: float | None = None
    # everything that was timed, by length, on `device`, a GPU or CPU
    measured: Benchmarks = field(default_factory=dict)
    device: str | None = None
    timed_out: bool = False  # a process did not end in time, which may be the machine's fault

    @property
    def passed(self) -> bool:
        """Whether the submission may rank."""
        return self.score > 0.0


def reject(reason: str) -> Verdict:
    """Return a verdict of score 0 without a measured speed; the reason may name a fork's files."""
    return Verdict(0.0, one_line(reason))


def is_claim(claim: float | None) -> bool:
    return claim is not None and math.isfinite(claim) and claim > 0.0


def judge(claim: float | None, actual: float) -> Verdict:
    """Compare the claimed with the measured speed at the target length, in tokens per second."""
    if claim is None or not is_claim(claim):
        return reject(f"The claim must be a positive, finite speed, not {claim}.")
    speeds = f"{_figure(actual)} tokens/s measured, {_figure(claim)} claimed"
    if not math.isfinite(actual):
        return Verdict(0.0, f"Rejected: {speeds}.", actual)
    score = actual / claim
    if actual < TOLERANCE * claim:
        share = f"{math.floor(1000 * score) / 10:g}% of the claim, at least {TOLERANCE:.0%} needed"
        return Verdict(0.0, f"Rejected: {speeds} ({share}).", actual)
    share = f"{score:,.1f} times the claim" if score >= 2 else f"{score:.0%} of the claim"
    return Verdict(score, f"{CONFIRMED}{speeds} ({share}).", actual)


def refute(verdict: Verdict) -> Verdict:
    """Return a confirmed verdict with a reason that names the failed logit verification.

    The score stays: the API excludes the submission by its verification.
    """
    speeds = verdict.reason.removeprefix(CONFIRMED)
    reason = f"Rejected: the logit verification failed. Speed: {speeds}"
    return replace(verdict, reason=reason)


def _figure(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 1000 else f"{speed:,.1f}"
