"""The ranking: which submissions count, in what order, and what they earn. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from neurons.rules import TOP_SHARES, weighted_score
from neurons.validator_api.storage import Submission


@dataclass(frozen=True)
class Ranked:
    """A submission with its place.

    Attributes:
        rank: 1 + the number of other hotkeys whose best submission comes before this one, so a
            hotkey's second submission does not push others down.
        best: whether it is its hotkey's best; only this one earns.
    """

    submission: Submission
    weighted_score: float
    rank: int
    best: bool


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
    )


def rank(submissions: Iterable[Submission], baseline: Submission | None = None) -> list[Ranked]:
    """Return the submissions that count, best first; the earlier one wins a tie.

    With a baseline (the winner of the round before), only what is faster than it counts.
    """
    floor = weighted(baseline) if baseline is not None else 0.0
    counted = [row for row in submissions if counts(row) and weighted(row) > floor]
    counted.sort(key=lambda row: (-weighted(row), row.created_at, row.id))
    seen: set[str] = set()
    ranked = []
    for row in counted:
        best = row.miner_hotkey not in seen
        ranked.append(Ranked(row, weighted(row), 1 + len(seen - {row.miner_hotkey}), best))
        seen.add(row.miner_hotkey)
    return ranked


def shares(ranked: Sequence[Ranked]) -> list[tuple[Ranked, float]]:
    """Return each hotkey's best submission among the top four with its share of the emission."""
    return list(zip((row for row in ranked if row.best), TOP_SHARES, strict=False))
