"""The routes that miners write through: register, submit, commit, reveal.

Checks run in this order: 401 headers, 429 rate, 422 body, 403 another hotkey, 401 body signature,
404 unregistered, 403 banned, 409.
"""

from __future__ import annotations

from fastapi import APIRouter, HTTPException
from sqlalchemy.orm import Session

from neurons import protocol, rules
from neurons.validator_api.access import auth
from neurons.validator_api.access.addresses import Address, ban_key
from neurons.validator_api.access.limits import LimitedHotkey
from neurons.validator_api.api import TheApi
from neurons.validator_api.competition import bans, submissions
from neurons.validator_api.competition.moment import Moment

router = APIRouter(tags=["miners"])


@router.post("/register_miner")
def register_miner(
    hotkey: LimitedHotkey, body: protocol.RegisterRequest, api: TheApi
) -> protocol.RegisterReply:
    """Register the calling hotkey for a model and a league."""
    auth.check_same_hotkey(body.hotkey, hotkey)
    leagues = [league for _, league, _ in rules.LEAGUES]
    if body.league not in leagues:
        raise HTTPException(400, f"Invalid league. Must be one of: {', '.join(leagues)}")
    return api.write(lambda session, moment: submissions.register(session, body, moment))


@router.post("/submit_kernel")
def submit_kernel(
    hotkey: LimitedHotkey, body: protocol.SubmitRequest, address: Address, api: TheApi
) -> protocol.SubmitReply:
    """Take a submission without commit and reveal."""
    auth.check_same_hotkey(body.miner_hotkey, hotkey)
    auth.check_signed("/submit_kernel", body)
    client = _client(address, hotkey)
    return api.write(lambda session, moment: submissions.submit(session, body, client, moment))


@router.post("/commit_submission")
def commit_submission(
    hotkey: LimitedHotkey, body: protocol.CommitRequest, address: Address, api: TheApi
) -> protocol.CommitReply:
    """Take a commitment to a fork whose address stays hidden until the reveal."""
    auth.check_same_hotkey(body.miner_hotkey, hotkey)
    auth.check_signed("/commit_submission", body)
    client = _client(address, hotkey)

    def work(session: Session, moment: Moment) -> protocol.CommitReply:
        return submissions.commit(session, body, client, moment, api.config)

    return api.write(work)


@router.post("/reveal_submission")
def reveal_submission(
    hotkey: LimitedHotkey, body: protocol.RevealRequest, address: Address, api: TheApi
) -> protocol.RevealReply:
    """Open a commitment."""
    auth.check_same_hotkey(body.miner_hotkey, hotkey)
    auth.check_signed("/reveal_submission", body)
    try:
        return api.write(
            lambda session, moment: submissions.reveal(session, body, moment, api.config)
        )
    except submissions.CommitmentMismatch:
        client = _client(address, hotkey)
        api.write(lambda session, moment: bans.record_failure(session, client, moment.now))
        raise


def _client(address: str | None, hotkey: str) -> str:
    """Return what bans count the caller under."""
    return ban_key(address, hotkey) or hotkey
