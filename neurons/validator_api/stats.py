"""What anyone may see of the submissions: the queue, the best, and the counters."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from neurons import protocol
from neurons.validator_api import ranking, rounds
from neurons.validator_api.storage import Round, Submission


def submission_stats(
    session: Session, limit: int, with_addresses: bool
) -> protocol.SubmissionStats:
    """Return the validators' queue and the leading and latest verdicts.

    Args:
        limit: the most rows in each list.
        with_addresses: whether the queue shows where a submission came from (validators only).
    """
    queue = session.scalars(
        select(Submission)
        # A commitment is nobody's to judge: it joins the queue with its reveal.
        .where(Submission.is_revealed, Submission.validated_at.is_(None))
        .order_by(Submission.created_at.desc(), Submission.id.desc())
        .limit(limit)
    ).all()
    total = session.scalar(select(func.count()).select_from(Submission)) or 0
    return protocol.SubmissionStats(
        total_submissions=total,
        recent_submissions=[_queued(row, with_addresses) for row in queue],
        stats={**_speeds(queue), "total_submissions": total},
        top_performers=_performers(session, limit),
    )


def verification_stats(session: Session, round_id: int | None) -> dict[str, Any]:
    """Return counters and means of the logit verifications, of one round or of all."""
    revealed = select(Submission).where(Submission.is_revealed)
    if round_id is not None:
        revealed = revealed.where(Submission.round_id == round_id)
    rows = revealed.subquery()

    def count(passed: bool | None) -> int:
        wanted = rows.c.verification_passed.is_(passed)
        return session.scalar(select(func.count()).select_from(rows).where(wanted)) or 0

    passed, failed, pending = count(True), count(False), count(None)
    cosine, difference = session.execute(
        select(func.avg(rows.c.cosine_similarity), func.avg(rows.c.max_abs_diff))
    ).one()
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
    recent = (
        session.scalar(
            select(func.count()).select_from(Submission).where(Submission.created_at >= since)
        )
        or 0
    )
    return {
        "submissions_per_minute": round(recent / window_minutes, 2),
        "recent_submissions": recent,
        "window_minutes": window_minutes,
    }


def _queued(row: Submission, with_address: bool) -> protocol.QueuedSubmission:
    return protocol.QueuedSubmission(
        id=row.id,
        miner_hotkey=row.miner_hotkey,
        fork_url=row.fork_url,
        commit_hash=row.commit_hash,
        repo_hash=row.repo_hash,
        target_sequence_length=row.target_sequence_length,
        tokens_per_sec=row.tokens_per_sec,
        vram_mb=row.vram_mb,
        benchmarks=row.benchmarks,
        validated=row.validated_at is not None,
        is_revealed=row.is_revealed,
        ip_address=row.ip_address if with_address else None,
        created_at=row.created_at.isoformat(),
    )


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
    ids = {row.round_id for row in latest} | ({newest.id} if newest else set())
    ranked = {
        row.id: rounds.ranked_in(session, row)
        for row in session.scalars(select(Round).where(Round.id.in_(ids)))
    }
    ranks = {place.submission.id: place.rank for places in ranked.values() for place in places}
    leading = [place.submission for place in ranked[newest.id]] if newest else []
    chosen = {row.id: row for row in [*leading[: limit // 2], *latest]}
    return [_performer(row, ranks.get(row.id)) for row in list(chosen.values())[:limit]]


def _performer(row: Submission, rank: int | None) -> protocol.Performer:
    return protocol.Performer(
        id=row.id,
        miner_hotkey=row.miner_hotkey,
        tokens_per_sec=row.tokens_per_sec or 0.0,
        target_sequence_length=row.target_sequence_length,
        created_at=row.created_at.isoformat(),
        validated=row.validated_at is not None,
        rank=rank,
        score=row.score,
        weighted_score=ranking.weighted(row),
    )
