"""Stores validators' verdicts: scores with their reasons, and logit verifications."""

from __future__ import annotations

from typing import Any

from neurons.runtime.observe import get_logger
from neurons.validator_api.competition import bans
from neurons.validator_api.competition.rounds import Refusal, Transaction
from neurons.validator_api.competition.submissions import NOT_FOUND
from neurons.validator_api.database.tables import Submission
from neurons.wire import protocol

log = get_logger("validator_api")


def mark_validated(
    t: Transaction, request: protocol.MarkValidatedRequest, validator: str
) -> dict[str, Any]:
    """Store a validator's score.

    The first validator that judges a submission decides; it may judge again. The places of a
    completed round do not change. A score above 0 removes one of the client's failures, unless the
    logits were refuted.
    """
    if request.submission_id is None:
        raise Refusal(400, "submission_id required")
    row = _submission(t, request.submission_id, validator)
    if not row.is_revealed:
        raise Refusal(409, "Submission not revealed yet")
    row.validated_at = t.now
    row.score = request.score
    row.verdict_reason = request.reason
    row.validator_hotkey = validator
    row.validator_device = request.device
    row.measured = protocol.known_figures(request.measured, row.target_sequence_length)
    if row.ip_address and request.score > 0 and row.verification_passed is not False:
        bans.record_success(t, row.ip_address)
    return {"status": "ok", "submission_id": row.id, "score": row.score}


def record_verification(
    t: Transaction, verification: protocol.Verification, validator: str
) -> dict[str, Any]:
    """Store the outcome of a logit verification; raise a Refusal for an unknown submission."""
    row = _submission(t, verification.submission_id, validator)
    row.verification_passed = verification.verified
    row.cosine_similarity = verification.cosine_similarity
    row.max_abs_diff = verification.max_abs_diff
    row.throughput_verified = verification.throughput
    row.verification_reason = verification.reason
    return {"status": "recorded", "verified": verification.verified}


def withdraw(t: Transaction, request: protocol.WithdrawRequest, validator: str) -> dict[str, Any]:
    """Give a revealed submission the final score 0, without counting a failure.

    No later verdict replaces it, and the places of a completed round do not change.
    """
    row = _submission(t, request.submission_id, validator)
    if not row.is_revealed:
        raise Refusal(409, "Submission not revealed yet")
    row.validated_at, row.score, row.validator_hotkey = t.now, 0.0, validator
    row.verdict_reason = ": ".join(filter(None, (protocol.WITHDRAWN, request.reason)))
    log.warning("withdrawn", submission=row.id, reason=request.reason)
    return {"status": "ok", "submission_id": row.id}


def _submission(t: Transaction, submission_id: int, validator: str) -> Submission:
    row = t.session.get(Submission, submission_id)
    if row is None:
        raise Refusal(404, NOT_FOUND)
    if row.validator_hotkey not in (None, validator):
        log.warning("judged twice", submission=row.id, first=row.validator_hotkey, other=validator)
        raise Refusal(400, f"{protocol.JUDGED} {row.validator_hotkey}")
    if (row.verdict_reason or "").startswith(protocol.WITHDRAWN):
        raise Refusal(400, f"{protocol.JUDGED} the organiser, who withdrew it")
    return row
