"""The HTML pages: the leaderboard, a round, the history, a submission, the API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response

from neurons.validator_api.api import TheApi
from neurons.validator_api.pages import leaderboard, reference
from neurons.validator_api.pages import submission as submissions
from neurons.validator_api.pages.render import NOT_REFRESHED, page, style_sheet

LARGEST = 2**31 - 1
REFRESH_SECONDS = 20
"""Seconds after which a page that can still change reloads."""

router = APIRouter(include_in_schema=False)


@router.get("/")
def front_page(api: TheApi, refresh: str = "") -> Response:
    """Show the newest round: its ranking, the time left, the latest verdicts."""
    shown = api.read(leaderboard.leaderboard)
    return _live("round.html", api, refresh, shown=shown, home=True)


@router.get("/rounds")
def history(api: TheApi, before: str = "") -> Response:
    """Show the rounds, the newest first."""
    start = _number(before)
    shown = api.read(lambda session, context: leaderboard.history(session, context, start))
    return page("rounds.html", now=api.context().now, shown=shown)


@router.get("/rounds/{number}")
def one_round(number: str, api: TheApi, refresh: str = "") -> Response:
    """Show a round's ranking."""
    wanted = _existing(number)
    shown = api.read(lambda session, context: leaderboard.one_round(session, context, wanted))
    if shown is None or shown.round is None:
        raise HTTPException(404, "Round not found")
    if not shown.round.remaining:
        return page("round.html", now=api.context().now, shown=shown, home=False)
    return _live("round.html", api, refresh, shown=shown, home=False)


@router.get("/submissions/{number}")
def submission(number: str, api: TheApi, refresh: str = "") -> Response:
    """Show a submission: its claim after the reveal, the measured speeds, the verdict."""
    wanted = _existing(number)
    shown = api.read(lambda session, context: submissions.submission(session, context, wanted))
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


def _existing(text: str) -> int:
    """Return `text` as a row number, or raise a 404."""
    number = _number(text)
    if number is None:
        raise HTTPException(404, "Not Found")
    return number


def _number(text: str) -> int | None:
    """Return `text` as a row number, or None if it is not one."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        return None
    return int(text) if int(text) <= LARGEST else None
