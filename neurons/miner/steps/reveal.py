"""The step from COMMITTED to REVEALED: waits for the server's block, then reveals."""

from __future__ import annotations

from neurons.miner import cycle
from neurons.miner.context import Context
from neurons.miner.cycle import State, Submission
from neurons.miner.standing import Relation, is_shown_revealed, read_relation
from neurons.runtime.errors import Held, HeldUntilRelease, Retry
from neurons.wire.outcomes import AlreadyRevealed, Refused, SubmissionNotFound, TooEarly, Uncertain
from neurons.wire.protocol import PendingReveal
from neurons.wire.rules import BLOCK_SECONDS, block_at

MAX_WAIT_SECONDS = 60.0
LOG_EVERY_BLOCKS = 25
QUEUE_READS = 4
"""Maximum number of attempts to read the queue after a reveal, a second apart."""
JUST_REVEALED_SECONDS = 5.0
"""Seconds after a reveal within which no validator can clone and measure the submission."""
LOST_REPLIES = 2
"""Failures in a row after which a commitment that is no longer pending counts as revealed."""
LOOKUPS = 4
"""Reads of the list, 15 seconds apart, before a commitment counts as lost."""
TOO_EARLY_SECONDS = 60.0
"""Pause after the server has rejected a reveal as too early at the block that it named."""


def run(submission: Submission, context: Context) -> Submission:
    """Reveal as soon as the server allows it, if a validator can clone the commit.

    A reveal that may have arrived is sent again: the server answers 409 if it has the reveal and
    404 if it has lost the commitment; neither counts towards a ban. If the server still lists the
    commitment as unrevealed, the fork is checked again first.
    """
    for last in (False, True):
        if submission.state is State.COMMITTED:
            submission = _wait_for_block(submission, context)
            if submission.closed:
                return submission
            _check(submission, context)
            # the check at GitHub may have taken long
            submission = _watch_queue(submission, context)
            if submission.closed:
                return submission
            submission = context.move(submission, State.REVEALING)
        else:
            submission, row, _ = _look_up(submission, context)
            if row is not None:
                _check(submission, context)
        try:
            return _send(submission, context)
        except TooEarly as early:
            submission = context.move(submission, State.COMMITTED)
            if last:
                raise TooEarly(early.reason, early.after or TOO_EARLY_SECONDS) from early
            context.log.info(
                "the server reports the reveal as too early; retrying", reason=early.reason
            )
            context.wait(context.poll_seconds)
    raise AssertionError  # pragma: no cover - the loop returns or raises


def _look_up(
    submission: Submission, context: Context
) -> tuple[Submission, PendingReveal | None, int | None]:
    """Return the submission, the server's row of its commitment, and the block in its list.

    The block is None if the list cannot be read. The row names the submission's number, even if the
    reply to the commitment named another one; the number is journalled.
    """
    try:
        pending = context.client.pending_reveals()
    except Uncertain as fault:
        context.log.debug("the pending reveals cannot be read", reason=fault.reason)
        return submission, None, None
    row = pending.row_of(submission.hotkey, str(submission.commitment_hash))
    if row is not None and row.submission_id != submission.submission_id:
        context.log.warning(
            "the API lists the commitment under another number",
            submission=submission.id,
            was=submission.submission_id,
            now=row.submission_id,
        )
        submission = context.note(submission, submission_id=row.submission_id)
    return submission, row, pending.current_block


def _wait_for_block(submission: Submission, context: Context) -> Submission:
    """Wait until the server reaches the reveal block, which this machine cannot compute exactly.

    If the list cannot be read or its block stands still, the block is estimated. If the estimate is
    ahead of the server, the server rejects the reveal as too early, and the miner repeats it later.

    The miner also polls the queue: a validator that judges the commitment now cannot have measured
    it. This ends the submission, except with SUBMISSION_MODE=commit_reveal.
    """
    logged: int | None = None
    while True:
        submission, row, shown = _look_up(submission, context)
        submission = _watch_queue(submission, context)
        if submission.closed:
            return submission
        server_time = context.client.server_time()
        current = block_at(server_time) if shown is None else context.blocks.at(shown, server_time)
        block = row.reveal_block if row else int(submission.reveal_block or 0)
        left = block - current
        if left <= 0:
            return submission
        if logged is None or logged - left >= LOG_EVERY_BLOCKS:
            logged = left
            context.log.info(
                "waiting for the reveal block",
                reveal_block=block,
                blocks_left=left,
                minutes_left=round(left * BLOCK_SECONDS / 60),
            )
        # shorter than estimated, because the next block may start at any moment
        pause = min(0.8 * left * BLOCK_SECONDS, MAX_WAIT_SECONDS)
        context.wait(
            context.poll_seconds if context.client.on_loopback else max(pause, context.poll_seconds)
        )


def _watch_queue(submission: Submission, context: Context) -> Submission:
    """Journal when the commitment enters the validators' queue; end it if it leaves before."""
    if submission.judged_early_at is None:
        queued = context.read_standing(submission).queued
        if queued and submission.queued_at is None:
            submission = context.note(submission, queued_at=context.now())
        gone = queued is False and submission.queued_at is not None
        if gone and _is_on_server(submission, context):
            submission = context.note_early_judgement(submission)
    if submission.judged_early_at is None or context.insists_on_reveal:
        return submission
    return context.move(
        submission,
        State.PREMATURE,
        reason="A validator judged the commitment before its reveal, when there was nothing to "
        "measure. It is not revealed; the same claim is submitted directly.",
    )


def _is_on_server(submission: Submission, context: Context) -> bool:
    """Return whether the server still has a commitment that has left the queue."""
    _, row, shown = _look_up(submission, context)
    if shown is not None:
        return row is not None
    return read_relation(submission, context.client) is Relation.SAME


def _check(submission: Submission, context: Context) -> None:
    """Raise Held or Retry unless the claim matches the commitment and the fork can be cloned."""
    if submission.wire_version is None:
        raise HeldUntilRelease(
            "The journal was altered: its salt, URL and claim do not match the commitment.",
            f"Restore a backup of it, or run `{context.script} abandon`.",
        )
    context.verify_again(submission)


def _send(submission: Submission, context: Context) -> Submission:
    target, just_revealed = submission.target_sequence_length, True
    try:
        context.when_registered(target, lambda: context.reveal(submission))
    except AlreadyRevealed as refusal:
        _, _, shown = _require_number(submission, context, refusal)
        if shown is None and submission.attempts < LOST_REPLIES:
            reason = f"{refusal.reason} But without /pending_reveals its number is uncertain"
            raise Retry(reason) from refusal
        context.log.info("the server has the reveal already")
        return context.move(submission, State.REVEALED, queued_at=None)
    except SubmissionNotFound as missing:
        _require_lost(submission, context, missing)
        reason = f"The server has lost it: {missing.reason}"
        return context.record(submission, cycle.abandon(submission, reason, context.now()))
    except Uncertain:
        if not _is_revealed(submission, context):
            raise  # the same reveal is sent again later
        context.log.info("the reply to the reveal was lost; the public list shows it")
        # an earlier request may have revealed it, so that a validator has measured it since
        age = context.now() - submission.updated_at
        just_revealed = submission.attempts == 0 and age < JUST_REVEALED_SECONDS
    submission = context.move(submission, State.REVEALED, queued_at=None)
    return _seen_in_queue(submission, context, just_revealed)


def _require_number(
    submission: Submission, context: Context, refusal: Refused
) -> tuple[Submission, PendingReveal | None, int | None]:
    """Return the result of `_look_up`; raise Retry if the refused reveal had a wrong number."""
    found, row, shown = _look_up(submission, context)
    if found.submission_id != submission.submission_id:
        raise Retry(f"{refusal.reason} The commitment has the number {found.submission_id}")
    return found, row, shown


def _require_lost(submission: Submission, context: Context, missing: Refused) -> None:
    """Raise Retry unless the server has lost the commitment.

    A list that shows the commitment proves that the server has it. Because one reply may come from
    another, empty database, the list is read for a minute, or until the round is of a new database.
    """
    for _ in range(LOOKUPS):
        _, row, shown = _require_number(submission, context, missing)
        if row is not None or shown is None:
            reads = "lists it" if row else "cannot be read"
            raise Retry(f"{missing.reason} But /pending_reveals {reads}")
        if read_relation(submission, context.client) is Relation.OTHER_DATABASE:
            return
        context.wait(context.poll_seconds)


def _is_revealed(submission: Submission, context: Context) -> bool:
    """Return whether the reveal arrived although its reply was lost.

    The public lists show it until it is judged. After LOST_REPLIES, a commitment that the server no
    longer lists as unrevealed counts as revealed, if the round, and so the database, is the same.
    """
    if is_shown_revealed(submission, context.client):
        return True
    if submission.attempts < LOST_REPLIES:
        return False
    _, row, shown = _look_up(submission, context)
    gone = shown is not None and row is None
    return gone and read_relation(submission, context.client) is Relation.SAME


def _seen_in_queue(submission: Submission, context: Context, just_revealed: bool) -> Submission:
    """Journal whether the submission is in the queue, as it must be right after its reveal.

    No validator clones and measures within seconds. A submission that is missing just after its
    reveal was therefore judged before. Two reads must agree, because a list may be out of date.
    """
    if submission.judged_early_at is not None:
        return submission
    try:
        for _ in range(QUEUE_READS):
            standing = context.read_standing(submission)
            if standing.queued:
                return context.note(submission, queued_at=context.now())
            if standing.performer is not None:
                return submission
            if standing.queued is False:
                return _not_in_queue(submission, context, just_revealed)
            context.wait(1.0)
    except (Retry, Held):
        pass  # the reveal counts even if the queue cannot be read now
    return submission


def _not_in_queue(submission: Submission, context: Context, just_revealed: bool) -> Submission:
    context.wait(context.poll_seconds)
    standing = context.read_standing(submission)
    if standing.queued:
        return context.note(submission, queued_at=context.now())
    gone = just_revealed and standing.queued is False and standing.performer is None
    if gone and read_relation(submission, context.client) is Relation.SAME:
        return context.note_early_judgement(submission)
    return submission
