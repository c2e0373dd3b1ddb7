"""The lists and counters of submissions that the API shows: queue, reveals, statistics."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from statistics import median
from typing import Any

from sqlalchemy import func, select, true

from neurons.validator_api.competition import ranking, rounds
from neurons.validator_api.competition.rounds import Refusal, Transaction
from neurons.validator_api.competition.submissions import NOT_FOUND
from neurons.validator_api.database.tables import IN_QUEUE, OPEN, Round, Submission, count
from neurons.wire import protocol

PACE = 20
"""Number of the last verdicts from which a wait is estimated."""


def validation_queue(t: Transaction, after: int, limit: int) -> protocol.ValidationQueue:
    """Return a page of the validators' queue, oldest first, from the row after `after`."""
    rows = t.session.scalars(
        select(Submission)
        .where(*IN_QUEUE, Submission.id > after)
        .order_by(Submission.id)
        .limit(limit + 1)
    ).all()
    page = rows[:limit]
    is_last = len(rows) <= limit
    active = rounds.active(t.session) if is_last else None
    return protocol.ValidationQueue(
        submissions=[queued(row, with_client=True) for row in page],
        next_after=None if is_last else page[-1].id,
        score_to_earn=active and ranking.score_to_earn(t.session, active),
    )


def queued(row: Submission, *, with_client: bool = False) -> protocol.QueuedSubmission:
    """Return the row as a message; only validators see its client."""
    shown = row.facts() | {"validated": row.validated_at is not None}
    if not with_client:
        shown["ip_address"] = None
    return protocol.QueuedSubmission(**shown)


def queue_place(t: Transaction, submission_id: int) -> protocol.QueuePlace:
    """Return a submission's place in the queue; raise a Refusal if there is no such submission.

    The wait is the place times the median time between two of the last verdicts. Validators do not
    keep to the order of age, so both are estimates.
    """
    row = t.session.get(Submission, submission_id)
    if row is None:
        raise Refusal(404, NOT_FOUND)
    waiting = count(t.session, *IN_QUEUE)
    if not row.is_revealed or row.validated_at is not None or row.withdrawn_at is not None:
        return protocol.QueuePlace(place=None, queued=waiting)
    place = count(t.session, *IN_QUEUE, Submission.id <= row.id)
    judged = t.session.scalars(
        select(Submission.validated_at)
        .where(Submission.validated_at.is_not(None))
        .order_by(Submission.validated_at.desc())
        .limit(PACE + 1)
    ).all()
    gaps = [(late - early).total_seconds() for late, early in pairwise(judged) if late and early]
    seconds = place * median(gaps) if gaps else None
    return protocol.QueuePlace(place=place, queued=waiting, estimated_seconds=seconds)


def pending_reveals(
    t: Transaction, hotkey: str | None, before: int | None, limit: int
) -> protocol.PendingReveals:
    """Return the commitments that can still be revealed, newest first.

    `hotkey` and `before` limit them to those of one hotkey, and to those before a row.
    """
    wanted = select(Submission).where(
        Submission.is_revealed.is_(False), *OPEN, Submission.reveal_block >= t.oldest_block
    )
    if hotkey is not None:
        wanted = wanted.where(Submission.miner_hotkey == hotkey)
    if before is not None:
        wanted = wanted.where(Submission.id < before)
    rows = t.session.scalars(wanted.order_by(Submission.id.desc()).limit(limit))
    return protocol.PendingReveals(
        current_block=t.block,
        pending_reveals=[
            protocol.PendingReveal(
                submission_id=row.id,
                miner_hotkey=row.miner_hotkey,
                commitment_hash=f"{row.commitment_hash or '':.16}...",
                reveal_block=row.reveal_block or 0,
                blocks_remaining=max(0, (row.reveal_block or 0) - t.block),
                can_reveal=(row.reveal_block or 0) <= t.block,
                created_at=row.created_at.isoformat(),
            )
            for row in rows
        ],
    )


def submission_stats(t: Transaction, limit: int) -> protocol.SubmissionStats:
    """Return the newest submissions of the queue, and the leading and latest verdicts."""
    newest = t.session.scalars(
        select(Submission)
        .where(*IN_QUEUE)
        .order_by(Submission.created_at.desc(), Submission.id.desc())
        .limit(limit)
    ).all()
    total = count(t.session)
    speeds = [row.tokens_per_sec or 0.0 for row in newest] or [0.0]
    return protocol.SubmissionStats(
        total_submissions=total,
        recent_submissions=[queued(row) for row in newest],
        stats={
            "avg_tokens_per_sec": round(sum(speeds) / len(speeds), 2),
            "max_tokens_per_sec": round(max(speeds), 2),
            "min_tokens_per_sec": round(min(speeds), 2),
            "total_submissions": total,
        },
        top_performers=_performers(t, limit),
    )


def verification_stats(t: Transaction, round_id: int | None) -> dict[str, Any]:
    """Return counters and means of the logit verifications, of one round or of all."""
    of_round = true() if round_id is None else Submission.round_id == round_id
    where = (Submission.is_revealed, of_round)
    passed, failed, pending = (
        count(t.session, *where, Submission.verification_passed.is_(one))
        for one in (True, False, None)
    )
    means = func.avg(Submission.cosine_similarity), func.avg(Submission.max_abs_diff)
    cosine, difference = t.session.execute(select(*means).where(*where)).one()
    return {
        "total_submissions": passed + failed + pending,
        "verified_passed": passed,
        "verified_failed": failed,
        "pending_verification": pending,
        "pass_rate": passed / (passed + failed) if passed + failed else None,
        "avg_cosine_similarity": cosine,
        "avg_max_abs_diff": difference,
    }


def submission_rate(t: Transaction, window_minutes: int) -> dict[str, Any]:
    """Return the number of submissions in the last `window_minutes`, and their rate per minute."""
    since = t.now - timedelta(minutes=window_minutes)
    recent = count(t.session, Submission.created_at >= since)
    return {
        "submissions_per_minute": round(recent / window_minutes, 2),
        "recent_submissions": recent,
        "window_minutes": window_minutes,
    }


def _performers(t: Transaction, limit: int) -> list[protocol.Performer]:
    """Return the first places of the newest round, then the latest verdicts of any round.

    Each row has the rank of its own round. Miners thus also find low, failed and old verdicts.
    """
    newest = t.session.scalars(select(Round).order_by(Round.round_number.desc())).first()
    latest = t.session.scalars(
        select(Submission)
        .where(Submission.validated_at.is_not(None))
        .order_by(Submission.validated_at.desc(), Submission.id.desc())
        .limit(limit)
    ).all()
    leaders = ranking.of_round(t.session, newest, limit // 2) if newest else []
    leading = [place.submission for place in leaders]
    chosen = {row.id: row for row in [*leading, *latest]}
    shown = list(chosen.values())[:limit]
    ranks = ranking.ranks_of(t.session, shown)
    return [_performer(t, row, ranks.get(row.id)) for row in shown]


def _performer(t: Transaction, row: Submission, rank: int | None) -> protocol.Performer:
    figures = {
        "tokens_per_sec": row.tokens_per_sec or 0.0,
        "validated": row.validated_at is not None,
        "rank": rank,
        "weighted_score": ranking.weighted(row, t.session.get_one(Round, row.round_id).ranking),
    }
    return protocol.Performer(**row.facts() | figures)
