"""Maps errors to responses: `{"detail": ...}`, or a page for clients that accept HTML."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from neurons.runtime.observe import get_logger
from neurons.validator_api.competition.rounds import Refusal
from neurons.validator_api.database.storage import DatabaseAway
from neurons.validator_api.pages.render import page

AWAY_SECONDS = 5
"""Retry-After in seconds if the database cannot be used."""

log = get_logger("validator_api")


def answer_errors(app: FastAPI) -> None:
    """Register the handlers that answer each error with its status."""

    @app.exception_handler(HTTPException)
    def http_error(request: Request, error: HTTPException) -> Response:
        return _answer(request, error.status_code, error.detail, error.headers)

    @app.exception_handler(Refusal)
    def refusal(request: Request, error: Refusal) -> Response:
        return _answer(request, error.status, str(error))

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> Response:
        """Answer 422 without repeating the input: it may hold a salt or a signature, or be NaN."""
        problems = [{key: item[key] for key in ("type", "loc", "msg")} for item in error.errors()]
        return _answer(request, 422, problems)

    @app.exception_handler(DatabaseAway)
    def away(request: Request, _: DatabaseAway) -> Response:
        """Answer 503; only the log has the driver's message."""
        detail = "The database cannot be used now. Send the same again later."
        return _answer(request, 503, detail, {"Retry-After": str(AWAY_SECONDS)})

    @app.exception_handler(Exception)
    def unexpected(request: Request, error: Exception) -> Response:
        log.error("request failed", exc_info=error)
        return _answer(request, 500, "Internal server error")


def _answer(
    request: Request, status: int, detail: Any, headers: Mapping[str, str] | None = None
) -> Response:
    headers, accepted = headers or {}, request.headers.get("Accept", "").lower()
    if "text/html" in accepted and "application/json" not in accepted:
        try_again = float(headers.get("Retry-After", 0)) or None
        title = HTTPStatus(status).phrase
        answer = page("error.html", status, refresh=try_again, title=title, text=_text(detail))
    else:
        answer = JSONResponse({"detail": detail}, status)
    answer.headers.update({**headers, "Cache-Control": "no-store", "Vary": "Accept"})
    return answer


def _text(detail: Any) -> str:
    """Return an error's detail as text: FastAPI gives a list of problems for bad parameters."""
    if not isinstance(detail, list):
        return str(detail)
    return "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in detail)
