"""Requests of miners: registrations, commitments, reveals and direct submissions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import func, select, update

from neurons.validator_api.competition import bans, rounds
from neurons.validator_api.competition.rounds import Refusal, Transaction
from neurons.validator_api.database.tables import OPEN, LeagueEntry, Miner, Submission
from neurons.wire import protocol, rules

NOT_FOUND = "Submission not found"
MAX_OPEN = 10
"""Limit on a hotkey's open submissions."""


class CommitmentMismatch(Refusal):
    """The reveal does not match its commitment; this counts as a failure of the client."""

    def __init__(self) -> None:
        super().__init__(400, "Commitment verification failed. Hash mismatch.")


def register(t: Transaction, request: protocol.RegisterRequest) -> protocol.RegisterReply:
    """Register the hotkey for a model and league; a new hotkey gets the next free uid."""
    leagues = [league for _, league, _ in rules.LEAGUES]
    if request.league not in leagues:
        raise Refusal(400, f"Invalid league. Must be one of: {', '.join(leagues)}")
    miner = t.session.get(Miner, request.hotkey)
    if miner is None:
        highest = t.session.scalar(select(func.max(Miner.uid)))
        uid = 0 if highest is None else highest + 1
        miner = Miner(hotkey=request.hotkey, uid=uid, registered_at=t.now)
        t.session.add(miner)
        t.session.flush()
    entry = request.model_dump()
    known = t.session.get(LeagueEntry, entry) is not None
    if not known:
        t.session.add(LeagueEntry(**entry, registered_at=t.now))
    status = "already_registered" if known else "registered"
    uid_shown = rounds.uid_of(t, request.hotkey)
    return protocol.RegisterReply(status=status, uid=uid_shown, **entry)


def commit(t: Transaction, request: protocol.CommitRequest, client: str) -> protocol.CommitReply:
    """Store a commitment, which can be revealed `blocks_until_reveal` blocks later.

    Raises a Refusal if the hash is stored already, the hotkey is not registered, or the caller's
    key for bans, `client`, is banned.
    """
    _check_may_submit(t, request.miner_hotkey, client)
    same = select(Submission.id).where(Submission.commitment_hash == request.commitment_hash)
    if t.session.scalar(same) is not None:
        raise Refusal(409, "Commitment hash already exists. Use a different salt.")
    block = t.block + t.settings.blocks_until_reveal
    row = _add(
        t,
        request,
        client,
        is_revealed=False,
        reveal_block=block,
        commitment_hash=request.commitment_hash,
        commitment_version=request.version or 1,
    )
    seconds = t.settings.blocks_until_reveal * t.settings.block_time_seconds
    return protocol.CommitReply(
        submission_id=row.id,
        commitment_hash=request.commitment_hash,
        reveal_block=block,
        estimated_reveal_time=(t.now + timedelta(seconds=seconds)).isoformat(),
        message=f"Commitment accepted. Reveal after block {block} (~{seconds // 60} minutes)",
    )


def submit(t: Transaction, request: protocol.SubmitRequest, client: str) -> protocol.SubmitReply:
    """Store a direct submission, or return the identical one of this round.

    A repeated request therefore has no effect: a miner cannot resubmit a claim until measurement
    noise favours it.
    """
    _check_may_submit(t, request.miner_hotkey, client)
    claim = _claim(request, request.target_sequence_length)
    row = _same_in_round(t, request, claim)
    if row is None:
        row = _add(t, request, client, is_revealed=True, repo_hash=request.repo_hash, **claim)
    return protocol.SubmitReply(
        submission_id=row.id,
        created_at=row.created_at.isoformat(),
        **(request.model_dump(exclude={"signature", "version"}) | claim),
    )


def reveal(t: Transaction, request: protocol.RevealRequest) -> protocol.RevealReply:
    """Check the reveal against its commitment and store its claim, or raise a Refusal."""
    row = _revealable(t, request)
    _check_commitment(row, request)
    row.is_revealed, row.revealed_at = True, t.now
    _withdraw_replaced(t, row)
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


def _revealable(t: Transaction, request: protocol.RevealRequest) -> Submission:
    """Return the hotkey's commitment, or raise a Refusal if it cannot be revealed now."""
    row = t.session.get(Submission, request.submission_id)
    if row is None or row.miner_hotkey != request.miner_hotkey:
        raise Refusal(404, NOT_FOUND)
    if row.is_revealed or row.reveal_block is None:
        raise Refusal(409, "Submission already revealed")
    if row.reveal_block < t.oldest_block:
        last = row.reveal_block + t.settings.reveal_window_blocks
        raise Refusal(404, f"{NOT_FOUND}: the commitment expired at block {last}")
    if row.withdrawn_at is not None:
        raise Refusal(404, f"{NOT_FOUND}: a newer submission replaced it")
    blocks = row.reveal_block - t.block
    if blocks > 0:
        minutes = blocks * t.settings.block_time_seconds // 60
        raise Refusal(425, f"Cannot reveal yet. Wait {blocks} blocks (~{minutes} minutes)")
    return row


def _check_commitment(row: Submission, request: protocol.RevealRequest) -> None:
    """Refuse a reveal that does not match its commitment.

    The public server also accepts a commitment to a Docker image, which does not fix the fork.
    """
    salt = request.commitment_salt
    if row.commitment_version == protocol.WIRE_VERSION:
        expected = protocol.bound_commitment(salt, row.target_sequence_length, request)
    else:
        expected = protocol.commitment_hash(salt, request.fork_url)
    if expected == row.commitment_hash:
        return
    image = request.docker_image
    if image and protocol.commitment_hash(salt, image) == row.commitment_hash:
        raise Refusal(
            400, "This server accepts only forks: commit to fork_url, not to docker_image."
        )
    raise CommitmentMismatch


def _check_may_submit(t: Transaction, hotkey: str, client: str) -> None:
    if t.session.get(Miner, hotkey) is None:
        raise Refusal(404, "Miner not registered")
    bans.check_not_banned(t, client)


def _same_in_round(
    t: Transaction, request: protocol.SubmitRequest, claim: dict[str, Any]
) -> Submission | None:
    """Return the hotkey's direct submission of exactly this claim in this round, if any."""
    exact = {name: claim[name] for name in ("fork_url", "commit_hash", "tokens_per_sec", "vram_mb")}
    same_columns = t.session.scalars(
        select(Submission)
        .filter_by(
            miner_hotkey=request.miner_hotkey,
            round_id=rounds.current(t).id,
            target_sequence_length=request.target_sequence_length,
            commitment_hash=None,
            withdrawn_at=None,
            repo_hash=request.repo_hash,
            **exact,
        )
        .order_by(Submission.id)
    )
    # PostgreSQL cannot compare JSON.
    return next((row for row in same_columns if row.benchmarks == claim["benchmarks"]), None)


def _add(
    t: Transaction,
    request: protocol.CommitRequest | protocol.SubmitRequest,
    client: str,
    **fields: Any,
) -> Submission:
    """Add a row to the current round, withdraw the rows it replaces, and return it with its id."""
    row = Submission(
        miner_hotkey=request.miner_hotkey,
        round_id=rounds.current(t).id,
        target_sequence_length=request.target_sequence_length,
        signature=request.signature,
        ip_address=client,
        created_at=t.now,
        **fields,
    )
    t.session.add(row)
    t.session.flush()
    _withdraw_replaced(t, row)
    return row


def _withdraw_replaced(t: Transaction, row: Submission) -> None:
    """Withdraw the hotkey's other open rows of this target, and its oldest beyond MAX_OPEN.

    An unrevealed row replaces only unrevealed ones. A validator may still judge a withdrawn row.
    """
    others = t.session.execute(
        select(Submission.id, Submission.target_sequence_length, Submission.is_revealed)
        .where(Submission.miner_hotkey == row.miner_hotkey, Submission.id != row.id, *OPEN)
        .order_by(Submission.id)
    ).all()
    replaced = [
        other.id
        for other in others
        if other.target_sequence_length == row.target_sequence_length
        and (row.is_revealed or not other.is_revealed)
    ]
    kept = [other.id for other in others if other.id not in replaced]
    replaced += kept[: max(0, len(kept) + 1 - MAX_OPEN)]
    if replaced:
        rows = update(Submission).where(Submission.id.in_(replaced))
        t.session.execute(
            rows.values(withdrawn_at=t.now).execution_options(synchronize_session=False)
        )


def _claim(request: protocol.ClaimRequest, target: int) -> dict[str, Any]:
    claim = request.model_dump(include={"fork_url", "commit_hash", "tokens_per_sec", "vram_mb"})
    return claim | {"benchmarks": protocol.known_figures(request.benchmarks, target)}
