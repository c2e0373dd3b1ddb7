"""The subnet's rules in numbers: blocks, rounds, bans, leagues, scores and shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

GENESIS_UNIX = 1_609_459_200
"""Unix time of block 0 (2021-01-01T00:00:00Z). The server counts blocks by its clock."""

BLOCK_SECONDS = 12
"""Seconds in a block on the public server."""

TOP_SHARES = (0.60, 0.25, 0.10, 0.05)
"""Weights of the four best hotkeys of a round, best first."""

FAILURES_BEFORE_BAN = 5
BAN_HOURS = 24
ROUND_HOURS = 48

MIN_TARGET = 512
"""Minimum target in tokens: the speed of shorter calls depends little on the kernel."""


def block_at(unix: float, block_seconds: int = BLOCK_SECONDS) -> int:
    """Return the block number at `unix` seconds since 1970."""
    return int(unix - GENESIS_UNIX) // block_seconds


LEAGUES: tuple[tuple[int, str, float], ...] = (
    (0, "100k", 0.5),
    (200_000, "200k", 0.75),
    (300_000, "300k", 1.0),
    (400_000, "400k", 1.25),
    (500_000, "500k", 1.5),
    (600_000, "600k", 1.75),
    (700_000, "700k", 2.0),
    (800_000, "800k", 2.25),
    (900_000, "900k", 2.5),
    (1_000_000, "1M", 3.0),
)
"""Lower bound of the target length in tokens (inclusive), league name, score multiplier."""


def league_of(target_sequence_length: int) -> tuple[str, float]:
    """Return the league's name and multiplier for a target length in tokens."""
    reached = [row for row in LEAGUES if row[0] <= target_sequence_length] or LEAGUES[:1]
    return reached[-1][1:]


Ranking = Literal["claim", "verified"]
"""A round's rule. claim: the public rule, by the claim. verified: by the claim, or the validator's
speed if that is lower, and results that differ little count as equal."""

EQUAL_WITHIN: Mapping[Ranking, float] = {"claim": 0.0, "verified": 0.03}
"""Share of the better result by which another one may be lower and still count as equal."""


def weighted_score(
    tokens_per_sec: float,
    target_sequence_length: int,
    ranking: Ranking = "claim",
    score: float | None = None,
) -> float:
    """Return a submission's result in the ranking: tokens/s times the league's multiplier.

    Under `verified`, a `score` (measured over claimed speed) below 1 reduces it.
    """
    share = 1.0 if ranking == "claim" or score is None else min(1.0, score)
    return tokens_per_sec * share * league_of(target_sequence_length)[1]


def exceeds(result: float, other: float, ranking: Ranking) -> bool:
    """Return whether a result beats an earlier submission's, and does not count as equal to it."""
    return result * (1.0 - EQUAL_WITHIN[ranking]) > other


def to_beat(result: float, ranking: Ranking) -> float:
    """Return the weighted score that a later submission must exceed to beat `result`."""
    return result / (1.0 - EQUAL_WITHIN[ranking])
