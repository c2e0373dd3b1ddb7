"""The ranking: which submissions count, in what order, and what they earn.

The database chooses and sorts, so that a page of a round with thousands of submissions reads no
more of them than it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sqlalchemy import case

from neurons.validator_api.database.tables import Submission
from neurons.wire.protocol import HIGHEST_CLAIM
from neurons.wire.rules import LEAGUES, TOP_SHARES, weighted_score

COUNTS = (
    Submission.is_revealed.is_(True),
    Submission.validated_at.is_not(None),
    Submission.verification_passed.is_not(False),
    Submission.score > 0.0,
    Submission.tokens_per_sec <= HIGHEST_CLAIM,
)
"""A validator confirmed the claim, and nothing speaks against it."""

_SPEED = case((Submission.tokens_per_sec <= HIGHEST_CLAIM, Submission.tokens_per_sec), else_=0.0)
"""PostgreSQL refuses a product that overflows, also of a row that does not count."""

WEIGHTED = _SPEED * case(
    *((Submission.target_sequence_length >= least, share) for least, _, share in LEAGUES[:0:-1]),
    else_=LEAGUES[0][2],
)
"""`rules.weighted_score` of a row, for the database."""

BEST_FIRST = (WEIGHTED.desc(), Submission.created_at, Submission.id)
"""The order of the ranking; the earlier one wins a tie."""


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


def places(hotkeys: Iterable[str]) -> Iterator[tuple[int, float]]:
    """Yield rank and weight of each submission that counts.

    Args:
        hotkeys: whose they are, the best submission first.
    """
    seen: set[str] = set()
    for hotkey in hotkeys:
        earns = hotkey not in seen and len(seen) < len(TOP_SHARES)
        weight = TOP_SHARES[len(seen)] if earns else 0.0
        yield 1 + len(seen) - (hotkey in seen), weight
        seen.add(hotkey)
