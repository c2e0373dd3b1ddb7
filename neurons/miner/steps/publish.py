"""NEW to PUBLISHED: commits the kernels to the fork; pushes them unless PUBLISH_AT defers that."""

from __future__ import annotations

from neurons.miner.context import Context
from neurons.miner.cycle import State, Submission
from neurons.runtime.errors import HeldUntilRelease
from neurons.wire.rules import FAILURES_BEFORE_BAN

MAX_REJECTIONS = 3


def run(submission: Submission, context: Context) -> Submission:
    """Commit the kernels in the fork's checkout and publish them.

    Raises HeldUntilRelease after too many rejections, and the faults of `Fork`. The hotkey is
    registered first if the target is known.
    """
    rejections = context.journal.rejections(submission.hotkey)
    if rejections >= MAX_REJECTIONS:
        raise HeldUntilRelease(
            f"Validators rejected the last {rejections} submissions; {FAILURES_BEFORE_BAN} ban "
            "this machine's address for 24 hours.",
            "Find out why (`bench` on the validators' kind of GPU, a lower claim by "
            f"CLAIM_HEADROOM), then run `{context.script} release`.",
        )
    if not submission.auto_target:
        context.register(submission.target_sequence_length)
    digest = context.content_digest()
    commit = context.publish(submission)
    context.published = commit
    return context.move(
        submission,
        State.PUBLISHED,
        fork_url=context.fork.url,
        commit_hash=commit,
        content_digest=digest,
    )
