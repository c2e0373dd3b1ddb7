"""The application: its routes and its middleware.

Each request passes `ClientAddress`, `AccessLog` and `BodyLimit` before its route.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neurons.runtime.addresses import Ip, parse_ip
from neurons.runtime.identity import ChainUnreachable, prepare_to_verify
from neurons.runtime.observe import get_logger
from neurons.validator_api.api import Api
from neurons.validator_api.routes import miners, pages, public, validators
from neurons.validator_api.routes.errors import answer_errors

MAX_BODY_BYTES = 16 * 1024
FORWARDING = (b"x-forwarded-for", b"forwarded", b"x-real-ip")

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
access_log = get_logger("validator_api.access")


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
    app.add_middleware(BodyLimit)
    app.add_middleware(AccessLog)
    app.add_middleware(ClientAddress, trusted=api.settings.trusted_proxies)
    answer_errors(app)
    for routes in (miners, public, validators, pages):  # matched in this order
        app.include_router(routes.router)
    return app


async def _follow_chain(api: Api) -> None:
    """Read the subnet's registrations from the chain at intervals, if a setting needs them."""
    while api.read_chain is not None:
        try:
            await asyncio.to_thread(api.update_neurons)
        except ChainUnreachable as error:
            log.warning("uids and stakes stay as they are", reason=str(error))
        except Exception:  # a malformed answer must not stop this loop
            log.exception("the chain's answer could not be read")
        await asyncio.sleep(api.chain_seconds)


class ClientAddress:
    """Replaces the peer's address in the scope by the client's, or by None if that is unknown.

    A trusted proxy (`*`: every peer) names the client in X-Forwarded-For. The client is unknown if
    another peer on this machine or in a private network forwards a request: the header may be
    forged, and all clients share the peer's address.
    """

    def __init__(self, app: ASGIApp, trusted: Sequence[str]) -> None:
        self._app = app
        self._anyone = "*" in trusted
        self._trusted = [ipaddress.ip_network(one, strict=False) for one in trusted if one != "*"]
        self._warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope.get("client"):
            address = self._client(scope)
            if address != scope["client"][0]:
                scope = {**scope, "client": (address, 0) if address else None}
        await self._app(scope, receive, send)

    def _client(self, scope: Scope) -> str | None:
        peer = str(scope["client"][0])
        named = [value for name, value in scope["headers"] if name in FORWARDING]
        if not named:
            return peer
        address = parse_ip(peer)
        if address is None or self._trusts(address):
            return self._forwarded(scope)
        if not address.is_private:
            return peer  # a client that sends a proxy's headers
        if not self._warned:
            self._warned = True
            log.warning(
                "requests come through a proxy that TRUSTED_PROXIES does not name; bans count "
                "hotkeys behind it",
                proxy=peer,
            )
        return None

    def _forwarded(self, scope: Scope) -> str | None:
        """Return the last address of X-Forwarded-For that no trusted proxy has."""
        lines = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        hops = [hop for line in lines for hop in line.decode("latin-1").split(",")]
        for hop in reversed(hops):
            address = parse_ip(hop)
            if address is None:
                return None
            if self._anyone or not self._trusts(address):
                return str(address)
        return None

    def _trusts(self, address: Ip) -> bool:
        return self._anyone or any(
            address in network for network in self._trusted if network.version == address.version
        )


class BodyLimit:
    """Refuses a body of more than `MAX_BODY_BYTES` with 413, with or without a Content-Length."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > MAX_BODY_BYTES:
                raise HTTPException(413, f"Request body is larger than {MAX_BODY_BYTES} bytes")
            return message

        await self._app(scope, counted, send)


class AccessLog:
    """Logs method, path, status, duration and address; never headers, query or body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        start = time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            quiet = scope["method"] == "GET" and status < 400
            write = access_log.debug if quiet else access_log.info
            write(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status,
                ms=round(1000 * (time.perf_counter() - start), 1),
                client=(scope.get("client") or ("",))[0],
            )
