"""Results of the model checks: verdicts with their figures."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from pydantic import BaseModel, ConfigDict, Field


class Verdict(str, Enum):
    """The verdict of a finding, best first; the model's verdict is the worst one."""

    PASS = "PASS"  # noqa: S105 no password
    WARN = "WARN"
    FAIL = "FAIL"


class Finding(BaseModel):
    """The result of one check."""

    model_config = ConfigDict(frozen=True)

    gate: str = Field(description="the group of checks, G0 to G4")
    what: str
    verdict: Verdict
    told: str = Field(description="the result in words, with figures and limits if there are any")
    figures: dict[str, float] = Field(default={}, description="by name; in JSON null if not finite")


class ModelChecks(BaseModel):
    """All findings on one model."""

    model_config = ConfigDict(frozen=True)

    model: str
    device: str
    torch: str
    steps: int = Field(description="steps of the mini-training")
    verdict: Verdict
    findings: tuple[Finding, ...]


def worst(findings: Sequence[Finding]) -> Verdict:
    """Return the worst verdict; PASS without findings."""
    order = list(Verdict)
    return max((f.verdict for f in findings), key=order.index, default=Verdict.PASS)


def grade(value: float, good: bool, tolerable: bool) -> Verdict:
    """Return the verdict of a figure; NaN always fails."""
    if value != value:
        return Verdict.FAIL
    if good:
        return Verdict.PASS
    return Verdict.WARN if tolerable else Verdict.FAIL
