"""The routes that miners write through: register, submit, commit, reveal.

Checks run in this order: 413 size, 422 malformed JSON, 401 headers, 429 rate, 422 fields, 403
another hotkey, 401 body signature, 400 fork's address, 403 not on the chain. A submission or
commitment is then refused with 404 unregistered or 403 banned, and a commitment with 409 if its
hash is stored already.
"""

from __future__ import annotations

from fastapi import APIRouter

from neurons.validator_api import auth
from neurons.validator_api.api import TheApi
from neurons.validator_api.auth import TheCaller
from neurons.validator_api.competition import bans, submissions
from neurons.wire import protocol

router = APIRouter(tags=["miners"])


@router.post("/register_miner")
def register_miner(
    caller: TheCaller, body: protocol.RegisterRequest, api: TheApi
) -> protocol.RegisterReply:
    """Register the calling hotkey for a model and a league."""
    auth.check_same_hotkey(body.hotkey, caller)
    api.check_on_chain(caller.hotkey)
    with api.write() as t:
        return submissions.register(t, body)


@router.post("/submit_kernel")
def submit_kernel(
    caller: TheCaller, body: protocol.SubmitRequest, api: TheApi
) -> protocol.SubmitReply:
    """Submit a fork and its claim without commit and reveal."""
    auth.check_body("/submit_kernel", body, caller)
    auth.check_fork_url(body.fork_url, allow_files=api.settings.allow_file_forks)
    api.check_on_chain(caller.hotkey)
    with api.write() as t:
        return submissions.submit(t, body, caller.client)


@router.post("/commit_submission")
def commit_submission(
    caller: TheCaller, body: protocol.CommitRequest, api: TheApi
) -> protocol.CommitReply:
    """Commit to a fork; its address stays hidden until the reveal."""
    auth.check_body("/commit_submission", body, caller)
    api.check_on_chain(caller.hotkey)
    with api.write() as t:
        return submissions.commit(t, body, caller.client)


@router.post("/reveal_submission")
def reveal_submission(
    caller: TheCaller, body: protocol.RevealRequest, api: TheApi
) -> protocol.RevealReply:
    """Reveal the fork and the claim of a commitment."""
    auth.check_body("/reveal_submission", body, caller)
    auth.check_fork_url(body.fork_url, allow_files=api.settings.allow_file_forks)
    try:
        with api.write() as t:
            return submissions.reveal(t, body)
    except submissions.CommitmentMismatch:
        with api.write() as t:
            bans.record_failure(t, caller.client)
        raise
