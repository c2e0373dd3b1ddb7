"""MEASURED to CLAIMED: derives what is claimed from the accepted measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.claim import Claim, NoClaim, derive_claim
from harness.report import Measurement
from neurons.miner.context import Context
from neurons.miner.cycle import State, Submission
from neurons.miner.reports import load_runs
from neurons.runtime.errors import Held
from neurons.wire.rules import weighted_score


def run(submission: Submission, context: Context) -> Submission:
    """Journal the claim; measurements that are gone or torn are taken again."""
    runs = load_runs(submission, context)
    if runs is None:
        return context.move(submission, State.PUBLISHED, report=None)
    headroom = context.settings.claim_headroom
    try:
        if submission.auto_target:
            claim = best_claim(runs, headroom)
        else:
            claim = derive_claim(runs, submission.target_sequence_length, headroom)
    except NoClaim as error:
        raise Held(
            f"Nothing can be claimed: {error}.",
            "Set TARGET_SEQUENCE_LENGTH to a length that this machine measures (the report "
            f"{submission.report} says which); `python -m neurons.miner abandon` measures anew.",
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


def best_claim(runs: Mapping[int, Sequence[Measurement]], headroom: float) -> Claim:
    """Return the claim with the best tokens/s times multiplier over the measured lengths.

    Raises:
        NoClaim: no length has an accepted run.
    """
    claims = []
    for length in runs:
        try:
            claims.append(derive_claim(runs, length, headroom))
        except NoClaim:
            continue
    if not claims:
        raise NoClaim("no length was measured")
    return max(claims, key=lambda c: weighted_score(c.tokens_per_sec, c.target_sequence_length))
