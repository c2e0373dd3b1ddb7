"""Registration, reveal and direct submission: what a miner may write beside commitments."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from neurons.validator_api.competition import bans, rounds
from neurons.validator_api.competition.moment import Moment
from neurons.validator_api.competition.withdrawals import Arrival, withdraw_replaced
from neurons.validator_api.config import ApiConfig
from neurons.validator_api.database.tables import LeagueEntry, Miner, Submission
from neurons.wire import protocol
from neurons.wire.binding import bound_commitment

NOT_FOUND = "Submission not found"
NOT_REGISTERED = "Miner not registered"
LEAGUE_ENTRIES = 64
"""Registrations of one hotkey, each for a model and a league."""


class CommitmentMismatch(HTTPException):
    """The reveal does not hash to its commitment; it counts against the client."""

    def __init__(self) -> None:
        super().__init__(400, "Commitment verification failed. Hash mismatch.")


def register(
    session: Session, request: protocol.RegisterRequest, moment: Moment
) -> protocol.RegisterReply:
    """Register the hotkey for a model and league; the first time it gets the next free uid."""
    miner = session.get(Miner, request.hotkey)
    if miner is None:
        highest = session.scalar(select(func.max(Miner.uid)))
        uid = 0 if highest is None else highest + 1
        miner = Miner(hotkey=request.hotkey, uid=uid, registered_at=moment.now)
        session.add(miner)
        session.flush()
    asked = request.model_dump()
    known = session.get(LeagueEntry, asked) is not None
    if not known:
        _check_few_entries(session, request.hotkey)
        session.add(LeagueEntry(**asked, registered_at=moment.now))
    status = "already_registered" if known else "registered"
    uid_shown = rounds.uid_of(session, request.hotkey, moment)
    return protocol.RegisterReply(status=status, uid=uid_shown, **asked)


def submit(
    session: Session, request: protocol.SubmitRequest, client: str, moment: Moment
) -> protocol.SubmitReply:
    """Store a direct submission; the same one a second time in a round is the first one.

    So a repeated request does no harm, and no claim is judged until chance favours it.

    Args:
        client: what bans count the caller under.
    """
    _check_may_submit(session, request.miner_hotkey, client, moment)
    claim = _claim(request, request.target_sequence_length)
    found = _same_in_round(session, request, claim, moment)
    row = found or _add(
        session,
        request,
        client,
        moment,
        is_revealed=True,
        repo_hash=request.repo_hash,
        **claim,
    )
    return protocol.SubmitReply(
        submission_id=row.id,
        created_at=row.created_at.isoformat(),
        **(request.model_dump(exclude={"signature", "version"}) | claim),
    )


def reveal(
    session: Session, request: protocol.RevealRequest, moment: Moment, config: ApiConfig
) -> protocol.RevealReply:
    """Check the reveal against its commitment and store what it says.

    Raises:
        CommitmentMismatch: it does not hash to the commitment; nothing was stored.
    """
    row = session.get(Submission, request.submission_id)
    if row is None or row.miner_hotkey != request.miner_hotkey:
        raise HTTPException(404, NOT_FOUND)
    if row.is_revealed or row.reveal_block is None:
        raise HTTPException(409, "Submission already revealed")
    if row.reveal_block < moment.oldest_block:
        last = row.reveal_block + config.reveal_window_blocks
        raise HTTPException(404, f"{NOT_FOUND}: the commitment expired at block {last}")
    if row.withdrawn_at is not None:
        raise HTTPException(404, f"{NOT_FOUND}: a newer one of this target took its place")
    blocks = row.reveal_block - moment.block
    if blocks > 0:
        minutes = blocks * config.block_time_seconds // 60
        raise HTTPException(425, f"Cannot reveal yet. Wait {blocks} blocks (~{minutes} minutes)")
    _check_commitment(row, request)
    row.is_revealed = True
    _withdraw_replaced(session, row, moment)
    row.commitment_salt = request.commitment_salt
    row.signature = request.signature
    row.docker_image = request.docker_image
    for name, value in _claim(request, row.target_sequence_length).items():
        setattr(row, name, value)
    return protocol.RevealReply(
        submission_id=row.id,
        miner_hotkey=row.miner_hotkey,
        fork_url=request.fork_url,
        commit_hash=request.commit_hash,
        is_revealed=True,
        message="Submission revealed successfully. Awaiting validation.",
    )


def _check_commitment(row: Submission, request: protocol.RevealRequest) -> None:
    """Refuse a reveal of something else than was committed to.

    The public server takes a Docker image in the place of the fork, and so leaves the fork open
    until the reveal. Here the fork's address is always what counts.
    """
    salt = request.commitment_salt
    if row.commitment_version == protocol.WIRE_VERSION:
        found = bound_commitment(salt, row.target_sequence_length, request)
    else:
        found = protocol.commitment_hash(salt, request.fork_url)
    if found == row.commitment_hash:
        return
    image = request.docker_image
    if image and protocol.commitment_hash(salt, image) == row.commitment_hash:
        raise HTTPException(
            400, "This server judges forks: commit to fork_url in place of docker_image."
        )
    raise CommitmentMismatch


def _check_may_submit(session: Session, hotkey: str, client: str, moment: Moment) -> None:
    """Refuse an unregistered hotkey (404) and a banned client (403)."""
    if session.get(Miner, hotkey) is None:
        raise HTTPException(404, NOT_REGISTERED)
    bans.check_not_banned(session, client, moment.now)


def _check_few_entries(session: Session, hotkey: str) -> None:
    entries = select(func.count()).select_from(LeagueEntry).where(LeagueEntry.hotkey == hotkey)
    if (session.scalar(entries) or 0) >= LEAGUE_ENTRIES:
        raise HTTPException(
            409,
            f"This hotkey has {LEAGUE_ENTRIES} registrations. Submissions need none of a new "
            "model or league.",
        )


def _same_in_round(
    session: Session,
    request: protocol.SubmitRequest,
    claim: dict[str, Any],
    moment: Moment,
) -> Submission | None:
    """Return the hotkey's direct submission of this very claim in the present round, if any."""
    exact = {name: claim[name] for name in ("fork_url", "commit_hash", "tokens_per_sec", "vram_mb")}
    alike = session.scalars(
        select(Submission)
        .filter_by(
            miner_hotkey=request.miner_hotkey,
            round_id=rounds.current(session, moment).id,
            target_sequence_length=request.target_sequence_length,
            commitment_hash=None,
            withdrawn_at=None,
            repo_hash=request.repo_hash,
            **exact,
        )
        .order_by(Submission.id)
    )
    return next((row for row in alike if row.benchmarks == claim["benchmarks"]), None)


def _add(
    session: Session,
    request: protocol.SubmitRequest,
    client: str,
    moment: Moment,
    **fields: Any,
) -> Submission:
    """Add a row of the current round in the place of what it replaces; return it with its id."""
    row = Submission(
        miner_hotkey=request.miner_hotkey,
        round_id=rounds.current(session, moment).id,
        target_sequence_length=request.target_sequence_length,
        signature=request.signature,
        ip_address=client,
        created_at=moment.now,
        **fields,
    )
    session.add(row)
    session.flush()
    _withdraw_replaced(session, row, moment)
    return row


def _withdraw_replaced(session: Session, row: Submission, moment: Moment) -> None:
    arrival = Arrival(row.id, row.miner_hotkey, row.target_sequence_length, is_commit=False)
    withdraw_replaced(session, [arrival], moment)


def _claim(request: protocol.ClaimRequest, target: int) -> dict[str, Any]:
    """Return the columns that a claim fills."""
    claim = request.model_dump(include={"fork_url", "commit_hash", "tokens_per_sec", "vram_mb"})
    return claim | {"benchmarks": protocol.known_figures(request.benchmarks, target)}
