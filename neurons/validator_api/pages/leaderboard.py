"""Data of the pages about rounds (leaderboard, one round, history); each query has a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from sqlalchemy import select

from neurons.validator_api.competition import ranking, rounds
from neurons.validator_api.competition.ranking import Ranked
from neurons.validator_api.competition.rounds import Transaction
from neurons.validator_api.database.tables import ACTIVE, IN_QUEUE, Round, Submission, count
from neurons.wire import rules

PLACES, LAST_PLACES, VERDICTS, ROUNDS = 100, 10, 20, 50
"""Limits of a page: places of a round, of the round before it, latest verdicts, rounds."""


@dataclass(frozen=True)
class RoundView:
    """A round and the number of its submissions."""

    row: Round
    remaining: str  # the time left as text, empty if the round is over
    submissions: int


@dataclass(frozen=True)
class RoundPage:
    """A round with its ranking; the leaderboard fills all fields."""

    round: RoundView | None
    places: Sequence[Ranked] = ()
    truncated: bool = False
    in_queue: int = 0
    scores_to_beat: Mapping[str, float] = field(default_factory=dict)  # by purpose
    verdicts: Sequence[tuple[Submission, int]] = ()  # the latest ones, with their round's number
    last: RoundPage | None = None  # the round before an active one


@dataclass(frozen=True)
class RoundsPage:
    """Rounds, newest first."""

    rounds: Sequence[RoundView]
    before: int | None  # the next page has the rounds with numbers below; None on the last page


def leaderboard(t: Transaction) -> RoundPage:
    """Return the newest round with the latest verdicts; if it is active, also the one before."""
    newest = select(Round).order_by(Round.round_number.desc()).limit(2)
    row, before = [*t.session.scalars(newest), None, None][:2]
    if row is None:
        return RoundPage(None)
    judged = t.session.execute(
        select(Submission, Round.round_number)
        .join(Round, Submission.round_id == Round.id)
        .where(Submission.validated_at.is_not(None), Submission.is_revealed.is_(True))
        .order_by(Submission.validated_at.desc(), Submission.id.desc())
        .limit(VERDICTS)
    )
    is_open = row.status == ACTIVE
    return replace(
        _round_page(t, row, PLACES),
        in_queue=count(t.session, *IN_QUEUE),
        scores_to_beat=_scores_to_beat(t, row),
        verdicts=[(one, number) for one, number in judged],
        last=_round_page(t, before, LAST_PLACES) if before and is_open else None,
    )


def one_round(t: Transaction, number: int) -> RoundPage | None:
    row = t.session.scalars(select(Round).where(Round.round_number == number)).first()
    return None if row is None else _round_page(t, row, PLACES)


def history(t: Transaction, before: int | None) -> RoundsPage:
    """Return the rounds with numbers below `before`, the newest first."""
    wanted = select(Round).order_by(Round.round_number.desc()).limit(ROUNDS + 1)
    if before is not None:
        wanted = wanted.where(Round.round_number < before)
    rows = t.session.scalars(wanted).all()
    shown = rows[:ROUNDS]
    following = shown[-1].round_number if len(rows) > ROUNDS else None
    return RoundsPage([_round(t, row) for row in shown], following)


def _round_page(t: Transaction, row: Round, most: int) -> RoundPage:
    ranked = ranking.of_round(t.session, row, most + 1)
    return RoundPage(_round(t, row), ranked[:most], len(ranked) > most)


def _scores_to_beat(t: Transaction, row: Round) -> dict[str, float]:
    """Return the scores to exceed, by purpose, in this round or, if it is over, in the next."""
    if row.status == ACTIVE:
        results = ranking.floors(t.session, row)
    else:
        results = (ranking.floor(t.session, rounds.baseline_after(row), row.ranking),) * 3
    shown: dict[str, float] = {}
    for purpose, result in zip(("to rank", "to earn a share", "to lead"), results, strict=True):
        if result is None or (needed := rules.to_beat(result, row.ranking)) in shown.values():
            continue
        shown[purpose] = needed
    return shown


def _round(t: Transaction, row: Round) -> RoundView:
    remaining = _duration(row.end_time - t.now) if row.status == ACTIVE else ""
    return RoundView(row, remaining, count(t.session, Submission.round_id == row.id))


def _duration(left: timedelta) -> str:
    minutes = max(0, int(left.total_seconds())) // 60
    if minutes < 1:
        return "less than a minute"
    days, hours = divmod(minutes // 60, 24)
    parts = ((days, "d"), (hours, "h"), (0 if days else minutes % 60, "min"))
    return " ".join(f"{value} {unit}" for value, unit in parts if value)
