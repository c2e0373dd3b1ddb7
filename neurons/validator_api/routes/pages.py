"""The HTML pages: the leaderboard, a round, the history, a submission, the API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response

from neurons.validator_api.api import TheApi
from neurons.validator_api.competition.rounds import Transaction
from neurons.validator_api.pages import leaderboard, reference
from neurons.validator_api.pages import submission as submissions
from neurons.validator_api.pages.render import NOT_REFRESHED, page, style_sheet
from neurons.wire.protocol import RowId

REFRESH_SECONDS = 20
"""Seconds after which a page that can still change reloads."""

router = APIRouter(include_in_schema=False)
router.get("/style.css")(style_sheet)


@router.get("/")
def front_page(api: TheApi, refresh: str = "") -> Response:
    """Show the newest round: its ranking, the time left, the latest verdicts."""
    with api.read() as t:
        shown = leaderboard.leaderboard(t)
    return _live("round.html", t, refresh, shown=shown, home=True)


@router.get("/rounds")
def history(api: TheApi, before: RowId | None = None) -> Response:
    """Show the rounds, the newest first."""
    with api.read() as t:
        shown = leaderboard.history(t, before)
    return page("rounds.html", now=t.now, shown=shown)


@router.get("/rounds/{number}")
def one_round(number: RowId, api: TheApi, refresh: str = "") -> Response:
    """Show a round's ranking."""
    with api.read() as t:
        shown = leaderboard.one_round(t, number)
    if shown is None or shown.round is None:
        raise HTTPException(404, "Round not found")
    if not shown.round.remaining:
        return page("round.html", now=t.now, shown=shown, home=False)
    return _live("round.html", t, refresh, shown=shown, home=False)


@router.get("/submissions/{number}")
def submission(number: RowId, api: TheApi, refresh: str = "") -> Response:
    """Show a submission: its claim after the reveal, the measured speeds, the verdict."""
    with api.read() as t:
        shown = submissions.submission(t, number)
    if shown is None:
        raise HTTPException(404, "Submission not found")
    if not shown.open:
        return page("submission.html", now=t.now, shown=shown)
    return _live("submission.html", t, refresh, shown=shown)


@router.get("/docs")
def api_reference(request: Request) -> Response:
    """Show the API's calls, from the document at /openapi.json."""
    return page("reference.html", calls_by_tag=reference.calls_by_tag(request.app.openapi()))


def _live(name: str, t: Transaction, refresh: str, **values: Any) -> Response:
    """Return a page that reloads periodically unless the reader has paused it."""
    paused = refresh == NOT_REFRESHED
    return page(name, now=t.now, refresh=REFRESH_SECONDS, paused=paused, **values)
