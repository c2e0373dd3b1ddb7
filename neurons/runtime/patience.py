"""Cuts off who leaves a server waiting, for which uvicorn has no end, and bounds how many do."""

from __future__ import annotations

import asyncio
import socket
import struct
from operator import itemgetter

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

REQUEST_SECONDS = 10.0
"""From the connection, or from a later request's first byte, to the request's last byte."""
ANSWER_SECONDS = 30.0
"""From the moment at which the connection takes no more to the last byte that waits for it."""
HEAD_BYTES = 2**16
"""A request's first line and headers together."""
MOST_CONNECTIONS = 500
"""Beyond them whoever would be cut off first makes place: a process may have but 1024 files."""


class ImpatientProtocol(HttpToolsProtocol):
    """HTTP/1.1 with bounds on what a client may leave undone, and on a request's head."""

    _due: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    _whole: RequestResponseCycle | None = None
    _head = 0
    _gone = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` tells of any rest
        self._wait()
        if len(self.connections) > MOST_CONNECTIONS:
            self._make_place()

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of the request unless this was the last of it."""
        if self._due is None:
            self._wait()
        super().data_received(data)
        # The cycle of an earlier request stays until the next one's head is whole.
        if self.cycle is None or self.cycle is self._whole:
            self._head += len(data)
            if self._head > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request's head is longer than {HEAD_BYTES} bytes.")
        elif not self.cycle.more_body:
            self._whole = self.cycle
            self._stop_waiting()

    def pause_writing(self) -> None:
        """Wait for the client to take what the connection does not."""
        super().pause_writing()
        self._stuck = self.loop.call_later(ANSWER_SECONDS, self._cut_off)

    def resume_writing(self) -> None:
        """Go on: all of it is on its way."""
        super().resume_writing()
        self._stop_pushing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._stop_waiting()
        self._stop_pushing()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._head = 0
        self._due = self.loop.call_later(REQUEST_SECONDS, self._cut_off)

    def _stop_waiting(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _stop_pushing(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _make_place(self) -> None:
        """Cut off who has left the server waiting for longest; this client is one of them."""
        ends = [
            (handle.when(), one)
            for one in self.connections
            if isinstance(one, ImpatientProtocol) and not one._gone
            for handle in (one._due, one._stuck, one.timeout_keep_alive_task)
            if handle is not None
        ]
        min(ends, key=itemgetter(0))[1]._cut_off()

    def _cut_off(self) -> None:
        self._gone = True
        connection = self.transport.get_extra_info("socket")
        # The kernel, too, then forgets what it has to send.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
