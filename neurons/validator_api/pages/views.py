"""What the pages show, taken from the database in queries that are bounded.

A page is rendered from these alone. Of a commitment that is not revealed they hold what
/pending_reveals tells, and nothing of the fork, the claim or the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from urllib.parse import urlsplit

from sqlalchemy import select
from sqlalchemy.orm import Session

from neurons.validator_api.competition import rounds
from neurons.validator_api.competition.rounds import RequestContext
from neurons.validator_api.database.tables import IN_QUEUE, LeagueEntry, Round, Submission, count
from neurons.wire import rules

PLACES, LAST_PLACES, VERDICTS, ROUNDS, MODELS = 100, 10, 20, 50, 3
"""The most places of a round and of the last one, latest verdicts, rounds and models of a hotkey
that one page shows."""

Speeds = Sequence[tuple[int, float]]
"""Length in tokens and tokens per second, the shortest first."""


@dataclass(frozen=True)
class RoundView:
    """A round. `remaining` is empty where it is over."""

    number: int
    start: datetime
    end: datetime
    remaining: str
    submissions: int
    winner: str | None
    winner_submission: int | None


@dataclass(frozen=True)
class PlaceView:
    """A row of a ranking."""

    rank: int
    submission: int
    hotkey: str
    league: str
    target: int
    claim: float
    score: float
    share: float


@dataclass(frozen=True)
class BarView:
    """A weighted score that a new claim must exceed, and what for: to rank, earn or lead."""

    purpose: str
    score: float


@dataclass(frozen=True)
class VerdictView:
    """One of the latest verdicts."""

    submission: int
    round_number: int
    hotkey: str
    league: str
    confirmed: bool
    at: datetime


@dataclass(frozen=True)
class RoundPage:
    """A round with its ranking. The leaderboard adds the queue, the scores to beat, the latest
    verdicts and, while a round is active, the one before it."""

    round: RoundView | None
    places: Sequence[PlaceView] = ()
    more: bool = False
    in_queue: int = 0
    bars: Sequence[BarView] = ()
    verdicts: Sequence[VerdictView] = ()
    last: RoundPage | None = None


@dataclass(frozen=True)
class RoundsPage:
    """The history, the newest first; `before` is where the next page begins."""

    rounds: Sequence[RoundView]
    before: int | None


@dataclass(frozen=True)
class ClaimView:
    """What a submission says since its reveal, and what came of it."""

    fork_url: str
    link: str | None
    commit_hash: str
    models: Sequence[str]
    league: str
    multiplier: float
    target: int
    claim: float
    weighted: float
    rank: int | None
    ratio: float | None
    reason: str | None
    logits: str | None
    validator: str | None
    device: str | None
    judged: datetime | None
    timed: Speeds
    measured: Speeds


@dataclass(frozen=True)
class SubmissionPage:
    """A submission. `claim` is missing until the reveal."""

    id: int
    hotkey: str
    created: datetime
    round_number: int
    state: str
    open: bool
    commitment: str | None
    reveal_block: int | None
    blocks_left: int
    claim: ClaimView | None


def leaderboard(session: Session, context: RequestContext) -> RoundPage:
    """Return the newest round with the latest verdicts, and the round before it while it runs."""
    newest = select(Round).order_by(Round.round_number.desc()).limit(2)
    row, before = [*session.scalars(newest), None, None][:2]
    if row is None:
        return RoundPage(None)
    judged = session.execute(
        select(Submission, Round.round_number)
        .join(Round, Submission.round_id == Round.id)
        .where(Submission.validated_at.is_not(None), Submission.is_revealed.is_(True))
        .order_by(Submission.validated_at.desc(), Submission.id.desc())
        .limit(VERDICTS)
    )
    is_open = row.status == rounds.ACTIVE
    page = _round_page(session, row, context)
    return replace(
        page,
        in_queue=count(session, *IN_QUEUE),
        bars=_bars(session, row),
        verdicts=[_verdict(one, number) for one, number in judged],
        last=_round_page(session, before, context, LAST_PLACES) if before and is_open else None,
    )


def one_round(session: Session, context: RequestContext, number: int) -> RoundPage | None:
    """Return the round of this number, None where there is none."""
    row = session.scalars(select(Round).where(Round.round_number == number)).first()
    return None if row is None else _round_page(session, row, context)


def history(session: Session, context: RequestContext, before: int | None) -> RoundsPage:
    """Return the rounds with numbers below `before`, the newest first."""
    wanted = select(Round).order_by(Round.round_number.desc()).limit(ROUNDS + 1)
    if before is not None:
        wanted = wanted.where(Round.round_number < before)
    found = session.scalars(wanted).all()
    shown = found[:ROUNDS]
    following = shown[-1].round_number if len(found) > ROUNDS else None
    return RoundsPage([_round(session, row, context) for row in shown], following)


def submission(session: Session, context: RequestContext, number: int) -> SubmissionPage | None:
    """Return the submission of this number, None where there is none."""
    row = session.get(Submission, number)
    if row is None:
        return None
    hidden = not row.is_revealed
    return SubmissionPage(
        id=row.id,
        hotkey=row.miner_hotkey,
        created=row.created_at,
        round_number=session.get_one(Round, row.round_id).round_number,
        state=_state(row, context),
        open=row.validated_at is None and row.withdrawn_at is None,
        commitment=f"{row.commitment_hash:.16}..." if row.commitment_hash else None,
        reveal_block=row.reveal_block,
        blocks_left=max(0, (row.reveal_block or 0) - context.block),
        claim=None if hidden else _claim(session, row),
    )


def _round_page(
    session: Session, row: Round, context: RequestContext, most: int = PLACES
) -> RoundPage:
    ranked = rounds.ranked_in(session, row, most + 1)
    places = [
        PlaceView(
            rank=place.rank,
            submission=place.submission.id,
            hotkey=place.submission.miner_hotkey,
            league=_league(place.submission),
            target=place.submission.target_sequence_length,
            claim=place.submission.tokens_per_sec or 0.0,
            score=place.weighted_score,
            share=place.weight,
        )
        for place in ranked[:most]
    ]
    return RoundPage(_round(session, row, context), places, len(ranked) > most)


def _bars(session: Session, row: Round) -> list[BarView]:
    """Return what a new claim must beat, now or in the round after one that has ended.

    A score that is needed for several purposes is named for the first of them alone.
    """
    if row.status == rounds.ACTIVE:
        least = rounds.floor(session, row.baseline_submission_id)
        best = rounds.best_scores(session, row, len(rules.TOP_SHARES))
    else:
        least, best = rounds.floor(session, rounds.baseline_after(row)), []
    full = len(best) == len(rules.TOP_SHARES)
    bars = (
        ("to rank", least),
        ("to earn a share", best[-1] if full else least),
        ("to lead", best[0] if best else least),
    )
    found: dict[float, BarView] = {}
    for purpose, score in bars:
        if score is not None:
            found.setdefault(score, BarView(purpose, score))
    return list(found.values())


def _round(session: Session, row: Round, context: RequestContext) -> RoundView:
    is_open = row.status == rounds.ACTIVE
    return RoundView(
        number=row.round_number,
        start=row.start_time,
        end=row.end_time,
        remaining=_duration(row.end_time - context.now) if is_open else "",
        submissions=count(session, Submission.round_id == row.id),
        winner=row.winner_hotkey,
        winner_submission=row.winner_submission_id,
    )


def _verdict(row: Submission, round_number: int) -> VerdictView:
    assert row.validated_at is not None  # noqa: S101 — only such rows were asked for
    return VerdictView(
        submission=row.id,
        round_number=round_number,
        hotkey=row.miner_hotkey,
        league=_league(row),
        confirmed=_is_confirmed(row),
        at=row.validated_at,
    )


def _claim(session: Session, row: Submission) -> ClaimView:
    speed, target = row.tokens_per_sec or 0.0, row.target_sequence_length
    league, multiplier = rules.league_of(target)
    entries = (
        select(LeagueEntry.model_name)
        .where(LeagueEntry.hotkey == row.miner_hotkey)
        .group_by(LeagueEntry.model_name)
        .order_by(LeagueEntry.model_name)
        .limit(MODELS)
    )
    return ClaimView(
        fork_url=row.fork_url or "",
        link=_web_address(row.fork_url or ""),
        commit_hash=row.commit_hash or "",
        models=session.scalars(entries).all(),
        league=league,
        multiplier=multiplier,
        target=target,
        claim=speed,
        weighted=rules.weighted_score(speed, target),
        rank=rounds.ranks_of(session, [row]).get(row.id),
        ratio=row.score,
        reason=row.verdict_reason,
        logits=_logits(row),
        validator=row.validator_hotkey,
        device=row.validator_device,
        judged=row.validated_at,
        # Miners repeat the claim among their benchmarks, where it would pass for a measurement.
        timed=[point for point in _speeds(row.benchmarks or {}) if point != (target, speed)],
        measured=_speeds(row.measured or {}),
    )


def _state(row: Submission, context: RequestContext) -> str:
    if row.validated_at is not None:
        return "confirmed" if _is_confirmed(row) else "rejected"
    if row.withdrawn_at is not None:
        return "replaced by a newer one, or expired"
    if row.is_revealed:
        return "waiting for a validator"
    if (row.reveal_block or 0) < context.oldest_block:
        return "expired"
    return "committed, hidden until its reveal"


def _is_confirmed(row: Submission) -> bool:
    return (row.score or 0.0) > 0.0 and row.verification_passed is not False


def _logits(row: Submission) -> str | None:
    if row.verification_passed is None:
        return None
    said = "agree with the reference model" if row.verification_passed else "verification failed"
    return f"{said}: {row.verification_reason}" if row.verification_reason else said


def _league(row: Submission) -> str:
    return rules.league_of(row.target_sequence_length)[0]


def _speeds(figures: Mapping[str, Mapping[str, float]]) -> Speeds:
    found = {int(length): row.get("tokens_per_sec", 0.0) for length, row in figures.items()}
    return sorted((length, speed) for length, speed in found.items() if speed > 0)


def _web_address(url: str) -> str | None:
    """Return the address where a browser may safely be sent, None for any other text."""
    try:
        parts = urlsplit(url)
        safe = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in url
    except ValueError:
        return None
    return url if safe else None


def _duration(left: timedelta) -> str:
    minutes = max(0, int(left.total_seconds())) // 60
    if minutes < 1:
        return "less than a minute"
    days, hours = divmod(minutes // 60, 24)
    parts = ((days, "d"), (hours, "h"), (0 if days else minutes % 60, "min"))
    return " ".join(f"{value} {unit}" for value, unit in parts if value)
