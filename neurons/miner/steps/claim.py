"""The step from MEASURED to CLAIMED: derives the claim from the accepted samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.claim import Claim, NoClaim, derive_claim
from harness.report import ReportError, load_report
from harness.sample import Sample
from neurons.miner.context import Context
from neurons.miner.cycle import State, Submission
from neurons.runtime.errors import Held
from neurons.wire.rules import weighted_score


def run(submission: Submission, context: Context) -> Submission:
    """Journal the claim; return to PUBLISHED, to measure again, if the samples are lost."""
    samples = _samples(submission, context)
    if samples is None:
        return context.move(submission, State.PUBLISHED, report=None)
    headroom = context.settings.claim_headroom
    try:
        if submission.auto_target:
            claim = best_claim(samples, headroom)
        else:
            claim = derive_claim(samples, submission.target_sequence_length, headroom)
    except NoClaim as error:
        raise Held(
            f"Nothing can be claimed: {error}.",
            "Set TARGET_SEQUENCE_LENGTH to a length that this machine measures (the report "
            f"{submission.report} lists them); `{context.script} abandon` measures again.",
        ) from error
    for sentence in claim.rejected:
        context.log.warning("not counted", reason=sentence)
    context.log.info(f"claim: {claim}")
    return context.move(
        submission,
        State.CLAIMED,
        target_sequence_length=claim.target_sequence_length,
        tokens_per_sec=claim.tokens_per_sec,
        vram_mb=claim.vram_mb,
        benchmarks=claim.benchmarks,
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
