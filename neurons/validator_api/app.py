"""The application: its parts, what happens around every request, and its routes.

Every error is `{"detail": ...}`, and a page for clients that accept HTML.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from neurons.runtime.identity import ChainUnreachable, prepare_to_verify
from neurons.runtime.observe import get_logger
from neurons.validator_api.api import Api
from neurons.validator_api.competition import errors
from neurons.validator_api.database.storage import DatabaseAway
from neurons.validator_api.middleware import AccessLog, BodyLimit, ClientAddress
from neurons.validator_api.pages.render import error as answer
from neurons.validator_api.routes import miners, pages, public, validators

AWAY_SECONDS = 5
"""Retry-After where the database cannot be used."""

GROUPS = [
    {"name": "public", "description": "Anyone may read these, without headers."},
    {
        "name": "miners",
        "description": "Two headers prove the hotkey: Hotkey, its ss58 address, and Signature, "
        "its sr25519 signature of that address in hex.",
    },
    {
        "name": "validators",
        "description": "For the hotkeys that the server accepts as validators. Each request is "
        "signed as a whole, with the headers Hotkey, Signature, Timestamp and Nonce.",
    },
]
"""The groups of the API's calls, in the order in which they are shown."""

STATUSES = (
    (errors.NotFound, 404),
    (errors.Banned, 403),
    (errors.Conflict, 409),
    (errors.TooEarly, 425),
    (errors.Refusal, 400),
)
"""The HTTP status of each refusal; the first type that matches counts."""

log = get_logger("validator_api")


def create_app(api: Api) -> FastAPI:
    """Return the application over `api`, whose database it closes at the end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        prepare_to_verify()
        tasks = [asyncio.create_task(work(api)) for work in (_end_rounds, _follow_chain)]
        yield
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        api.storage.close()

    # FastAPI's own pages of the API load scripts from elsewhere; /docs is among `pages`.
    app = FastAPI(
        title="QUASAR validator API",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_tags=GROUPS,
    )
    app.state.api = api
    app.add_middleware(BodyLimit)
    app.add_middleware(AccessLog)
    app.add_middleware(ClientAddress, trusted=api.settings.trusted_proxies)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(errors.Refusal, _refusal)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(DatabaseAway, _away)
    app.add_exception_handler(Exception, _unexpected)
    for routes in (miners, public, validators, pages):  # asked in this order, for each request
        app.include_router(routes.router)
    return app


async def _end_rounds(api: Api) -> None:
    """End each round on time, also when nobody calls."""
    while True:
        await asyncio.sleep(api.round_check_seconds)
        try:
            await asyncio.to_thread(api.end_overdue_round)
        except DatabaseAway as error:  # it has been logged, once
            log.debug("the round waits for the database", reason=str(error))
        except Exception:  # one fault must not end all rounds to come
            log.exception("the round could not be looked at")


async def _follow_chain(api: Api) -> None:
    """Keep up with who is registered on the subnet, where a chain is asked at all."""
    while api.ask_chain is not None:
        try:
            await asyncio.to_thread(api.update_neurons)
        except ChainUnreachable as error:
            log.warning("uids and stakes stay as they are", reason=str(error))
        except Exception:  # an answer in another form must not end the questions
            log.exception("the chain's answer could not be read")
        await asyncio.sleep(api.chain_seconds)


def _refusal(request: Request, error: Exception) -> Response:
    status = next(status for kind, status in STATUSES if isinstance(error, kind))
    return answer(request, status, str(error))


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 — registered for this type only
    return answer(request, error.status_code, error.detail, error.headers)


def _invalid(request: Request, error: Exception) -> Response:
    """Answer 422 without repeating the input: it may hold a salt or a signature, or be NaN."""
    assert isinstance(error, RequestValidationError)  # noqa: S101 — registered for this type only
    problems = [
        {"type": item["type"], "loc": list(item["loc"]), "msg": item["msg"]}
        for item in error.errors()
    ]
    return answer(request, 422, problems)


def _away(request: Request, _: Exception) -> Response:
    """Answer 503; the driver's message goes to the log alone."""
    detail = "The database cannot be used now. Send the same again later."
    return answer(request, 503, detail, {"Retry-After": str(AWAY_SECONDS)})


def _unexpected(request: Request, error: Exception) -> Response:
    log.error("request failed", exc_info=error)
    return answer(request, 500, "Internal server error")
