"""The two lists of what waits: commitments for their reveal, submissions for a validator."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from neurons.validator_api.competition.moment import Moment
from neurons.validator_api.database.tables import Submission
from neurons.wire import protocol

IN_QUEUE = (
    # A commitment is nobody's to judge: it joins the queue with its reveal.
    Submission.is_revealed.is_(True),
    Submission.validated_at.is_(None),
    Submission.withdrawn_at.is_(None),
)


def validation_queue(session: Session, after: int, limit: int) -> protocol.ValidationQueue:
    """Return a page of the validators' queue, the oldest first, so that nobody is passed over.

    Args:
        after: the number of the last row that the caller has.
    """
    rows = session.scalars(
        select(Submission)
        .where(*IN_QUEUE, Submission.id > after)
        .order_by(Submission.id)
        .limit(limit + 1)
    ).all()
    page = rows[:limit]
    return protocol.ValidationQueue(
        submissions=[queued(row, with_client=True) for row in page],
        next_after=page[-1].id if len(rows) > limit else None,
    )


def queued(row: Submission, *, with_client: bool = False) -> protocol.QueuedSubmission:
    """Return the row as the lists show it; who sent it is for validators only."""
    shown = row.facts() | {"validated": row.validated_at is not None}
    if not with_client:
        shown["ip_address"] = None
    return protocol.QueuedSubmission(**shown)


def pending_reveals(
    session: Session, moment: Moment, hotkey: str | None, before: int | None, limit: int
) -> protocol.PendingReveals:
    """Return the commitments that may yet be revealed, the newest first.

    Args:
        hotkey: only this one's.
        before: only those with a smaller number, for the next page.
    """
    wanted = select(Submission).where(
        Submission.is_revealed.is_(False),
        Submission.validated_at.is_(None),
        Submission.withdrawn_at.is_(None),
        Submission.reveal_block >= moment.oldest_block,
    )
    if hotkey is not None:
        wanted = wanted.where(Submission.miner_hotkey == hotkey)
    if before is not None:
        wanted = wanted.where(Submission.id < before)
    rows = session.scalars(wanted.order_by(Submission.id.desc()).limit(limit))
    return protocol.PendingReveals(
        current_block=moment.block,
        pending_reveals=[
            protocol.PendingReveal(
                submission_id=row.id,
                miner_hotkey=row.miner_hotkey,
                commitment_hash=f"{row.commitment_hash or '':.16}...",
                reveal_block=row.reveal_block or 0,
                blocks_remaining=max(0, (row.reveal_block or 0) - moment.block),
                can_reveal=(row.reveal_block or 0) <= moment.block,
                created_at=row.created_at.isoformat(),
            )
            for row in rows
        ],
    )
