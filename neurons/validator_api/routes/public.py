"""The routes that anyone may read."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from neurons.validator_api.api import TheApi
from neurons.validator_api.competition import lists, rounds
from neurons.wire import protocol

PENDING_PAGE = 1000

router = APIRouter(tags=["public"])


@router.get("/health")
async def health() -> dict[str, str]:
    """Report that the server answers, whether or not its database does."""
    return {"status": "ok"}


@router.get("/get_current_round")
def get_current_round(api: TheApi) -> protocol.Round:
    """Show the active round; open one if there is none."""
    with api.read() as t:
        active = rounds.active(t.session)
        if active is not None:
            return rounds.as_message(t, active)
    with api.write() as t:
        return rounds.as_message(t, rounds.current(t))


@router.get("/pending_reveals")
def pending_reveals(
    api: TheApi,
    hotkey: protocol.Text | None = None,
    before: protocol.RowId | None = None,
    limit: Annotated[int, Query(ge=1, le=PENDING_PAGE)] = PENDING_PAGE,
) -> protocol.PendingReveals:
    """List the commitments that wait for their reveal, newest first, and the server's block.

    `hotkey` selects those of one miner. For the next page, `before` is the last row's number.
    """
    with api.read() as t:
        return lists.pending_reveals(t, hotkey, before, limit)


@router.get("/get_submission_stats")
def get_submission_stats(
    api: TheApi, limit: Annotated[int, Query(ge=1, le=100)] = 50
) -> protocol.SubmissionStats:
    """List the submissions that wait for a verdict, newest first, and the latest verdicts."""
    with api.read() as t:
        return lists.submission_stats(t, limit)


@router.get("/queue_place/{submission_id}")
def queue_place(submission_id: protocol.RowId, api: TheApi) -> protocol.QueuePlace:
    """Show a submission's place in the validators' queue by age, and an estimate of its wait."""
    with api.read() as t:
        return lists.queue_place(t, submission_id)


@router.get("/verification_stats")
def verification_stats(api: TheApi, round_id: protocol.RowId | None = None) -> dict[str, Any]:
    """Count the logit verifications."""
    with api.read() as t:
        return lists.verification_stats(t, round_id)


@router.get("/get_submission_rate")
def get_submission_rate(
    api: TheApi, window_minutes: Annotated[int, Query(ge=1, le=60 * 24 * 366)] = 10
) -> dict[str, Any]:
    """Count the submissions of the last minutes."""
    with api.read() as t:
        return lists.submission_rate(t, window_minutes)


@router.get("/get_weights")
def get_weights(api: TheApi, round_id: protocol.RowId | None = None) -> protocol.Weights:
    """Show the weights of a round, by default of the last completed one."""
    with api.read() as t:
        return rounds.weights(t, round_id)
