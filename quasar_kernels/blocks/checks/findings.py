"""Results of the model checks: a verdict each, with its figures."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from pydantic import BaseModel, ConfigDict, Field


class Verdict(str, Enum):
    """The verdict of a finding; the worst one is the model's."""

    PASS = "PASS"  # noqa: S105 no password
    WARN = "WARN"
    FAIL = "FAIL"


class Finding(BaseModel):
    """The result of one check."""

    model_config = ConfigDict(frozen=True)

    gate: str = Field(description="G0 to G4")
    what: str
    verdict: Verdict
    told: str = Field(description="a clause for a person, with the figures and their limits")
    figures: dict[str, float] = Field(default={}, description="by name; null where not finite")


class ModelChecks(BaseModel):
    """All findings on one model."""

    model_config = ConfigDict(frozen=True)

    model: str
    device: str
    torch: str
    steps: int = Field(description="of the mini-training")
    verdict: Verdict
    findings: tuple[Finding, ...]


def worst(findings: Sequence[Finding]) -> Verdict:
    """Return the worst verdict; PASS without findings."""
    order = list(Verdict)
    return max((f.verdict for f in findings), key=order.index, default=Verdict.PASS)


def graded(value: float, good: bool, bearable: bool) -> Verdict:
    """Return the verdict of a figure; one that is not a number is neither good nor bearable."""
    if value != value:
        return Verdict.FAIL
    if good:
        return Verdict.PASS
    return Verdict.WARN if bearable else Verdict.FAIL
