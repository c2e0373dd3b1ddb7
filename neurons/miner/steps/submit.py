"""The step from CLAIMED to REVEALED in direct mode: one call without a commitment."""

from __future__ import annotations

from neurons.miner.context import Context
from neurons.miner.cycle import State, Submission
from neurons.miner.standing import LIMITS, Relation, compare_round, rows_of_claim
from neurons.wire.outcomes import Banned, Busy, Refused, Uncertain, Unreachable, Untrusted
from neurons.wire.protocol import Round, unix_time

NOT_SENT = (Unreachable, Untrusted, Busy, Banned, Refused)
"""The exceptions after which the server certainly does not have the submission."""
LATE_SECONDS = 90.0
"""Seconds after its sender has disconnected in which a gateway may still deliver a request."""
CLOCK_SLACK_SECONDS = 5.0
"""Largest error, in seconds, of the server's clock as read from a reply."""


def run(submission: Submission, context: Context) -> Submission:
    """Submit; never repeat a request that may have arrived, because the server would store both."""
    if submission.state is State.SUBMITTING:
        number = _find_late(submission, context)
        if number is not None:
            return context.move(submission, State.REVEALED, submission_id=number)
    now = context.client.current_round()
    if submission.state is State.SUBMITTING and not _may_send_again(submission, now):
        return context.move(
            submission,
            State.UNRANKED,
            reason="It cannot be known whether it arrived: the reply was lost, the queue does not "
            "show it, and other submissions arrived. It is not sent again in this round.",
        )
    context.verify_again(submission)
    facts = {
        "round_id": now.id,
        "round_start": now.start_time,
        "round_total": now.total_submissions,
    }
    if submission.state is State.CLAIMED:
        submission = context.move(submission, State.SUBMITTING, **facts)
    else:
        submission = context.note(submission, **facts)
    return _send(submission, context, now.wire_version)


def _send(submission: Submission, context: Context, wire_version: int) -> Submission:
    target = submission.target_sequence_length
    try:
        reply = context.when_registered(
            target, lambda: context.client.submit(target, submission.claim, wire_version)
        )
    except NOT_SENT:
        context.note(submission, round_total=None)
        raise
    except Uncertain:
        number = _find(submission, context)
        if number is None:
            raise  # after the pause, `_find_late` searches again before it is sent again
        return context.move(submission, State.REVEALED, submission_id=number)
    submission = context.move(submission, State.REVEALED, submission_id=reply.submission_id)
    return context.update_round(submission)


def _may_send_again(submission: Submission, now: Round) -> bool:
    """Return whether the submission, which the queue lacks, may be sent again.

    In another round it may, because the claim is due again. In the same round it may if the
    server's count shows that no submission has arrived since it was sent.
    """
    if submission.round_total is None:
        return True
    relation = compare_round(submission, now)
    return relation is not Relation.SAME or now.total_submissions == submission.round_total


def _find_late(submission: Submission, context: Context) -> int | None:
    """Return the result of `_find`; if it is None, repeat it after LATE_SECONDS."""
    number = _find(submission, context)
    if number is None and submission.round_total is not None:
        context.log.info(
            "its reply was lost; it is sent again only if the queue does not have it",
            submission=submission.id,
            seconds=LATE_SECONDS,
        )
        context.wait(LATE_SECONDS)
        number = _find(submission, context)
    return number


def _find(submission: Submission, context: Context) -> int | None:
    """Return the server's number of this submission, queued or judged; None if it is not listed.

    Older rows of the same claim belong to earlier submissions.
    """
    queue = context.client.queue(LIMITS[0])
    since = submission.created_at + _clock_offset(context) - CLOCK_SLACK_SECONDS
    for row in rows_of_claim(submission, queue):
        same_target = row.target_sequence_length == submission.target_sequence_length
        if same_target and unix_time(row.created_at) >= since:
            return row.id
    return None


def _clock_offset(context: Context) -> float:
    """Return by how many seconds the clock that dates the API's rows is ahead of this machine's.

    The Date header may be of another machine, a front end. The running round's end and the seconds
    until then give the API's own clock.
    """
    now = context.client.current_round()
    end = unix_time(now.end_time)
    if end and now.time_remaining_seconds > 0:
        return end - now.time_remaining_seconds - context.now()
    return context.client.clock_offset or 0.0
