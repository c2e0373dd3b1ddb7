"""Competition rounds: one is active, a round that ends names its winner, and weights follow."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from fastapi import HTTPException
from sqlalchemy import select
from sqlalchemy.orm import Session

from neurons import protocol, rules
from neurons.observe import get_logger
from neurons.validator_api import ranking
from neurons.validator_api.storage import Miner, Round, Submission, count

log = get_logger("validator_api")

ACTIVE = "active"
COMPLETED = "completed"


def current(session: Session, now: datetime) -> Round:
    """Return the active round; a round past its end is finalized and the next one opened."""
    row = _active(session)
    if row is not None and row.end_time > now:
        return row
    return _open(session, now, rules.ROUND_HOURS)


def create(session: Session, request: protocol.CreateRoundRequest, now: datetime) -> Round:
    """End the active round, if any, and open the next one."""
    baseline = request.baseline_submission_id
    if baseline is not None and session.get(Submission, baseline) is None:
        raise HTTPException(404, "Submission not found")
    return _open(session, now, request.duration_hours, baseline)


def finalize(session: Session, row: Round) -> list[ranking.Ranked]:
    """Complete the round and name its winner; return its ranking."""
    ranked = ranked_in(session, row)
    if ranked:
        row.winner_submission_id = ranked[0].submission.id
        row.winner_hotkey = ranked[0].submission.miner_hotkey
    row.status = COMPLETED
    session.flush()
    log.info("round finalized", round=row.round_number, winner=row.winner_hotkey)
    return ranked


def finalize_by_id(session: Session, round_id: int) -> dict[str, Any]:
    """Complete one round on a validator's word; return the wire's answer."""
    row = session.get(Round, round_id)
    if row is None:
        raise HTTPException(404, "Round not found")
    if row.status != ACTIVE:
        raise HTTPException(400, "Round already finalized")
    ranked = finalize(session, row)
    return {
        "status": row.status,
        "round_id": row.id,
        "winner": row.winner_hotkey,
        "rankings": [_ranking_row(place) for place, _ in ranking.shares(ranked)],
    }


def ranked_in(session: Session, row: Round) -> list[ranking.Ranked]:
    """Return the round's ranking as it stands now."""
    submissions = session.scalars(
        select(Submission).where(
            Submission.round_id == row.id, Submission.validated_at.is_not(None)
        )
    )
    baseline_id = row.baseline_submission_id
    baseline = session.get(Submission, baseline_id) if baseline_id is not None else None
    return ranking.rank(submissions, baseline)


def weights(session: Session, round_id: int | None) -> list[protocol.Weight]:
    """Return the shares of a round, by default of the last completed one."""
    if round_id is None:
        row = session.scalars(
            select(Round).where(Round.status == COMPLETED).order_by(Round.round_number.desc())
        ).first()
    else:
        row = session.get(Round, round_id)
    if row is None:
        return []
    return [
        protocol.Weight(
            uid=session.get_one(Miner, place.submission.miner_hotkey).uid,
            hotkey=place.submission.miner_hotkey,
            weight=share,
        )
        for place, share in ranking.shares(ranked_in(session, row))
    ]


def as_message(session: Session, row: Round, now: datetime) -> protocol.Round:
    """Return the round as the wire shows it."""
    return protocol.Round(
        **row.facts(),
        time_remaining_seconds=max(0, int((row.end_time - now).total_seconds())),
        total_submissions=count(session, Submission.round_id == row.id),
    )


def _active(session: Session) -> Round | None:
    return session.scalars(
        select(Round).where(Round.status == ACTIVE).order_by(Round.round_number.desc())
    ).first()


def _open(session: Session, now: datetime, hours: int, baseline: int | None = None) -> Round:
    """Open the next round once the active one, if any, is finalized."""
    active = _active(session)
    if active is not None:
        finalize(session, active)
    last = session.scalars(select(Round).order_by(Round.round_number.desc())).first()
    if baseline is None and last is not None:  # to beat: the last winner, or what that one had to
        baseline = last.winner_submission_id or last.baseline_submission_id
    row = Round(
        round_number=last.round_number + 1 if last else 1,
        start_time=now,
        end_time=now + timedelta(hours=hours),
        status=ACTIVE,
        baseline_submission_id=baseline,
    )
    session.add(row)
    session.flush()
    log.info("round opened", round=row.round_number, baseline=row.baseline_submission_id)
    return row


def _ranking_row(place: ranking.Ranked) -> dict[str, Any]:
    row = place.submission
    league, multiplier = rules.league_of(row.target_sequence_length)
    return {
        "rank": place.rank,
        "submission_id": row.id,
        "miner_hotkey": row.miner_hotkey,
        "tokens_per_sec": row.tokens_per_sec,
        "target_sequence_length": row.target_sequence_length,
        "league": league,
        "multiplier": multiplier,
        "weighted_score": place.weighted_score,
        "score": row.score,
        "created_at": row.created_at.isoformat(),
    }
