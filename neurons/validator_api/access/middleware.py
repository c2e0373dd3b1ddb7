"""What happens around every request: a cap on the body, and one line in the log."""

from __future__ import annotations

import time

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neurons.runtime.observe import get_logger

log = get_logger("validator_api.access")


class BodyLimit:
    """Refuses a body of more than `limit` bytes with 413, whether or not it says its length."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting what is read of its body."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise HTTPException(413, f"Request body is larger than {self._limit} bytes")
            return message

        await self._app(scope, counted, send)


class AccessLog:
    """Logs method, path, status, duration and address; never headers, query or body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and log its outcome."""
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
            write = log.debug if quiet else log.info
            write(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status,
                ms=round(1000 * (time.perf_counter() - start), 1),
                client=(scope.get("client") or ("",))[0],
            )
