"""The steps on this machine: NEW to PUBLISHED, to MEASURED, to CLAIMED."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.claim import Claim, NoClaim, derive_claim
from harness.report import ReportError, load_report
from harness.sample import Sample
from neurons.miner.context import Context
from neurons.miner.cycle import State, Submission
from neurons.miner.measuring import describe_machine, new_measurement
from neurons.miner.targets import targets_here
from neurons.runtime.errors import Held, HeldUntilRelease, Retry
from neurons.runtime.git.faults import HostRefused, PrivateFork
from neurons.wire.rules import FAILURES_BEFORE_BAN, weighted_score

MAX_REJECTIONS = 3


def publish(submission: Submission, context: Context) -> Submission:
    """Commit the kernels in the fork's checkout and publish them.

    Raises HeldUntilRelease after too many rejections, and the faults of `Fork`. The hotkey is
    registered first if the target is known.
    """
    rejections = context.journal.rejections(submission.hotkey)
    if rejections >= MAX_REJECTIONS:
        raise HeldUntilRelease(
            f"Validators rejected the last {rejections} submissions; {FAILURES_BEFORE_BAN} ban "
            "this machine's address or the hotkey for 24 hours.",
            "Find out why (run `bench` on the validators' kind of GPU), lower the claim by "
            f"CLAIM_HEADROOM if it was too high, then run `{context.script} release`.",
        )
    if not submission.auto_target:
        context.register(submission.target_sequence_length)
    digest = context.content_digest()
    commit = _publish(submission, context)
    context.published = commit
    return context.move(
        submission,
        State.PUBLISHED,
        fork_url=context.fork.url,
        commit_hash=commit,
        content_digest=digest,
    )


def _publish(submission: Submission, context: Context) -> str:
    """Commit the kernels, push them unless PUBLISH_AT defers that, and return the commit.

    Then check that validators can read the fork. A private fork raises PrivateFork. If the host
    refuses access for another reason, and an earlier submission had the same fork, raise Retry.
    """
    fork = context.fork
    try:
        fork.prepare()
        commit = fork.commit()
        if submission.publish_at == "before_commit":
            fork.push(commit)
            fork.verify(commit)
        else:
            fork.check_public()
        return commit
    except PrivateFork:
        raise
    except HostRefused as refusal:
        earlier = context.journal.latest(1000, hotkey=submission.hotkey)
        if fork.url not in {row.fork_url for row in earlier}:
            raise
        raise Retry(f"{refusal.reason} {refusal.remedy}") from refusal


def measure(submission: Submission, context: Context) -> Submission:
    """Take the samples that the claim needs, in addition to those from before a crash."""
    changed = context.content_digest() != submission.content_digest
    if not changed and context.published != submission.commit_hash:
        context.fork.prepare()
        context.published = context.fork.commit()
    if changed or context.published != submission.commit_hash:
        return context.move(submission, State.NEW)
    environment = describe_machine(context.settings.device, context.probe, context.stop)
    target = None if submission.auto_target else submission.target_sequence_length
    targets = targets_here(target, environment, context.settings)
    measurement = new_measurement(
        context.settings,
        context.fork.worktree,
        environment,
        f"{submission.commit_hash}-{environment.device}-{submission.id}",
        submission.commit_hash,
        context.log,
        stop=context.stop,
        measure=context.measure,
        check=context.check,
        wait=context.wait,
    )
    measurement.continue_after_crash()
    measurement.run_targets(targets)
    report = measurement.recorder.path.relative_to(context.settings.state_dir)
    return context.move(submission, State.MEASURED, report=str(report))


def claim(submission: Submission, context: Context) -> Submission:
    """Journal the claim; return to PUBLISHED, to measure again, if the samples are lost."""
    samples = _samples(submission, context)
    if samples is None:
        return context.move(submission, State.PUBLISHED, report=None)
    headroom = context.settings.claim_headroom
    try:
        if submission.auto_target:
            best = best_claim(samples, headroom)
        else:
            best = derive_claim(samples, submission.target_sequence_length, headroom)
    except NoClaim as error:
        raise Held(
            f"Nothing can be claimed: {error}.",
            "Set TARGET_SEQUENCE_LENGTH to a length that this machine measures (the report "
            f"{submission.report} lists them); `{context.script} abandon` measures again.",
        ) from error
    for sentence in best.rejected:
        context.log.warning("not counted", reason=sentence)
    context.log.info(f"claim: {best}")
    return context.move(
        submission,
        State.CLAIMED,
        target_sequence_length=best.target_sequence_length,
        tokens_per_sec=best.tokens_per_sec,
        vram_mb=best.vram_mb,
        benchmarks=best.benchmarks,
    )


def _samples(submission: Submission, context: Context) -> dict[int, list[Sample]] | None:
    """Return the samples in the submission's report by length; None without a usable report."""
    try:
        report = load_report(context.settings.state_dir / str(submission.report))
    except ReportError as error:
        context.log.warning("the report cannot be used", reason=str(error))
        return None
    return report.by_length() if report.commit == submission.commit_hash else None


def best_claim(samples: Mapping[int, Sequence[Sample]], headroom: float) -> Claim:
    """Return the claim with the best tokens/s times multiplier; NoClaim if there is none."""
    claims = []
    for length in samples:
        try:
            claims.append(derive_claim(samples, length, headroom))
        except NoClaim:
            continue
    if not claims:
        raise NoClaim("no length was measured")
    return max(claims, key=lambda c: weighted_score(c.tokens_per_sec, c.target_sequence_length))
