"""The routes of validators: queue, verdicts, failures, rounds.

Requests are signed as a whole (`auth.validator`); `Api.write` accepts each one once.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from neurons.validator_api.api import TheApi
from neurons.validator_api.auth import Validator
from neurons.validator_api.competition import bans, lists, rounds, verdicts
from neurons.wire import protocol

QUEUE_PAGE = 100

router = APIRouter(tags=["validators"])


@router.get("/validation_queue")
def validation_queue(
    _: Validator,
    api: TheApi,
    after: protocol.RowId = 0,
    limit: Annotated[int, Query(ge=1, le=QUEUE_PAGE)] = QUEUE_PAGE,
) -> protocol.ValidationQueue:
    """List a page of the submissions that wait for a verdict, oldest first."""
    with api.read() as t:
        return lists.validation_queue(t, after, limit)


@router.post("/mark_validated")
def mark_validated(
    call: Validator, body: protocol.MarkValidatedRequest, api: TheApi
) -> dict[str, Any]:
    """Store a submission's score."""
    with api.write(call) as t:
        return verdicts.mark_validated(t, body, call.hotkey)


@router.post("/record_verification")
def record_verification(
    call: Validator, api: TheApi, verification: Annotated[protocol.Verification, Query()]
) -> dict[str, Any]:
    """Store the outcome of a logit verification."""
    with api.write(call) as t:
        return verdicts.record_verification(t, verification, call.hotkey)


@router.post("/record_failure")
def record_failure(call: Validator, body: protocol.FailureRequest, api: TheApi) -> dict[str, str]:
    """Count a failed validation of the client that sent the submission."""
    client = body.ip_address
    key = bans.key_of(client)
    with api.write(call) as t:
        if key is not None:
            bans.record_failure(t, key)
    shared = "Not counted: several clients share this address"
    message = shared if key is None else "Failure recorded"
    return {"status": "ok", "ip_address": client, "message": message}


@router.post("/lift_ban")
def lift_ban(call: Validator, body: protocol.FailureRequest, api: TheApi) -> dict[str, str]:
    """End a client's ban and forget its failures."""
    with api.write(call) as t:
        bans.lift(t, bans.key_of(body.ip_address) or body.ip_address)
    return {"status": "ok", "ip_address": body.ip_address, "message": "Ban lifted"}


@router.post("/withdraw_submission")
def withdraw_submission(
    call: Validator, body: protocol.WithdrawRequest, api: TheApi
) -> dict[str, Any]:
    """Exclude a revealed submission from the queue and the ranking."""
    with api.write(call) as t:
        return verdicts.withdraw(t, body, call.hotkey)


@router.post("/create_round")
def create_round(call: Validator, body: protocol.CreateRoundRequest, api: TheApi) -> protocol.Round:
    """End the active round and open the next one."""
    with api.write(call) as t:
        return rounds.as_message(t, rounds.create(t, body))


@router.post("/finalize_round/{round_id}")
def finalize_round(round_id: protocol.RowId, call: Validator, api: TheApi) -> dict[str, Any]:
    """End a round, name its winner and freeze its places."""
    with api.write(call) as t:
        return rounds.finalize_by_id(t, round_id)
