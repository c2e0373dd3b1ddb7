"""The ranking of a round: which submissions rank, their order, and their weights.

The order needs only some columns of a round's confirmed submissions; whole rows are read only for
the places that are shown.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from neurons.validator_api.database.tables import ACTIVE, Place, Round, Submission
from neurons.wire.protocol import HIGHEST_CLAIM, WIRE_VERSION
from neurons.wire.rules import EQUAL_WITHIN, TOP_SHARES, Ranking, exceeds, to_beat, weighted_score

CONFIRMED = (
    Submission.is_revealed.is_(True),
    Submission.validated_at.is_not(None),
    Submission.verification_passed.is_not(False),
    Submission.score > 0.0,
    Submission.tokens_per_sec <= HIGHEST_CLAIM,
)
"""Conditions of a confirmed claim: revealed, validated, not above HIGHEST_CLAIM, a positive score,
and no failed logit verification."""


@dataclass(frozen=True)
class Ranked:
    """A submission with its place in the ranking."""

    submission: Submission
    weighted_score: float
    rank: int  # 1 + the number of other hotkeys with a better submission
    weight: float  # share of the emission: only a hotkey's best submission gets one


class _Entry(NamedTuple):
    """A submission that ranks; entries compare by age, oldest first."""

    since: datetime  # when its code and claim were fixed
    id: int
    hotkey: str
    result: float
    counts_as: float  # the result that decides the order


def weighted(submission: Submission, ranking: Ranking) -> float:
    speed, length = submission.tokens_per_sec or 0.0, submission.target_sequence_length
    return weighted_score(speed, length, ranking, submission.score)


def is_confirmed(submission: Submission) -> bool:
    return (submission.score or 0.0) > 0.0 and submission.verification_passed is not False


def _ranks_and_weights(hotkeys: Iterable[str]) -> Iterator[tuple[int, float]]:
    """Yield the rank and weight of each submission, given their hotkeys, best first."""
    seen: set[str] = set()
    for hotkey in hotkeys:
        earns = hotkey not in seen and len(seen) < len(TOP_SHARES)
        weight = TOP_SHARES[len(seen)] if earns else 0.0
        yield 1 + len(seen) - (hotkey in seen), weight
        seen.add(hotkey)


def current(session: Session, row: Round, most: int | None = None) -> list[Ranked]:
    """Return the round's ranking by the current verdicts, best first, at most `most` places."""
    entries = _entries(session, row)
    shown = entries[:most]
    rows = session.scalars(select(Submission).where(Submission.id.in_([one.id for one in shown])))
    by_id = {submission.id: submission for submission in rows}
    numbers = _ranks_and_weights(one.hotkey for one in shown)
    return [
        Ranked(by_id[one.id], one.result, rank, weight)
        for one, (rank, weight) in zip(shown, numbers, strict=True)
    ]


def of_round(session: Session, row: Round, most: int | None = None) -> list[Ranked]:
    """Return the current ranking of an active round, or the frozen one of a completed round."""
    if row.status == ACTIVE:
        return current(session, row, most)
    frozen = session.execute(
        select(Place, Submission)
        .join(Submission, Place.submission_id == Submission.id)
        .where(Place.round_id == row.id)
        .order_by(Place.rank, Place.weight.desc(), Place.weighted_score.desc(), Submission.id)
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
        entries = _entries(session, row)
        numbers = _ranks_and_weights(one.hotkey for one in entries)
        ranks |= {one.id: rank for one, (rank, _) in zip(entries, numbers, strict=True)}
    return {number: ranks[number] for number in round_of if number in ranks}


def floor(session: Session, baseline: int | None, ranking: Ranking) -> float | None:
    """Return the result that a submission must beat to rank; None if every confirmed one ranks."""
    row = session.scalars(select(Submission).where(Submission.id == baseline, *CONFIRMED)).first()
    return None if row is None else weighted(row, ranking)


def floors(session: Session, row: Round) -> tuple[float | None, float | None, float | None]:
    """Return the results to beat in order to rank, to earn a share and to lead in an active round.

    None stands for a goal that every confirmed claim reaches.
    """
    best: dict[str, float] = {}  # what the best submission of each hotkey counts as, highest first
    for one in _entries(session, row):
        best.setdefault(one.hotkey, one.counts_as)
    results = [*best.values()][: len(TOP_SHARES)]
    least = floor(session, row.baseline_submission_id, row.ranking)
    to_earn = results[-1] if len(results) == len(TOP_SHARES) else least
    return least, to_earn, results[0] if results else least


def score_to_earn(session: Session, row: Round) -> float | None:
    """Return the weighted score that a later submission must exceed to earn a share, or None."""
    _, least, _ = floors(session, row)
    return None if least is None else to_beat(least, row.ranking)


def _entries(session: Session, row: Round) -> list[_Entry]:
    """Return the submissions that rank in the round, best first.

    With a baseline (by default an earlier winner), only those that beat it rank, unless the
    baseline's claim is no longer confirmed.
    """
    rule = row.ranking
    least = floor(session, row.baseline_submission_id, rule)
    columns = (
        *(Submission.id, Submission.miner_hotkey, Submission.created_at, Submission.revealed_at),
        *(Submission.tokens_per_sec, Submission.target_sequence_length, Submission.score),
        Submission.commitment_version,
    )
    entries = []
    for one in session.execute(select(*columns).where(Submission.round_id == row.id, *CONFIRMED)):
        length = one.target_sequence_length
        result = weighted_score(one.tokens_per_sec or 0.0, length, rule, one.score)
        # A commitment of version 1 does not bind the fork's git commit: until the reveal, its
        # sender can still choose another miner's code.
        unbound = rule == "verified" and (one.commitment_version or WIRE_VERSION) < WIRE_VERSION
        since = (unbound and one.revealed_at) or one.created_at
        if least is None or exceeds(result, least, rule):
            entries.append(_Entry(since, one.id, one.miner_hotkey, result, result))
    return _best_first(entries, rule)


def _best_first(entries: list[_Entry], ranking: Ranking) -> list[_Entry]:
    """Sort by result; one within EQUAL_WITHIN of older results counts as the lowest of them.

    It comes after them. Newer results are compared only with results that count as themselves, so
    small differences do not add up.
    """
    share = 1.0 - EQUAL_WITHIN[ranking]
    originals: list[float] = []  # ascending
    ordered = []
    for one in sorted(entries):  # oldest first
        place = bisect.bisect_left(originals, one.result * share)
        if place < len(originals) and originals[place] * share <= one.result:
            one = one._replace(counts_as=originals[place])
        else:
            originals.insert(place, one.result)
        ordered.append(one)
    return sorted(ordered, key=lambda one: -one.counts_as)
