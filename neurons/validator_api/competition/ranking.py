"""The ranking of a round: which submissions rank, their order, and their weights.

The database selects and sorts, so that a page about thousands of submissions reads only the rows
that it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.orm import Session

from neurons.validator_api.database.tables import ACTIVE, Place, Round, Submission
from neurons.wire.protocol import HIGHEST_CLAIM
from neurons.wire.rules import LEAGUES, TOP_SHARES, weighted_score

CONFIRMED = (
    Submission.is_revealed.is_(True),
    Submission.validated_at.is_not(None),
    Submission.verification_passed.is_not(False),
    Submission.score > 0.0,
    Submission.tokens_per_sec <= HIGHEST_CLAIM,
)
"""Conditions of a confirmed claim: a positive score, and no failed logit verification."""

_SPEED = case((Submission.tokens_per_sec <= HIGHEST_CLAIM, Submission.tokens_per_sec), else_=0.0)
"""The speed, or 0 above the limit: PostgreSQL refuses products that overflow, in any row."""

WEIGHTED = _SPEED * case(
    *((Submission.target_sequence_length >= least, share) for least, _, share in LEAGUES[:0:-1]),
    else_=LEAGUES[0][2],
)
"""`rules.weighted_score` as an SQL expression."""

BEST_FIRST = (WEIGHTED.desc(), Submission.created_at, Submission.id)
"""The order of the ranking; the earlier submission wins a tie."""


@dataclass(frozen=True)
class Ranked:
    """A submission with its place in the ranking."""

    submission: Submission
    weighted_score: float
    rank: int  # 1 + the number of other hotkeys whose best submission is before this one
    weight: float  # share of the emission: only a hotkey's best submission gets one


def weighted(submission: Submission) -> float:
    """Return the claim in tokens/s times the league's multiplier."""
    return weighted_score(submission.tokens_per_sec or 0.0, submission.target_sequence_length)


def is_confirmed(submission: Submission) -> bool:
    """Return whether the verdict confirmed the claim."""
    return (submission.score or 0.0) > 0.0 and submission.verification_passed is not False


def _ranks_and_weights(hotkeys: Iterable[str]) -> Iterator[tuple[int, float]]:
    """Yield rank and weight for each of the `hotkeys`, those of the submissions, best first."""
    seen: set[str] = set()
    for hotkey in hotkeys:
        earns = hotkey not in seen and len(seen) < len(TOP_SHARES)
        weight = TOP_SHARES[len(seen)] if earns else 0.0
        yield 1 + len(seen) - (hotkey in seen), weight
        seen.add(hotkey)


def current(session: Session, row: Round, most: int | None = None) -> list[Ranked]:
    """Return the round's ranking by the current verdicts, best first, at most `most` places."""
    rows = session.scalars(
        select(Submission).where(*_conditions(session, row)).order_by(*BEST_FIRST).limit(most)
    ).all()
    numbers = _ranks_and_weights(submission.miner_hotkey for submission in rows)
    return [
        Ranked(submission, weighted(submission), rank, weight)
        for submission, (rank, weight) in zip(rows, numbers, strict=True)
    ]


def of_round(session: Session, row: Round, most: int | None = None) -> list[Ranked]:
    """Return the current ranking of an active round, or the frozen one of a completed round."""
    if row.status == ACTIVE:
        return current(session, row, most)
    frozen = session.execute(
        select(Place, Submission)
        .join(Submission, Place.submission_id == Submission.id)
        .where(Place.round_id == row.id)
        .order_by(Place.weighted_score.desc(), Submission.created_at, Submission.id)
        .limit(most)
    )
    return [
        Ranked(submission, place.weighted_score, place.rank, place.weight)
        for place, submission in frozen
    ]


def ranks_of(session: Session, rows: Iterable[Submission]) -> dict[int, int]:
    """Return the rank of each ranked submission of `rows` in its round, by submission id."""
    round_of = {row.id: row.round_id for row in rows}
    frozen = select(Place.submission_id, Place.rank).where(
        Place.round_id.in_(set(round_of.values())), Place.submission_id.in_(round_of)
    )
    ranks = {place.submission_id: place.rank for place in session.execute(frozen)}
    active = select(Round).where(Round.status == ACTIVE, Round.id.in_(set(round_of.values())))
    row = session.scalars(active).first()
    if row is not None:
        ranked = session.execute(
            select(Submission.id, Submission.miner_hotkey)
            .where(*_conditions(session, row))
            .order_by(*BEST_FIRST)
        ).all()
        numbers = _ranks_and_weights(hotkey for _, hotkey in ranked)
        ranks |= {number: rank for (number, _), (rank, _) in zip(ranked, numbers, strict=True)}
    return {number: ranks[number] for number in round_of if number in ranks}


def floor(session: Session, baseline: int | None) -> float | None:
    """Return the weighted score above which a claim ranks, or None if every confirmed one ranks."""
    return session.scalars(select(WEIGHTED).where(Submission.id == baseline, *CONFIRMED)).first()


def best_scores(session: Session, row: Round, most: int) -> list[float]:
    """Return the best weighted score of each of the first `most` hotkeys, best first."""
    best = func.max(WEIGHTED)
    of_hotkeys = select(best).where(*_conditions(session, row)).group_by(Submission.miner_hotkey)
    return list(session.scalars(of_hotkeys.order_by(best.desc()).limit(most)))


def _conditions(session: Session, row: Round) -> list[ColumnElement[bool]]:
    """Return the conditions under which a submission of the round ranks.

    With a baseline (by default an earlier winner), only higher weighted scores rank, unless the
    baseline's claim is no longer confirmed.
    """
    least = floor(session, row.baseline_submission_id)
    of_round = [Submission.round_id == row.id, *CONFIRMED]
    return of_round if least is None else [*of_round, least < WEIGHTED]
