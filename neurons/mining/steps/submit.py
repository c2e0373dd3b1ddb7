"""CLAIMED to REVEALED in one call: the direct submission without commitment."""

from __future__ import annotations

from neurons.mining.context import Context
from neurons.mining.cycle import State, Submission
from neurons.mining.outcomes import Uncertain
from neurons.mining.steps.follow import STATS_ROWS
from neurons.mining.steps.register import when_registered
from neurons.mining.steps.signing import signed_claim
from neurons.protocol import SubmitRequest


def run(submission: Submission, context: Context) -> Submission:
    """Submit, and never twice what may have arrived: the server would store both."""
    if submission.state is State.SUBMITTING:
        found = _find(submission, context)
        if found is not None:
            return context.move(submission, State.REVEALED, submission_id=found)
    round_id = context.client.current_round().id
    context.fork.verify(str(submission.commit_hash))
    if submission.state is State.CLAIMED:
        submission = context.move(submission, State.SUBMITTING, round_id=round_id)
    target = submission.target_sequence_length
    claim = signed_claim(submission, context.identity)
    request = SubmitRequest(target_sequence_length=target, **claim)
    try:
        reply = when_registered(context, target, lambda: context.client.submit(request))
    except Uncertain:
        found = _find(submission, context)
        if found is None:
            raise  # looked up once more after the pause, and only then sent again
        return context.move(submission, State.REVEALED, submission_id=found)
    return context.move(
        submission, State.REVEALED, submission_id=reply.submission_id, round_id=round_id
    )


def _find(submission: Submission, context: Context) -> int | None:
    """Return the server's number of this submission, queued or judged; None without it."""
    stats = context.client.stats(STATS_ROWS)
    older = {s.submission_id for s in context.journal.latest(1000, hotkey=submission.hotkey)}
    queued = (
        row.id
        for row in stats.recent_submissions
        if row.commit_hash == submission.commit_hash
        and row.miner_hotkey == submission.hotkey
        and row.target_sequence_length == submission.target_sequence_length
    )
    judged = (
        row.id
        for row in stats.top_performers
        if row.miner_hotkey == submission.hotkey
        and row.target_sequence_length == submission.target_sequence_length
        and row.tokens_per_sec == submission.tokens_per_sec
    )
    return next((row for row in (*queued, *judged) if row not in older), None)
