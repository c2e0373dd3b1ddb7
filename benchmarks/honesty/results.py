"""What simulate.py found, as schema-checked models."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Literal

from pydantic import Field

from benchmarks.results import Frozen, NotNegative, Positive, Run


class Simulated(Frozen):
    """The claim under one shape of noise."""

    shape: str
    healthy: bool
    refuted: NotNegative = Field(description="chance that one validator's run misses the claim")
    ratio: Positive = Field(description="claim / median of later runs, median over the trials")
    ratio_low: Positive = Field(description="the same, which 5% of the trials fall short of")
    runs: Positive = Field(description="runs taken, mean over the trials")


class ClaimSimulation(Frozen):
    """All shapes of one simulation."""

    schema_version: Literal[1] = 1
    created: date
    commit: str | None
    trials: int
    shapes: tuple[Simulated, ...]


class Agreement(Frozen):
    """One length by two loops: medians, tokens/s."""

    tokens: int
    harness: Positive
    validator: Positive
    host_share: NotNegative = Field(description="of the loop, until the host was done; largest")
    cold_call_ms: Positive | None = Field(description="a single call behind a cold L2, median")


class Acceptance(Run):
    """What acceptance.py found on one GPU."""

    target: int
    cycle_seconds: Positive
    confirm_seconds: Positive
    claim: Positive
    claim_runs: int
    limits: dict[str, float]
    validator: tuple[Positive, ...] = Field(description="tokens/s of each run at the target")
    agreements: tuple[Agreement, ...]


def load(path: Path) -> ClaimSimulation:
    """Read a simulation's file."""
    return ClaimSimulation.model_validate_json(path.read_text(encoding="utf-8"))


def write(path: Path, simulation: ClaimSimulation) -> None:
    """Write a file that `load` reads."""
    path.write_text(simulation.model_dump_json(indent=1) + "\n", encoding="utf-8")
