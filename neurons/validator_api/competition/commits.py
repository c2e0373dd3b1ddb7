"""Commitments: those that come at once are stored together, by statements that serve them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from fastapi import HTTPException
from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from neurons.validator_api.competition import bans, rounds
from neurons.validator_api.competition.moment import Moment
from neurons.validator_api.competition.submissions import NOT_REGISTERED
from neurons.validator_api.competition.withdrawals import Arrival, withdraw_replaced
from neurons.validator_api.config import ApiConfig
from neurons.validator_api.database.tables import Miner, Submission
from neurons.wire.protocol import CommitReply, CommitRequest


@dataclass(frozen=True)
class Commit:
    """A commitment that a miner sends, and what bans count its sender under."""

    request: CommitRequest
    client: str


def store(
    session: Session, commits: Sequence[Commit], moment: Moment, config: ApiConfig
) -> list[CommitReply | HTTPException]:
    """Store the commitments, as if each came by itself in the order given.

    The reveal opens `blocks_until_reveal` blocks later. Returns what each is answered, in order:
    a refusal is 404 for an unregistered hotkey, 403 for a banned client, 409 for a commitment that
    is there.
    """
    refusals = _refusals(session, commits, moment)
    accepted = [one for one, refusal in zip(commits, refusals, strict=True) if refusal is None]
    numbers = iter(_insert(session, accepted, moment, config))
    return [
        refusal or _reply(next(numbers), one.request, moment, config)
        for one, refusal in zip(commits, refusals, strict=True)
    ]


def _refusals(
    session: Session, commits: Sequence[Commit], moment: Moment
) -> list[HTTPException | None]:
    hashes = {one.request.commitment_hash for one in commits}
    hotkeys = {one.request.miner_hotkey for one in commits}
    registered = set(session.scalars(select(Miner.hotkey).where(Miner.hotkey.in_(hotkeys))))
    banned = bans.bans_of(session, {one.client for one in commits}, moment.now)
    known = select(Submission.commitment_hash).where(Submission.commitment_hash.in_(hashes))
    taken = set(session.scalars(known))
    found: list[HTTPException | None] = []
    for one in commits:
        refusal = None
        if one.request.miner_hotkey not in registered:
            refusal = HTTPException(404, NOT_REGISTERED)
        elif one.client in banned:
            refusal = bans.refusal(banned[one.client], moment.now)
        elif one.request.commitment_hash in taken:
            refusal = HTTPException(409, "Commitment hash already exists. Use a different salt.")
        else:
            taken.add(one.request.commitment_hash)
        found.append(refusal)
    return found


def _insert(
    session: Session, commits: Sequence[Commit], moment: Moment, config: ApiConfig
) -> list[int]:
    """Insert commitments of which each is new; return their numbers, in order."""
    if not commits:
        return []
    of_all: dict[str, Any] = {
        "round_id": rounds.current(session, moment).id,
        "created_at": moment.now,
        "reveal_block": moment.block + config.blocks_until_reveal,
        "is_revealed": False,
    }
    rows = [
        {
            **of_all,
            "miner_hotkey": one.request.miner_hotkey,
            "target_sequence_length": one.request.target_sequence_length,
            "signature": one.request.signature,
            "ip_address": one.client,
            "commitment_hash": one.request.commitment_hash,
            "commitment_version": one.request.version or 1,
        }
        for one in commits
    ]
    into = insert(Submission).returning(Submission.id, sort_by_parameter_order=True)
    numbers = list(session.scalars(into, rows))
    arrivals = [
        Arrival(number, row["miner_hotkey"], row["target_sequence_length"], is_commit=True)
        for number, row in zip(numbers, rows, strict=True)
    ]
    withdraw_replaced(session, arrivals, moment)
    return numbers


def _reply(number: int, request: CommitRequest, moment: Moment, config: ApiConfig) -> CommitReply:
    block = moment.block + config.blocks_until_reveal
    seconds = config.blocks_until_reveal * config.block_time_seconds
    return CommitReply(
        submission_id=number,
        commitment_hash=request.commitment_hash,
        reveal_block=block,
        estimated_reveal_time=(moment.now + timedelta(seconds=seconds)).isoformat(),
        message=f"Commitment accepted. Reveal after block {block} (~{seconds // 60} minutes)",
    )
