"""What anyone may see of the submissions: the newest, the best, and the counters."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select, true
from sqlalchemy.orm import Session

from neurons.validator_api.competition import ranking, rounds, waiting
from neurons.validator_api.database.tables import Round, Submission, count
from neurons.wire import protocol


def submission_stats(session: Session, limit: int) -> protocol.SubmissionStats:
    """Return the newest submissions that nobody has judged, and the leading and latest verdicts.

    Args:
        limit: the most rows in each list.
    """
    newest = session.scalars(
        select(Submission)
        .where(*waiting.IN_QUEUE)
        .order_by(Submission.created_at.desc(), Submission.id.desc())
        .limit(limit)
    ).all()
    total = count(session)
    return protocol.SubmissionStats(
        total_submissions=total,
        recent_submissions=[waiting.queued(row) for row in newest],
        stats={**_speeds(newest), "total_submissions": total},
        top_performers=_performers(session, limit),
    )


def verification_stats(session: Session, round_id: int | None) -> dict[str, Any]:
    """Return counters and means of the logit verifications, of one round or of all."""
    of_round = true() if round_id is None else Submission.round_id == round_id
    where = (Submission.is_revealed, of_round)
    passed, failed, pending = (
        count(session, *where, Submission.verification_passed.is_(one))
        for one in (True, False, None)
    )
    means = func.avg(Submission.cosine_similarity), func.avg(Submission.max_abs_diff)
    cosine, difference = session.execute(select(*means).where(*where)).one()
    return {
        "total_submissions": passed + failed + pending,
        "verified_passed": passed,
        "verified_failed": failed,
        "pending_verification": pending,
        "pass_rate": passed / (passed + failed) if passed + failed else None,
        "avg_cosine_similarity": cosine,
        "avg_max_abs_diff": difference,
    }


def submission_rate(session: Session, window_minutes: int, now: datetime) -> dict[str, Any]:
    """Return how many submissions came in during the last minutes."""
    since = now - timedelta(minutes=window_minutes)
    recent = count(session, Submission.created_at >= since)
    return {
        "submissions_per_minute": round(recent / window_minutes, 2),
        "recent_submissions": recent,
        "window_minutes": window_minutes,
    }


def _speeds(rows: Sequence[Submission]) -> dict[str, float]:
    speeds = [row.tokens_per_sec or 0.0 for row in rows] or [0.0]
    return {
        "avg_tokens_per_sec": round(sum(speeds) / len(speeds), 2),
        "max_tokens_per_sec": round(max(speeds), 2),
        "min_tokens_per_sec": round(min(speeds), 2),
    }


def _performers(session: Session, limit: int) -> list[protocol.Performer]:
    """Return the newest round's ranking, then the latest verdicts of any round.

    Each row carries its rank in its own round, so that a miner finds its verdict here also when
    it ranks low, scored 0, or the round has ended since.
    """
    newest = session.scalars(select(Round).order_by(Round.round_number.desc())).first()
    latest = session.scalars(
        select(Submission)
        .where(Submission.validated_at.is_not(None))
        .order_by(Submission.validated_at.desc(), Submission.id.desc())
        .limit(limit)
    ).all()
    leaders = rounds.ranked_in(session, newest, limit // 2) if newest else []
    leading = [place.submission for place in leaders]
    chosen = {row.id: row for row in [*leading, *latest]}
    shown = list(chosen.values())[:limit]
    ranks = rounds.ranks_of(session, shown)
    return [_performer(row, ranks.get(row.id)) for row in shown]


def _performer(row: Submission, rank: int | None) -> protocol.Performer:
    found = {
        "tokens_per_sec": row.tokens_per_sec or 0.0,
        "validated": row.validated_at is not None,
        "rank": rank,
        "weighted_score": ranking.weighted(row),
    }
    return protocol.Performer(**row.facts() | found)
