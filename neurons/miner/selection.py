"""Selects the submissions of a cycle: the live one or a new one, and those to other targets."""

from __future__ import annotations

from typing import TypeGuard

from neurons.miner import cycle
from neurons.miner.context import Context
from neurons.miner.cycle import BEFORE_COMMITMENT, State, Submission
from neurons.miner.premature import submission_mode

HELD_RETRY_SECONDS = 600.0
"""Seconds until a commitment that is HELD before its reveal is tried again."""


def current(context: Context) -> Submission:
    """Return the submission to continue: the live one, resumed if it is HELD, or a new one."""
    submission = live(context)
    if submission is None:
        submission = create(context)
    elif submission.state is State.HELD and submission.resume_state is not None:
        submission = _resume(submission, context)
    elif submission.state is not State.HELD:
        state = submission.position.value
        context.log.info("going on", submission=submission.id, state=state)
    return _restart_if_changed(submission, context)


def live(context: Context) -> Submission | None:
    return context.journal.live(context.identity.hotkey, context.target)


def create(context: Context) -> Submission:
    """Create a submission; it has the last claim if that was premature and can be sent directly."""
    settings, journal = context.settings, context.journal
    mode, now = submission_mode(context), context.now()
    last = journal.last_closed(context.identity.hotkey, context.target)
    if _can_reuse_claim(last, mode, context):
        submission = journal.insert(cycle.direct_draft(last, now))
    else:
        draft = Submission(
            id=0,
            hotkey=context.identity.hotkey,
            target_sequence_length=context.target or 0,  # with `auto`, the claim sets it
            mode=mode,
            publish_at="before_commit" if mode == "direct" else settings.publish_at,
            api_url=context.client.base_url,
            auto_target=context.target is None,
            created_at=now,
            updated_at=now,
        )
        submission = journal.insert(draft)
    context.log.info(
        "new submission",
        submission=submission.id,
        target=submission.target_sequence_length or "auto",
        mode=mode,
    )
    return submission


def others(context: Context) -> list[Submission]:
    """Return the commitments to other targets; abandon submissions without a commitment."""
    own = live(context)
    committed = []
    for other in context.journal.live_submissions(context.identity.hotkey):
        if own is not None and other.id == own.id:
            continue
        if other.position in BEFORE_COMMITMENT:
            reason = "TARGET_SEQUENCE_LENGTH was changed before the commitment."
            context.record(other, cycle.abandon(other, reason, context.now()))
        elif other.state is not State.HELD:
            committed.append(other)
        elif is_retry_due(other, context.now()):
            committed.append(_resume(other, context))
    return committed


def is_retry_due(held: Submission, now: float) -> bool:
    """Return whether a held commitment is due for another attempt without a person's action.

    It is due if the clock was set back after it was held: its window for the reveal is limited.
    """
    return (
        held.state is State.HELD
        and held.resume_state in (State.COMMITTED, State.REVEALING)
        and not 0 <= now - held.updated_at < HELD_RETRY_SECONDS
    )


def _resume(held: Submission, context: Context) -> Submission:
    context.log.info("trying again", submission=held.id, held_for=held.reason)
    return context.record(held, cycle.resume(held, context.now()))


def _can_reuse_claim(last: Submission | None, mode: str, context: Context) -> TypeGuard[Submission]:
    """Return whether `last` was premature and its claim can be sent directly."""
    return (
        last is not None
        and last.never_revealed
        and mode == "direct"
        and last.content_digest == context.content_digest()
        and last.api_url == context.client.base_url
    )


def _restart_if_changed(submission: Submission, context: Context) -> Submission:
    """Return to NEW a submission whose kernels changed before its commitment."""
    started = BEFORE_COMMITMENT - {State.NEW}
    if submission.state in started and submission.content_digest != context.content_digest():
        context.log.info("the kernels changed", submission=submission.id)
        return context.move(submission, State.NEW)
    return submission
