"""The pages for people: the leaderboard, a round, the history, a submission."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from neurons.validator_api.api import TheApi
from neurons.validator_api.pages import views
from neurons.validator_api.pages.render import page, style_sheet

LARGEST = 2**31 - 1

router = APIRouter(include_in_schema=False)


@router.get("/")
def leaderboard(api: TheApi) -> Response:
    """Show the present round: its ranking, the time left, the latest verdicts."""
    shown = api.read(views.leaderboard)
    return page("round.html", shown=shown, home=True, now=api.config.now())


@router.get("/rounds")
def history(api: TheApi, before: str = "") -> Response:
    """Show the rounds, the newest first."""
    start = _number(before)
    shown = api.read(lambda session, moment: views.history(session, moment, start))
    return page("rounds.html", shown=shown)


@router.get("/rounds/{number}")
def one_round(number: str, api: TheApi) -> Response:
    """Show a round's ranking."""
    wanted = _number(number)
    if wanted is None:
        return _missing()
    shown = api.read(lambda session, moment: views.one_round(session, moment, wanted))
    if shown is None:
        return _missing()
    return page("round.html", shown=shown, home=False, now=api.config.now())


@router.get("/submissions/{number}")
def submission(number: str, api: TheApi) -> Response:
    """Show a submission: its claim once it is revealed, what was measured, the verdict."""
    wanted = _number(number)
    if wanted is None:
        return _missing()
    shown = api.read(lambda session, moment: views.submission(session, moment, wanted))
    return _missing() if shown is None else page("submission.html", shown=shown)


@router.get("/style.css")
def style() -> Response:
    """Return the pages' style sheet."""
    return style_sheet()


def _missing() -> Response:
    return page("missing.html", 404)


def _number(text: str) -> int | None:
    """Return the number of a row; None for what can be none."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        return None
    return int(text) if int(text) <= LARGEST else None
