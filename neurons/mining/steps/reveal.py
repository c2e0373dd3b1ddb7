"""COMMITTED to REVEALED: waits for the server's block and shows what was committed to."""

from __future__ import annotations

from neurons.errors import Held
from neurons.mining import cycle
from neurons.mining.context import Context
from neurons.mining.cycle import State, Submission
from neurons.mining.outcomes import (
    AlreadyRevealed,
    SubmissionNotFound,
    TooEarly,
    Uncertain,
)
from neurons.mining.steps.commit import find
from neurons.mining.steps.signing import signed_claim
from neurons.protocol import BLOCK_SECONDS, RevealRequest, commitment_hash

LONGEST_WAIT_SECONDS = 60.0
LOG_EVERY_BLOCKS = 25
STUBBORN_SECONDS = 60.0
"""The pause when the server says too early at the block that it named itself."""


def run(submission: Submission, context: Context) -> Submission:
    """Reveal as soon as the server allows it, and only what a validator can clone.

    A reveal that may have happened is looked up first: what is not pending any more is revealed.
    One that has not is checked again, since hours may have passed.
    """
    if submission.state is State.REVEALING and find(submission, context) is None:
        return context.move(submission, State.REVEALED)
    for last in (False, True):
        if submission.state is State.COMMITTED:
            _wait_for_block(submission, context)
        _check(submission, context)
        if submission.state is State.COMMITTED:
            submission = context.move(submission, State.REVEALING)
        try:
            return _send(submission, context)
        except TooEarly as early:
            submission = context.move(submission, State.COMMITTED)
            if last:
                raise TooEarly(early.reason, early.after or STUBBORN_SECONDS) from early
            context.log.info("too early, says the server; once more", reason=early.reason)
            context.wait(context.poll_seconds)
    raise AssertionError  # pragma: no cover - the loop returns or raises


def _wait_for_block(submission: Submission, context: Context) -> None:
    """Return when the server's own block, not this machine's clock, has reached the reveal."""
    logged: int | None = None
    while True:
        pending = context.client.pending_reveals()
        rows = pending.pending_reveals
        row = next((row for row in rows if row.submission_id == submission.submission_id), None)
        block = row.reveal_block if row else int(submission.reveal_block or 0)
        left = block - pending.current_block
        if left <= 0:
            return
        if logged is None or logged - left >= LOG_EVERY_BLOCKS:
            logged = left
            context.log.info(
                "waiting for the reveal block",
                reveal_block=block,
                blocks_left=left,
                minutes_left=round(left * BLOCK_SECONDS / 60),
            )
        # A little short of the whole wait, since blocks start between two looks.
        pause = min(0.8 * left * BLOCK_SECONDS, LONGEST_WAIT_SECONDS)
        context.wait(
            context.poll_seconds if context.client.on_loopback else max(pause, context.poll_seconds)
        )


def _check(submission: Submission, context: Context) -> None:
    """Make sure, before anything is shown, that it matches the commitment and can be cloned."""
    url, commit = str(submission.fork_url), str(submission.commit_hash)
    if commitment_hash(str(submission.salt), url) != submission.commitment_hash:
        raise Held(
            "The journal's salt and URL do not give the commitment: the journal was altered.",
            "Put a backup of it in place, or run `python -m neurons.miner abandon`.",
        )
    if context.fork.url != url:
        raise Held(
            f"The settings name the fork {context.fork.url}, the commitment {url}.",
            "Set GITHUB_USERNAME, GITHUB_FORK_NAME, FORK_REMOTE and REPO_PATH back until it is "
            "revealed.",
        )
    if submission.publish_at == "before_reveal":
        context.fork.push(commit)
    context.fork.verify(commit)


def _send(submission: Submission, context: Context) -> Submission:
    claim = signed_claim(submission, context.identity)
    request = RevealRequest(
        submission_id=int(submission.submission_id or 0),
        commitment_salt=str(submission.salt),
        **claim,
    )
    try:
        context.client.reveal(request)
    except AlreadyRevealed:
        context.log.info("revealed before, says the server")
    except SubmissionNotFound as missing:
        return context.record(submission, cycle.abandon(submission, missing.reason, context.now()))
    except Uncertain:
        if find(submission, context) is not None:
            raise
        context.log.info("the reply was lost, but the reveal is no longer pending")
    return context.move(submission, State.REVEALED)
