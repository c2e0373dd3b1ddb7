"""Handles premature commitments: those that a validator judged before their reveal."""

from __future__ import annotations

from neurons.miner.context import Context
from neurons.miner.cycle import Submission


def submission_mode(context: Context) -> str:
    """Return the mode; `auto` is `direct` for some time after a premature commitment."""
    chosen = context.settings.submission_mode
    if chosen != "auto":
        return chosen
    known = context.journal.judges_early(context.client.base_url, context.now()) is not None
    return "direct" if known else "commit_reveal"


def insists_on_reveal(context: Context) -> bool:
    """Return whether the settings require a reveal even of a premature commitment."""
    return context.settings.submission_mode == "commit_reveal"


def note_early_judgement(submission: Submission, context: Context) -> Submission:
    """Journal that `submission` was premature, and log a warning."""
    now = context.now()
    context.journal.note_early_judgement(context.client.base_url, now)
    submission = context.note(submission, judged_early_at=now)
    context.log.warning(
        "this API judges commitments before their reveal",
        submission=submission.id,
        from_now_on="SUBMISSION_MODE=commit_reveal, as set; auto or direct would be measured"
        if insists_on_reveal(context)
        else "direct submissions",
    )
    return submission


def suspect_early_judgement(submission: Submission, context: Context) -> None:
    """Journal that `submission` may have been premature: its verdict may lack a measurement."""
    context.journal.note_early_judgement(context.client.base_url, context.now())
    context.log.info(
        "a validator may have fetched the commitment before its reveal",
        submission=submission.id,
        from_now_on="SUBMISSION_MODE=commit_reveal, as set"
        if insists_on_reveal(context)
        else "direct submissions for the length of a round",
    )


def warn_of_early_judgement(context: Context) -> None:
    """Warn if the settings require commit_reveal although this API had premature commitments."""
    known = context.journal.judges_early(context.client.base_url, context.now())
    if insists_on_reveal(context) and known is not None:
        context.log.warning(
            "this API shows signs of judging commitments before their reveal, when nothing can "
            "be measured; SUBMISSION_MODE=auto or direct avoids that"
        )
