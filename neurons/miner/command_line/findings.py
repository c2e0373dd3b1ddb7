"""What a check of the doctor found: a finding, and each failure's remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "failure"]


@dataclass(frozen=True)
class Finding:
    """What a check found. `remedy` is empty when `level` is ok."""

    name: str
    level: Level
    detail: str
    remedy: str = ""


def ok(name: str, detail: str) -> Finding:
    """A check that passed."""
    return Finding(name, "ok", detail)


def warning(name: str, detail: str, remedy: str) -> Finding:
    """Something that does not stop the miner."""
    return Finding(name, "warning", detail, remedy)


def failure(name: str, detail: str, remedy: str) -> Finding:
    """Something that the miner cannot work with."""
    return Finding(name, "failure", detail, remedy)
