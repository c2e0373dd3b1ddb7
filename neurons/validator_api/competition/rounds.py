"""Competition rounds: at most one is active; a completed round has fixed places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from neurons.runtime.observe import get_logger
from neurons.runtime.settings import Settings
from neurons.validator_api.competition import ranking
from neurons.validator_api.database.tables import (
    ACTIVE,
    COMPLETED,
    OPEN,
    Miner,
    Place,
    Round,
    Submission,
    count,
)
from neurons.wire import protocol, rules

log = get_logger("validator_api")


class Refusal(Exception):
    """The request breaks a rule of the competition; nothing was written."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Transaction:
    """A transaction of one request: the database, the time and the rules."""

    session: Session
    now: datetime  # naive UTC
    block: int
    settings: Settings
    # the chain's uid of each hotkey of the subnet; None if the server assigns them
    uids: Mapping[str, int] | None = None

    @property
    def oldest_block(self) -> int:
        """The earliest reveal block of commitments that have not expired."""
        return self.block - self.settings.reveal_window_blocks


def utc(unix: float) -> datetime:
    """Return Unix seconds as naive UTC, the form of times on the wire and in the database."""
    return datetime.fromtimestamp(unix, timezone.utc).replace(tzinfo=None)


def active(session: Session) -> Round | None:
    return session.scalars(
        select(Round).where(Round.status == ACTIVE).order_by(Round.round_number.desc())
    ).first()


def current(t: Transaction) -> Round:
    """Return the active round; open one if there is none."""
    row = active(t.session)
    return row if row is not None else _open(t, rules.ROUND_HOURS)


def is_overdue(t: Transaction) -> bool:
    end = t.session.scalars(select(Round.end_time).where(Round.status == ACTIVE)).first()
    return end is not None and end <= t.now


def end_overdue(t: Transaction) -> None:
    """If the active round's time is over, finalize it and open the next one.

    Every write does this first, so that it cannot change a round that is over.
    """
    if is_overdue(t):
        _open(t, rules.ROUND_HOURS)


def create(t: Transaction, request: protocol.CreateRoundRequest) -> Round:
    """End the active round, if any, and open the next one; refuse an unknown submission to beat."""
    baseline = request.baseline_submission_id
    if baseline is not None and t.session.get(Submission, baseline) is None:
        raise Refusal(404, "Submission not found")
    return _open(t, request.duration_hours, baseline)


def finalize(t: Transaction, row: Round) -> list[ranking.Ranked]:
    """Complete the round, name its winner and freeze its places; return its ranking."""
    ranked = ranking.current(t.session, row)
    if ranked:
        row.winner_submission_id = ranked[0].submission.id
        row.winner_hotkey = ranked[0].submission.miner_hotkey
    row.status = COMPLETED
    row.end_time = min(row.end_time, t.now)
    for place in ranked:
        t.session.add(
            Place(
                round_id=row.id,
                submission_id=place.submission.id,
                rank=place.rank,
                weighted_score=place.weighted_score,
                weight=place.weight,
                uid=uid_of(t, place.submission.miner_hotkey),
            )
        )
    t.session.flush()
    log.info("round finalized", round=row.round_number, winner=row.winner_hotkey)
    return ranked


def finalize_by_id(t: Transaction, round_id: int) -> dict[str, Any]:
    """Complete an active round, or raise a Refusal; return the content of the reply."""
    row = t.session.get(Round, round_id)
    if row is None:
        raise Refusal(404, "Round not found")
    if row.status != ACTIVE:
        raise Refusal(400, "Round already finalized")
    ranked = finalize(t, row)
    return {
        "status": row.status,
        "round_id": row.id,
        "winner": row.winner_hotkey,
        "rankings": [_ranking_row(place) for place in ranked if place.weight],
    }


def baseline_after(row: Round) -> int | None:
    """Return the submission to beat in the next round: this round's winner, else its baseline."""
    return row.winner_submission_id or row.baseline_submission_id


def weights(t: Transaction, round_id: int | None) -> protocol.Weights:
    """Return the weights of a round, by default of the last completed one."""
    if round_id is None:
        row = t.session.scalars(
            select(Round).where(Round.status == COMPLETED).order_by(Round.round_number.desc())
        ).first()
    else:
        row = t.session.get(Round, round_id)
    epoch = int(t.now.replace(tzinfo=timezone.utc).timestamp())
    if row is None:
        return protocol.Weights(epoch=epoch)
    places = t.session.scalars(select(Place).where(Place.round_id == row.id))
    frozen = {place.submission_id: place.uid for place in places}
    shown = []
    for place in ranking.of_round(t.session, row):
        hotkey, number = place.submission.miner_hotkey, place.submission.id
        uid = frozen[number] if number in frozen else uid_of(t, hotkey)
        if place.weight and uid is not None:
            shown.append(protocol.Weight(uid=uid, hotkey=hotkey, weight=place.weight))
    return protocol.Weights(epoch=epoch, weights=shown, ranking=row.ranking)


def uid_of(t: Transaction, hotkey: str) -> int | None:
    """Return the hotkey's uid: the chain's, or without a chain the one that the API assigned."""
    if t.uids is not None:
        return t.uids.get(hotkey)
    return t.session.get_one(Miner, hotkey).uid


def as_message(t: Transaction, row: Round) -> protocol.Round:
    """Return the round in the wire's form."""
    return protocol.Round(
        **row.facts(),
        time_remaining_seconds=max(0, int((row.end_time - t.now).total_seconds())),
        total_submissions=count(t.session, Submission.round_id == row.id),
        wire_version=protocol.WIRE_VERSION,
    )


def _open(t: Transaction, hours: int, baseline: int | None = None) -> Round:
    """Finalize the active round, if there is one, and open the next one.

    Expired commitments are withdrawn; the other open submissions move into the new round.
    """
    ending = active(t.session)
    if ending is not None:
        finalize(t, ending)
    last = t.session.scalars(select(Round).order_by(Round.round_number.desc())).first()
    if baseline is None and last is not None:
        baseline = baseline_after(last)
    row = Round(
        round_number=last.round_number + 1 if last else 1,
        start_time=t.now,
        end_time=t.now + timedelta(hours=hours),
        status=ACTIVE,
        baseline_submission_id=baseline,
        ranking=t.settings.ranking or (last.ranking if last else "verified"),
    )
    t.session.add(row)
    t.session.flush()
    still_open = update(Submission).where(*OPEN)
    expired = (Submission.is_revealed.is_(False), Submission.reveal_block < t.oldest_block)
    t.session.execute(still_open.where(*expired).values(withdrawn_at=t.now))
    t.session.execute(still_open.where(Submission.round_id != row.id).values(round_id=row.id))
    log.info("round opened", round=row.round_number, baseline=baseline, ranking=row.ranking)
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
