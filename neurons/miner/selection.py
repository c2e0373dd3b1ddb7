"""Selects the submissions of a cycle: the live one or a new one, and those to other targets."""

from __future__ import annotations

from neurons.miner import cycle
from neurons.miner.context import Context
from neurons.miner.cycle import BEFORE_COMMITMENT, State, Submission

STARTED = BEFORE_COMMITMENT - {State.NEW}
"""States that return to NEW when the kernels change."""


def end_pauses(context: Context) -> None:
    """Resume this hotkey's paused submissions now, even if their pauses have not ended."""
    for submission in context.journal.live_submissions(context.identity.hotkey):
        if submission.paused:
            resume(submission, context)


def resume(paused: Submission, context: Context) -> Submission:
    """Resume a FAILED or HELD submission; its rejections and failures still count."""
    if paused.state is State.HELD or paused.id not in context.logged_failures:
        context.log.info("trying again", submission=paused.id, reason=paused.reason)
    return context.record(paused, cycle.resume(paused, context.now()))


def current(context: Context) -> Submission:
    """Return the submission to continue: the live one, resumed if it is due, or a new one."""
    submission = live(context)
    if submission is None:
        submission = create(context)
    elif submission.state is State.HELD and is_due(submission, context):
        submission = resume(submission, context)
    elif submission.state is not State.HELD:
        state = submission.position.value
        context.log.info("continuing", submission=submission.id, state=state)
    if submission.state in STARTED and submission.content_digest != context.content_digest():
        context.log.info("the kernels changed", submission=submission.id)
        return context.move(submission, State.NEW)
    return submission


def live(context: Context) -> Submission | None:
    return context.journal.live(context.identity.hotkey, context.settings.target)


def create(context: Context) -> Submission:
    """Create a submission; it repeats a premature commitment's claim if it can be sent directly."""
    settings, journal = context.settings, context.journal
    mode, now = context.submission_mode, context.now()
    last = journal.last_closed(context.identity.hotkey, context.settings.target)
    if (
        last is not None
        and last.never_revealed
        and mode == "direct"
        and last.content_digest == context.content_digest()
        and last.api_url == context.client.base_url
    ):
        submission = journal.insert(cycle.direct_draft(last, now))
    else:
        draft = Submission(
            id=0,
            hotkey=context.identity.hotkey,
            target_sequence_length=context.settings.target or 0,  # with `auto`, the claim sets it
            mode=mode,
            publish_at="before_commit" if mode == "direct" else settings.publish_at,
            api_url=context.client.base_url,
            auto_target=context.settings.target is None,
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
    """Return commitments to other targets; abandon uncommitted submissions to other targets."""
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
        elif cycle.may_continue(other, context.now()):
            committed.append(resume(other, context))
    return committed


def is_due(held: Submission, context: Context) -> bool:
    """Return whether a HELD submission's pause has ended, or its kernels have changed."""
    if cycle.may_continue(held, context.now()):
        return True
    return (
        held.paused and held.position in STARTED and held.content_digest != context.content_digest()
    )


def seconds_to_retry(context: Context) -> float:
    """Return the seconds until the next pause of this hotkey's submissions ends."""
    now, hotkey = context.now(), context.identity.hotkey
    paused = [one for one in context.journal.live_submissions(hotkey) if one.paused]
    return min(((one.retry_at or now) - now for one in paused), default=float("inf"))
