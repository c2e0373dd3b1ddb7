"""The HTML pages: the leaderboard, a round, the history, a submission, the API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response

from neurons.validator_api.api import TheApi
from neurons.validator_api.pages import leaderboard, reference
from neurons.validator_api.pages import submission as submissions
from neurons.validator_api.pages.render import NOT_REFRESHED, page, style_sheet
from neurons.wire.protocol import RowId

REFRESH_SECONDS = 20
"""Seconds after which a page that can still change reloads."""

router = APIRouter(include_in_schema=False)


@router.get("/")
def front_page(api: TheApi, refresh: str = "") -> Response:
    """Show the newest round: its ranking, the time left, the latest verdicts."""
    shown = api.read(leaderboard.leaderboard)
    return _live("round.html", api, refresh, shown=shown, home=True)


@router.get("/rounds")
def history(api: TheApi, before: RowId | None = None) -> Response:
    """Show the rounds, the newest first."""
    shown = api.read(lambda session, context: leaderboard.history(session, context, before))
    return page("rounds.html", now=api.context().now, shown=shown)


@router.get("/rounds/{number}")
def one_round(number: RowId, api: TheApi, refresh: str = "") -> Response:
    """Show a round's ranking."""
    shown = api.read(lambda session, context: leaderboard.one_round(session, context, number))
    if shown is None or shown.round is None:
        raise HTTPException(404, "Round not found")
    if not shown.round.remaining:
        return page("round.html", now=api.context().now, shown=shown, home=False)
    return _live("round.html", api, refresh, shown=shown, home=False)


@router.get("/submissions/{number}")
def submission(number: RowId, api: TheApi, refresh: str = "") -> Response:
    """Show a submission: its claim after the reveal, the measured speeds, the verdict."""
    shown = api.read(lambda session, context: submissions.submission(session, context, number))
    if shown is None:
        raise HTTPException(404, "Submission not found")
    if not shown.open:
        return page("submission.html", now=api.context().now, shown=shown)
    return _live("submission.html", api, refresh, shown=shown)


@router.get("/docs")
def api_reference(request: Request) -> Response:
    """Show the API's calls, from the document at /openapi.json."""
    return page("reference.html", calls_by_tag=reference.calls_by_tag(request.app.openapi()))


@router.get("/style.css")
def style() -> Response:
    """Return the pages' style sheet."""
    return style_sheet()


def _live(name: str, api: TheApi, refresh: str, **values: Any) -> Response:
    """Return a page that reloads periodically unless the reader has paused it."""
    paused = refresh == NOT_REFRESHED
    return page(name, now=api.context().now, refresh=REFRESH_SECONDS, paused=paused, **values)
