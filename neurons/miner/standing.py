"""The state of a submission's validation, from the server's public lists."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from neurons.miner.cycle import Submission
from neurons.wire.client import ApiClient, Queue
from neurons.wire.outcomes import TooLarge, Uncertain
from neurons.wire.protocol import Performer, QueuedSubmission, unix_time

LIMITS = (100, 1_000, 10_000)
"""Numbers of rows to request in this order, until the list is long enough to show the submission.

This project's server refuses all but the first.
"""
ROUNDING = 1e-4
"""Relative difference between a claim and its figure in a list, which may be rounded."""

MIN_ROWS = 3
"""A list of at most this many rows is not shortened further."""


@dataclass(frozen=True)
class Standing:
    """One submission in the server's public lists."""

    # whether it waits for a validator; None if the list is too short to show it
    queued: bool | None = None
    # the row of `top_performers` that shows its verdict; the public server also lists claims there
    # that are not judged, without rank and score
    performer: Performer | None = None
    queue_length: int = 0  # how many submissions were listed
    # the numbers of this hotkey's other rows since the start of the submission's round
    others: frozenset[int] = frozenset()


def read_standing(submission: Submission, client: ApiClient) -> Standing:
    """Return the standing of `submission`; an empty one if the lists cannot be read.

    Other miners' rows can make the lists unreadable for days, so the miner must continue without
    them. Raises Retry if the server cannot be reached.
    """
    standing = Standing()
    for queue, limit in _lists(client):
        standing = Standing(
            _is_queued(submission, queue, limit),
            _verdict(submission, queue),
            len(queue.listed),
            _others(submission, queue),
        )
        if standing.queued is not None or standing.performer is not None:
            break
    return standing


def is_shown_revealed(submission: Submission, client: ApiClient) -> bool:
    """Return whether a list shows the submission's commit or claim; or raise Retry."""
    for queue, _ in _lists(client):
        if submission.submission_id in [row.id for row in rows_of_claim(submission, queue)]:
            return True
    return False


def rows_of_claim(submission: Submission, queue: Queue) -> list[QueuedSubmission | Performer]:
    """Return the listed rows with the submission's commit or claim; a server may round claims."""
    claim = float(submission.tokens_per_sec or 0.0)
    return [
        *(row for row in queue.rows if row.commit_hash == submission.commit_hash),
        *(r for r in queue.performers if math.isclose(r.tokens_per_sec, claim, rel_tol=ROUNDING)),
    ]


def _lists(client: ApiClient) -> Iterator[tuple[Queue, int]]:
    """Yield lists of growing length with their limits, until one cannot be read."""
    for limit in LIMITS:
        try:
            queue, rows = _read_list(client, limit)
        except Uncertain:
            return
        yield queue, rows


def _read_list(client: ApiClient, limit: int) -> tuple[Queue, int]:
    """Return a list and its limit in rows: `limit`, or less if the reply would be too large."""
    while True:
        try:
            return client.queue(limit), limit
        except TooLarge:
            if limit <= MIN_ROWS:
                raise
            limit //= 3


def _is_queued(submission: Submission, queue: Queue, limit: int) -> bool | None:
    """Return whether the list shows the submission; None if the list is too short.

    It is None, too, if the row with its number is another one: the reply to a commitment may name a
    wrong number.
    """
    for row in queue.rows:
        if row.id == submission.submission_id:
            same = row.target_sequence_length == submission.target_sequence_length
            return True if same and row.commit_hash in (None, submission.commit_hash) else None
    reached = min((number for number in queue.listed if number >= 0), default=0)
    if len(queue.listed) < limit or reached < int(submission.submission_id or 0):
        return False
    return None


def _others(submission: Submission, queue: Queue) -> frozenset[int]:
    since = unix_time(submission.round_start or "") or submission.created_at
    rows: list[QueuedSubmission | Performer] = [*queue.rows, *queue.performers]
    return frozenset(row.id for row in rows if unix_time(row.created_at) >= since) - {
        submission.submission_id or 0
    }


def _verdict(submission: Submission, queue: Queue) -> Performer | None:
    for row in queue.performers:
        if row.id == submission.submission_id and (row.rank or row.score is not None):
            return row
    return None
