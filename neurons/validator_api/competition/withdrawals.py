"""What a newer submission takes off the lists, so that one hotkey waits once for each target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from neurons.validator_api.competition.moment import Moment
from neurons.validator_api.database.tables import Submission

OPEN_A_HOTKEY = 10
"""Submissions of one hotkey that may wait at once, one for each target."""


class Waiting(NamedTuple):
    """A row that waits already."""

    id: int
    hotkey: str
    target: int
    is_revealed: bool


@dataclass(frozen=True)
class Arrival:
    """A row that begins to wait: for its reveal as a commitment, for a validator otherwise."""

    id: int
    hotkey: str
    target: int
    is_commit: bool


def withdraw_replaced(session: Session, arrivals: Sequence[Arrival], moment: Moment) -> None:
    """Withdraw what the arrivals replace, as if each came by itself in the order given.

    A commitment replaces another commitment, and leaves in the queue what is there until its
    reveal. A validator may still mark what it has begun to judge.
    """
    found = session.execute(
        select(
            Submission.id,
            Submission.miner_hotkey,
            Submission.target_sequence_length,
            Submission.is_revealed,
        )
        .where(
            Submission.miner_hotkey.in_({one.hotkey for one in arrivals}),
            Submission.validated_at.is_(None),
            Submission.withdrawn_at.is_(None),
        )
        .order_by(Submission.id)
    )
    rows = [Waiting(*row) for row in found]
    arriving = {one.id for one in arrivals}
    waiting: dict[str, list[Waiting]] = defaultdict(list)
    for row in rows:
        if row.id not in arriving:
            waiting[row.hotkey].append(row)
    own, gone = {row.id: row for row in rows}, []
    for one in arrivals:
        replaced = _replaced(one, waiting[one.hotkey])
        gone += [row.id for row in replaced]
        stay = [row for row in waiting[one.hotkey] if row not in replaced]
        waiting[one.hotkey] = sorted([*stay, own[one.id]])
    if gone:
        left = update(Submission).where(Submission.id.in_(gone)).values(withdrawn_at=moment.now)
        session.execute(left.execution_options(synchronize_session=False))


def _replaced(one: Arrival, waiting: Sequence[Waiting]) -> list[Waiting]:
    """Return the rows that an arrival replaces, of those of its hotkey, the oldest first."""
    replaced = [
        row
        for row in waiting
        if row.target == one.target and not (one.is_commit and row.is_revealed)
    ]
    kept = [row for row in waiting if row not in replaced]
    return replaced + kept[: max(0, len(kept) + 1 - OPEN_A_HOTKEY)]
