"""The ranking: which submissions count, in what order, and what they earn. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from neurons.protocol import HIGHEST_CLAIM
from neurons.rules import TOP_SHARES, weighted_score
from neurons.validator_api.database.tables import Submission


@dataclass(frozen=True)
class Ranked:
    """A submission with its place.

    Attributes:
        rank: 1 + the number of other hotkeys whose best submission comes before this one, so a
            hotkey's second submission does not push others down.
        weight: share of the emission: of a hotkey's best among the top four, 0.0 for the others.
    """

    submission: Submission
    weighted_score: float
    rank: int
    weight: float


def weighted(submission: Submission) -> float:
    """Return the claimed tokens per second times the league's multiplier."""
    return weighted_score(submission.tokens_per_sec or 0.0, submission.target_sequence_length)


def counts(submission: Submission) -> bool:
    """Tell whether a validator confirmed the claim and nothing speaks against it."""
    return (
        submission.is_revealed
        and submission.validated_at is not None
        and submission.verification_passed is not False
        and (submission.score or 0.0) > 0.0
        and (submission.tokens_per_sec or 0.0) <= HIGHEST_CLAIM
    )


def rank(submissions: Iterable[Submission], baseline: Submission | None = None) -> list[Ranked]:
    """Return the submissions that count, best first; the earlier one wins a tie.

    With a baseline (the winner of the round before), only what is faster than it counts, unless
    the baseline has been refuted since.
    """
    floor = weighted(baseline) if baseline is not None and counts(baseline) else 0.0
    counted = [row for row in submissions if counts(row) and weighted(row) > floor]
    counted.sort(key=lambda row: (-weighted(row), row.created_at, row.id))
    seen: set[str] = set()
    ranked = []
    for row in counted:
        earns = row.miner_hotkey not in seen and len(seen) < len(TOP_SHARES)
        weight = TOP_SHARES[len(seen)] if earns else 0.0
        place = 1 + len(seen - {row.miner_hotkey})
        ranked.append(Ranked(row, weighted(row), place, weight))
        seen.add(row.miner_hotkey)
    return ranked
