"""Checks that the API at VALIDATOR_API_URL is the submission's, and serves this competition."""

from __future__ import annotations

from urllib.parse import urlsplit

from neurons.miner.context import Context
from neurons.miner.cycle import BEFORE_COMMITMENT, State, Submission
from neurons.miner.standing import Relation, is_shown_revealed, read_relation
from neurons.runtime.errors import Held, Retry
from neurons.runtime.values import LOOPBACK

ABSENT_SECONDS = 3600.0
"""Pause before the miner checks again whether an API serves this competition."""


def follow_api(submission: Submission, context: Context) -> Submission:
    """Return `submission` with VALIDATOR_API_URL as its API's address.

    If the address changed after the commitment, the API's lists must show the submission. The
    journal then gets the new address. Raises Held if they do not show it, and Retry if they cannot
    be read. On loopback the port may change.
    """
    old, new = submission.api_url, context.client.base_url
    before, now = urlsplit(old), urlsplit(new)
    if before.netloc == now.netloc or {before.hostname, now.hostname} <= set(LOOPBACK):
        return submission
    if submission.state in BEFORE_COMMITMENT:
        return context.note(submission, api_url=new)
    try:
        known = _is_listed(submission, context)
    except Retry as fault:
        raise Retry(
            f"It was submitted to {old}. VALIDATOR_API_URL is now {new}, and its lists cannot be "
            f"read: {fault.reason}",
            fault.after,
        ) from fault
    if not known:
        raise Held(
            f"It was submitted to {old}. VALIDATOR_API_URL is now {new}, which does not list it.",
            "Set VALIDATOR_API_URL to an address of the same API until the verdict, or run "
            f"`{context.script} abandon`.",
        )
    context.journal.move_api(old, new)
    context.log.info("the API has another address", submission=submission.id, was=old, now=new)
    return context.journal.get(submission.id)


def require_competition(context: Context) -> None:
    """Raise Retry, with a long pause, if the API does not serve this competition."""
    if is_absent(context):
        raise Retry(absent(context), ABSENT_SECONDS)


def is_absent(context: Context) -> bool:
    """Return whether the API does not serve this competition, with an alert if this is new."""
    serves = context.client.serves_competition()
    if serves is False:
        context.alerts.begin("api", absent(context), "absent")
    elif serves:
        context.alerts.end("api", "absent")
    return serves is False


def absent(context: Context) -> str:
    """Return the sentence about an API that does not serve this competition."""
    return (
        f"{context.client.base_url} has no /commit_submission, so it does not serve this "
        "competition, and nothing is submitted. Check VALIDATOR_API_URL; docs/operating.md says "
        "what is known about the subnet"
    )


def _is_listed(submission: Submission, context: Context) -> bool:
    """Return whether the API has this commitment or, after its reveal, this submission."""
    pending = context.client.pending_reveals()
    row = pending.row_of(submission.hotkey, str(submission.commitment_hash))
    if row is None and submission.state is State.REVEALED:
        # a judged submission may be in no list; the round suffices, as no secret is left to send
        same_round = read_relation(submission, context.client) is Relation.SAME
        return same_round or is_shown_revealed(submission, context.client)
    if row is None:
        return is_shown_revealed(submission, context.client)
    # number and block are unknown after a lost reply
    number, block = submission.submission_id, submission.reveal_block
    return number in (None, row.submission_id) and block in (None, row.reveal_block)
