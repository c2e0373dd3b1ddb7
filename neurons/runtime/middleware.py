"""Middleware of the HTTP servers, which a request passes before its route."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.stdlib import BoundLogger

from neurons.runtime.addresses import Ip, parse_ip

FORWARDING = (b"x-forwarded-for", b"forwarded", b"x-real-ip")


class OneLength:
    """Answers a request that has both Content-Length and Transfer-Encoding with 400.

    If the server and a proxy read different lengths, one of them takes the end of the body for
    another request. The connection is therefore closed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if {b"content-length", b"transfer-encoding"} <= names:
            detail = "A request has Content-Length or Transfer-Encoding, not both"
            refusal = JSONResponse({"detail": detail}, 400, {"Connection": "close"})
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class ClientAddress:
    """Replaces the peer's address in the scope by the client's, or by None if that is unknown.

    A trusted proxy (`*`: every peer) names the client in X-Forwarded-For. If another peer on this
    machine or in a private network forwards a request, the client is unknown: the header may be
    forged, and all clients share the peer's address. One warning then contains `effect`.
    """

    def __init__(self, app: ASGIApp, trusted: Sequence[str], log: BoundLogger, effect: str) -> None:
        self._app, self._log, self._effect = app, log, effect
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
            return peer  # a client, although it sends a proxy's headers
        if not self._warned:
            self._warned = True
            problem = "requests come through a proxy that TRUSTED_PROXIES does not name"
            self._log.warning(f"{problem}; {self._effect}", proxy=peer)
        return None

    def _forwarded(self, scope: Scope) -> str | None:
        """Return the last address in X-Forwarded-For that is not a trusted proxy's."""
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


class AccessLog:
    """Logs method, path, status, duration and address; never headers, query or body."""

    def __init__(self, app: ASGIApp, log: BoundLogger) -> None:
        self._app, self._log = app, log

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
            write = self._log.debug if quiet else self._log.info
            write(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status,
                ms=round(1000 * (time.perf_counter() - start), 1),
                client=(scope.get("client") or ("",))[0],
            )


class BodyLimit:
    """Answers a body of more than `most` bytes with 413, even without a Content-Length."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                raise HTTPException(413, f"Request body is larger than {self._most} bytes")
            return message

        await self._app(scope, counted, send)
