"""What the server shows about a submission: its round, the present block, and the public lists."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from neurons.miner.cycle import VERDICTS, Submission
from neurons.wire.client import ApiClient, Queue
from neurons.wire.outcomes import TooLarge, Uncertain
from neurons.wire.protocol import Performer, QueuedSubmission, Round, is_same_instant, unix_time
from neurons.wire.rules import BLOCK_SECONDS, block_at

LIMITS = (100, 1_000, 10_000)
"""Numbers of rows to request, in this order, until the list must show the submission. This
project's server rejects all but the first."""
ROUNDING = 1e-4
"""Largest relative difference between a claim and its figure in a list, which may be rounded."""

MIN_ROWS = 3
"""A list of at most this many rows is not shortened further."""

STALE_SECONDS = 90.0
"""Seconds after which an unchanged block must come from a cache: a block takes 12 seconds."""

MAX_LAG = 86_400 // BLOCK_SECONDS
"""Blocks (a day) by which a cached number may lag behind the block that the server's clock gives.
If it lags more, the server counts blocks in another way, so its clock is not used."""


class Relation(str, Enum):
    """The server's present round, compared with a submission's round."""

    SAME = "same"
    LATER = "later"
    OTHER_DATABASE = "other database"  # the server has lost the round and its submissions


def compare_round(submission: Submission, now: Round) -> Relation:
    """Return how the server's round `now` relates to the round of the submission."""
    own = submission.round_id or 0
    if now.id > own:
        return Relation.LATER
    if now.id == own and is_same_instant(submission.round_start or "", now.start_time):
        return Relation.SAME
    return Relation.OTHER_DATABASE


def read_relation(submission: Submission, client: ApiClient) -> Relation:
    return compare_round(submission, client.current_round())


def is_due(last: Submission | None, now: Round, content_digest: str, mode: str) -> bool:
    """Return whether a new submission is due after `last`, the newest closed one.

    The same content is submitted once a round, again after an end without a verdict, and in mode
    `direct` after a premature commitment that was not revealed.
    """
    if last is None or last.state not in VERDICTS:
        return True
    if last.never_revealed and mode == "direct":
        return True
    same_round = compare_round(last, now) is Relation.SAME
    return not same_round or last.content_digest != content_digest


class BlockClock:
    """Follows the block numbers that one server shows.

    After an estimate that is too high, the server answers 425, which does no harm.
    """

    def __init__(self) -> None:
        self._shown: int | None = None
        self._since = 0.0  # monotonic time of the first reply with the number `_shown`

    def at(self, shown: int, server_time: float) -> int:
        """Return the present block, given the one in a reply and the server's clock (Unix time)."""
        moment = time.monotonic()
        if shown != self._shown:
            self._shown, self._since = shown, moment
        unchanged = moment - self._since
        if unchanged < STALE_SECONDS:
            return shown
        by_clock = block_at(server_time)
        estimate = shown + int(unchanged / BLOCK_SECONDS)
        return max(estimate, by_clock) if 0 <= by_clock - shown <= MAX_LAG else estimate


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

    A bad row of another miner can make the lists unreadable for days; the miner then continues
    without them. Raises Retry if the server cannot be reached.
    """
    standing = Standing()
    for queue, limit in _lists(client):
        own = (row for row in queue.performers if row.id == submission.submission_id)
        standing = Standing(
            queued=_is_queued(submission, queue, limit),
            performer=next((row for row in own if row.rank or row.score is not None), None),
            queue_length=len(queue.listed),
            others=_others(submission, queue),
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
    """Yield lists of growing length with their limits in rows, until one cannot be read.

    If a reply is too large, its limit is lowered.
    """
    for rows in LIMITS:
        limit = rows
        queue: Queue | None = None
        while queue is None:
            try:
                queue = client.queue(limit)
            except TooLarge:
                if limit <= MIN_ROWS:
                    return
                limit //= 3
            except Uncertain:
                return
        yield queue, limit


def _is_queued(submission: Submission, queue: Queue, limit: int) -> bool | None:
    """Return whether the list shows the submission; None if the list is too short.

    Also return None if the row with its number is another submission's: the reply to a commitment
    may name a wrong number.
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
