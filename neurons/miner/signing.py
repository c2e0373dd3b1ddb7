"""Makes the commitment and the signed requests of a claim, in the server's wire version."""

from __future__ import annotations

from typing import Any, TypeVar

from neurons.miner.cycle import Submission
from neurons.runtime.identity import Identity
from neurons.wire.protocol import (
    WIRE_VERSION,
    ClaimRequest,
    CommitRequest,
    RevealRequest,
    SubmitRequest,
    bound_commitment,
    bound_text,
    commitment_hash,
    submission_text,
)

Request = TypeVar("Request", CommitRequest, RevealRequest, SubmitRequest)


def commitment_of(submission: Submission, salt: str, wire_version: int) -> str:
    if wire_version < WIRE_VERSION:
        return commitment_hash(salt, str(submission.fork_url))
    claim = ClaimRequest(**_claim(submission), signature="-")
    return bound_commitment(salt, submission.target_sequence_length, claim)


def committed_version(submission: Submission) -> int | None:
    """Return the wire version of the journal's commitment hash; None if no version gives it."""
    for version in (1, WIRE_VERSION):
        if commitment_of(submission, str(submission.salt), version) == submission.commitment_hash:
            return version
    return None


def commit_request(submission: Submission, identity: Identity) -> CommitRequest:
    commitment = str(submission.commitment_hash)
    request = CommitRequest(
        miner_hotkey=submission.hotkey,
        commitment_hash=commitment,
        target_sequence_length=submission.target_sequence_length,
        signature=identity.sign(commitment),
    )
    version = committed_version(submission) or 1
    return _bound("/commit_submission", request, identity, version)


def submit_request(submission: Submission, identity: Identity, wire_version: int) -> SubmitRequest:
    target = submission.target_sequence_length
    request = SubmitRequest(target_sequence_length=target, **signed_claim(submission, identity))
    return _bound("/submit_kernel", request, identity, wire_version)


def _bound(route: str, request: Request, identity: Identity, wire_version: int) -> Request:
    """Return the request with a signature of all its fields, if the wire version supports that."""
    if wire_version < WIRE_VERSION:
        return request
    request = request.model_copy(update={"version": WIRE_VERSION})
    return request.model_copy(update={"signature": identity.sign(bound_text(route, request))})


def _claim(submission: Submission) -> dict[str, Any]:
    return {
        "miner_hotkey": submission.hotkey,
        "fork_url": str(submission.fork_url),
        "commit_hash": str(submission.commit_hash),
        "tokens_per_sec": float(submission.tokens_per_sec or 0.0),
        "vram_mb": submission.vram_mb,
        "benchmarks": submission.benchmarks,
    }


def signed_claim(submission: Submission, identity: Identity) -> dict[str, Any]:
    """Return the claim's fields with their signature in wire version 1."""
    claim = _claim(submission)
    text = submission_text(
        claim["fork_url"], claim["commit_hash"], claim["tokens_per_sec"], claim["benchmarks"]
    )
    return claim | {"signature": identity.sign(text)}


def reveal_request(submission: Submission, identity: Identity) -> RevealRequest:
    request = RevealRequest(
        submission_id=int(submission.submission_id or 0),
        commitment_salt=str(submission.salt),
        **signed_claim(submission, identity),
    )
    version = committed_version(submission) or 1
    return _bound("/reveal_submission", request, identity, version)
