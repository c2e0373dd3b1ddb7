"""Registration, commit, reveal, direct submission, the validators' marks, and what all can see."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from fastapi import HTTPException
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from neurons import protocol, rules
from neurons.validator_api import bans, rounds
from neurons.validator_api.config import ApiConfig
from neurons.validator_api.storage import LeagueEntry, Miner, Submission

NO_ID = "submission_id required"
NOT_FOUND = "Submission not found"


class CommitmentMismatch(HTTPException):
    """The reveal does not hash to its commitment; it counts against the caller's address."""

    def __init__(self) -> None:
        super().__init__(400, "Commitment verification failed. Hash mismatch.")


def register(
    session: Session, request: protocol.RegisterRequest, now: datetime
) -> protocol.RegisterReply:
    """Register the hotkey for a model and league; the first time it gets the next free uid."""
    miner = session.get(Miner, request.hotkey)
    if miner is None:
        highest = session.scalar(select(func.max(Miner.uid)))
        uid = 0 if highest is None else highest + 1
        miner = Miner(hotkey=request.hotkey, uid=uid, registered_at=now)
        session.add(miner)
        session.flush()
    asked = request.model_dump()
    known = session.get(LeagueEntry, asked) is not None
    if not known:
        session.add(LeagueEntry(**asked, registered_at=now))
    status = "already_registered" if known else "registered"
    return protocol.RegisterReply(status=status, uid=miner.uid, **asked)


def check_may_submit(session: Session, hotkey: str, ip_address: str, now: datetime) -> None:
    """Refuse an unregistered hotkey (404) and a banned address (403)."""
    if session.get(Miner, hotkey) is None:
        raise HTTPException(404, "Miner not registered")
    left = bans.ban_left(session, ip_address, now)
    if left is not None:
        hours = left.total_seconds() / 3600
        raise HTTPException(403, f"IP address banned: IP banned for {hours:.1f} more hours")


def submit(
    session: Session, request: protocol.SubmitRequest, ip_address: str, now: datetime
) -> protocol.SubmitReply:
    """Store a direct submission."""
    check_may_submit(session, request.miner_hotkey, ip_address, now)
    row = _add(
        session,
        request,
        ip_address,
        now,
        is_revealed=True,
        repo_hash=request.repo_hash,
        **_claim(request),
    )
    return protocol.SubmitReply(
        submission_id=row.id,
        created_at=now.isoformat(),
        **request.model_dump(exclude={"signature"}),
    )


def commit(
    session: Session, request: protocol.CommitRequest, ip_address: str, config: ApiConfig
) -> protocol.CommitReply:
    """Store a commitment; the reveal opens `blocks_until_reveal` blocks later."""
    now = config.now()
    check_may_submit(session, request.miner_hotkey, ip_address, now)
    taken = select(Submission.id).where(Submission.commitment_hash == request.commitment_hash)
    if session.scalars(taken).first() is not None:
        raise HTTPException(409, "Commitment hash already exists. Use a different salt.")
    reveal_block = current_block(config) + config.blocks_until_reveal
    row = _add(
        session,
        request,
        ip_address,
        now,
        commitment_hash=request.commitment_hash,
        reveal_block=reveal_block,
        is_revealed=False,
    )
    seconds = config.blocks_until_reveal * config.block_time_seconds
    return protocol.CommitReply(
        submission_id=row.id,
        commitment_hash=request.commitment_hash,
        reveal_block=reveal_block,
        estimated_reveal_time=(now + timedelta(seconds=seconds)).isoformat(),
        message=f"Commitment accepted. Reveal after block {reveal_block} "
        f"(~{seconds // 60} minutes)",
    )


def reveal(
    session: Session, request: protocol.RevealRequest, config: ApiConfig
) -> protocol.RevealReply:
    """Check the reveal against its commitment and store what it says.

    Raises:
        CommitmentMismatch: salt and URL do not hash to the commitment; nothing was stored.
    """
    row = session.get(Submission, request.submission_id)
    if row is None or row.miner_hotkey != request.miner_hotkey:
        raise HTTPException(404, NOT_FOUND)
    if row.is_revealed or row.reveal_block is None:
        raise HTTPException(409, "Submission already revealed")
    blocks = row.reveal_block - current_block(config)
    if blocks > 0:
        minutes = blocks * config.block_time_seconds // 60
        raise HTTPException(425, f"Cannot reveal yet. Wait {blocks} blocks (~{minutes} minutes)")
    committed = request.docker_image or request.fork_url
    if protocol.commitment_hash(request.commitment_salt, committed) != row.commitment_hash:
        raise CommitmentMismatch
    row.is_revealed = True
    row.commitment_salt = request.commitment_salt
    row.signature = request.signature
    row.docker_image = request.docker_image
    for name, value in _claim(request).items():
        setattr(row, name, value)
    return protocol.RevealReply(
        submission_id=row.id,
        miner_hotkey=row.miner_hotkey,
        fork_url=request.fork_url,
        commit_hash=request.commit_hash,
        is_revealed=True,
        message="Submission revealed successfully. Awaiting validation.",
    )


def pending_reveals(session: Session, config: ApiConfig) -> protocol.PendingReveals:
    """Return every commitment that waits for its reveal, oldest first."""
    block = current_block(config)
    waiting = select(Submission).where(Submission.is_revealed.is_(False)).order_by(Submission.id)
    return protocol.PendingReveals(
        current_block=block,
        pending_reveals=[
            protocol.PendingReveal(
                submission_id=row.id,
                miner_hotkey=row.miner_hotkey,
                commitment_hash=f"{row.commitment_hash or '':.16}...",
                reveal_block=row.reveal_block or 0,
                blocks_remaining=max(0, (row.reveal_block or 0) - block),
                can_reveal=(row.reveal_block or 0) <= block,
                created_at=row.created_at.isoformat(),
            )
            for row in session.scalars(waiting)
        ],
    )


def mark_validated(
    session: Session, request: protocol.MarkValidatedRequest, now: datetime
) -> dict[str, Any]:
    """Store a validator's score; a score above 0 clears the address's failures."""
    row = _marked(session, request.submission_id)
    if not row.is_revealed:
        raise HTTPException(409, "Submission not revealed yet")
    row.validated_at = now
    row.score = request.score
    if row.ip_address and request.score > 0:
        bans.record_success(session, row.ip_address)
    return {"status": "ok", "submission_id": row.id, "score": row.score}


def record_verification(session: Session, found: protocol.Verification) -> dict[str, Any]:
    """Store the outcome of a logit verification."""
    row = _marked(session, found.submission_id)
    row.verification_passed = found.verified
    row.cosine_similarity = found.cosine_similarity
    row.max_abs_diff = found.max_abs_diff
    row.throughput_verified = found.throughput
    row.verification_reason = found.reason
    return {"status": "recorded", "verified": found.verified}


def current_block(config: ApiConfig) -> int:
    """Return the block number of this moment."""
    return rules.block_at(config.clock(), config.block_time_seconds)


def _add(
    session: Session,
    request: protocol.SubmitRequest | protocol.CommitRequest,
    ip_address: str,
    now: datetime,
    **fields: Any,
) -> Submission:
    """Add a row of the current round and return it with its id."""
    row = Submission(
        miner_hotkey=request.miner_hotkey,
        round_id=rounds.current(session, now).id,
        target_sequence_length=request.target_sequence_length,
        signature=request.signature,
        ip_address=ip_address,
        created_at=now,
        **fields,
    )
    session.add(row)
    session.flush()
    return row


def _claim(request: protocol.ClaimRequest) -> dict[str, Any]:
    """Return the columns that a claim fills."""
    names = {"fork_url", "commit_hash", "tokens_per_sec", "vram_mb", "benchmarks"}
    return request.model_dump(include=names)


def _marked(session: Session, submission_id: int | None) -> Submission:
    if submission_id is None:
        raise HTTPException(400, NO_ID)
    row = session.get(Submission, submission_id)
    if row is None:
        raise HTTPException(404, NOT_FOUND)
    return row
