"""Cuts off a client that does not finish its request in time, which uvicorn waits for for ever."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

REQUEST_SECONDS = 10.0
"""From the connection, or from a later request's first byte, to the request's last byte."""


class ImpatientProtocol(HttpToolsProtocol):
    """HTTP/1.1 of which every request must be whole within `REQUEST_SECONDS`."""

    _due: asyncio.TimerHandle | None = None
    _whole: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of the request unless this was the last of it."""
        if self._due is None:
            self._wait()
        super().data_received(data)
        # The cycle of an earlier request stays until the next one's head is whole.
        if self.cycle is not None and self.cycle is not self._whole and not self.cycle.more_body:
            self._whole = self.cycle
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._due = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
