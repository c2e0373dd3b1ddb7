"""The application: its routes, its middleware, and its reads of the chain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI

from neurons.runtime.identity import ChainUnreachable, prepare_to_verify
from neurons.runtime.middleware import AccessLog, BodyLimit, ClientAddress
from neurons.runtime.observe import get_logger
from neurons.validator_api.api import Api
from neurons.validator_api.routes import miners, pages, public, validators
from neurons.validator_api.routes.errors import answer_errors

MAX_BODY_BYTES = 16 * 1024

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
"""The groups of the API's calls in the order of the page /docs."""

log = get_logger("validator_api")


def create_app(api: Api) -> FastAPI:
    """Return the application, which closes the database of `api` when it stops."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        prepare_to_verify()
        task = asyncio.create_task(_follow_chain(api))
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        api.storage.close()

    # FastAPI's documentation pages load scripts from other hosts; `routes.pages` serves /docs.
    app = FastAPI(
        title="QUASAR validator API",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_tags=GROUPS,
    )
    app.state.api = api
    app.add_middleware(BodyLimit, most=MAX_BODY_BYTES)
    app.add_middleware(AccessLog, log=get_logger("validator_api.access"))
    app.add_middleware(
        ClientAddress,
        trusted=api.settings.trusted_proxies,
        log=log,
        effect="behind it, bans apply to hotkeys",
    )
    answer_errors(app)
    for routes in (miners, public, validators, pages):  # matched in this order
        app.include_router(routes.router)
    return app


async def _follow_chain(api: Api) -> None:
    """If a setting needs the subnet's registrations, read them from the chain at intervals."""
    while api.read_chain is not None:
        try:
            await asyncio.to_thread(api.update_neurons)
        except ChainUnreachable as error:
            log.warning("uids and stakes stay as they are", reason=str(error))
        except Exception:  # a malformed answer must not stop this loop
            log.exception("the chain's answer could not be read")
        await asyncio.sleep(api.chain_seconds)
