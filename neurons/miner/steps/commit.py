"""The step from CLAIMED to COMMITTED: journals the salt, then sends the commitment hash."""

from __future__ import annotations

import secrets
import time
from typing import Any

from neurons.miner.context import Context
from neurons.miner.cycle import State, Submission
from neurons.runtime.errors import Held
from neurons.runtime.observe import register_secret
from neurons.wire.outcomes import AlreadyCommitted, ProtocolFault, Uncertain
from neurons.wire.protocol import CommitReply, PendingReveal, Round, commitment

SETTLE_SECONDS = 120.0
"""Seconds for which the server's list may lack a commitment that the server confirms."""


def run(submission: Submission, context: Context) -> Submission:
    """Commit to the fork's URL, and to the whole claim if the server supports it.

    After a crash or a lost reply, the miner first looks for the commitment in the server's list,
    and sends the same one again if it is missing. It requests the round before each attempt: the
    public server starts the next round only at such a request, and answers commitments with 500
    until then.
    """
    if submission.state is State.COMMITTING:
        row = find_row(submission, context)
        if row is not None:
            return _committed(submission, context, row)
    now = context.client.current_round()
    if submission.state is State.CLAIMED:
        salt = secrets.token_hex(32)
        register_secret(salt)
        submission = context.move(
            submission,
            State.COMMITTING,
            salt=salt,
            commitment_hash=commitment(
                now.wire_version, salt, submission.target_sequence_length, submission.claim
            ),
            round_id=now.id,
            round_start=now.start_time,
        )
    return _send(submission, context, now)


def find_row(submission: Submission, context: Context) -> PendingReveal | None:
    """Return the server's row of this commitment, if the server lists it as unrevealed."""
    pending = context.client.pending_reveals()
    return pending.row_of(submission.hotkey, str(submission.commitment_hash))


def _send(submission: Submission, context: Context, now: Round) -> Submission:
    digest, target = str(submission.commitment_hash), submission.target_sequence_length
    version = submission.wire_version or 1
    try:
        reply = context.when_registered(
            target, lambda: context.client.commit(digest, target, version)
        )
        if reply.commitment_hash != digest:
            raise ProtocolFault("/commit_submission answered with another commitment")
    except AlreadyCommitted as refusal:
        return _settle(submission, context, refusal)
    except Uncertain:
        row = find_row(submission, context)
        if row is None:
            raise  # the same commitment is sent again later
        return _committed(submission, context, row)
    return _committed(submission, context, reply, round_id=now.id, round_start=now.start_time)


def _settle(submission: Submission, context: Context, refusal: AlreadyCommitted) -> Submission:
    """Wait until the server's list shows the commitment; after SETTLE_SECONDS, raise Held."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        row = find_row(submission, context)
        if row is not None:
            return _committed(submission, context, row)
        if time.monotonic() >= deadline:
            raise Held(
                f"{refusal.reason} But /pending_reveals does not list it, so its number is "
                "unknown.",
                f"`{context.script} release` searches again, `abandon` ends the submission.",
            )
        context.wait(context.poll_seconds)


def _committed(
    submission: Submission, context: Context, row: PendingReveal | CommitReply, **facts: Any
) -> Submission:
    """Journal the server's record of the commitment, and further facts from its reply."""
    facts |= {"submission_id": row.submission_id, "reveal_block": row.reveal_block}
    return context.move(submission, State.COMMITTED, **facts)
