"""A proxy on loopback between the miner and an API: it records requests and injects faults."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlsplit

from tests.live.faults import Fault, FaultPlan, Reply

UPSTREAM_SECONDS = 60.0
_UNREACHABLE = Reply(502, b"<html><title>502 Bad Gateway</title></html>")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_PASSED_ON = ("Hotkey", "Signature", "Content-Type", "Accept")


@dataclass(frozen=True)
class Record:
    """One request. Neither bodies nor headers are kept: they hold credentials and salts.

    Attributes:
        reached: whether the API answered it, so that what it asked for may have happened.
        status: the API's own status; None when it was not asked or did not answer.
        fault: what was done to it, None when nothing.
    """

    method: str
    route: str
    reached: bool
    status: int | None
    fault: str | None


class Proxy:
    """Listens on a free loopback port while its `with` lasts.

    Args:
        upstream: the API's address, http on loopback.
        plan: the faults; without it, nothing is changed.

    Attributes:
        url: the address for the miner.
        records: every request that came, in order.
        after: called with each record once its reply has left, in the request's own thread.
    """

    def __init__(self, upstream: str, plan: FaultPlan | None = None) -> None:
        parts = urlsplit(upstream)
        self._upstream = (str(parts.hostname), int(parts.port or 80))
        self._plan, self._lock = plan, threading.Lock()
        self.records: list[Record] = []
        self.after: Callable[[Record], object] = lambda _: None
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def draw(self, method: str, route: str) -> Fault | None:
        """Return the fault of this request, if any."""
        with self._lock:
            return self._plan.draw(method, route) if self._plan else None

    def note(self, record: Record) -> None:
        """Keep a record."""
        with self._lock:
            self.records.append(record)

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply | None:
        """Return the API's reply; None when it gave none."""
        connection = http.client.HTTPConnection(*self._upstream, timeout=UPSTREAM_SECONDS)
        try:
            connection.request(method, path, body or None, headers)
            reply = connection.getresponse()
            content = reply.read()
            kept = {n: v for n, v in reply.getheaders() if n.lower() in ("content-type", "date")}
            return Reply(reply.status, content, kept)
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    proxy: Proxy

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    wbufsize = 2**20  # headers and body in one packet, or each reply costs a delayed ACK

    def _serve(self) -> None:
        proxy, route = self.server.proxy, urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name: self.headers[name] for name in _PASSED_ON if name in self.headers}
        fault = proxy.draw(self.command, route)
        time.sleep(fault.delay if fault else 0.0)
        asked = fault is None or fault.forwarded
        reply = proxy.forward(self.command, self.path, headers, body) if asked else None
        name, status = (fault.name if fault else None), (reply.status if reply else None)
        record = Record(self.command, route, reply is not None, status, name)
        proxy.note(record)
        if asked and reply is None:
            self._send(_UNREACHABLE)
        else:
            self._send(fault.change(reply) if fault else reply)
        proxy.after(record)

    do_GET = do_POST = _serve

    def _send(self, reply: Reply | None) -> None:
        if reply is None:  # a reset, as from a process that was killed
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self.close_connection = True
            self.connection.close()
            return
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        length = len(reply.body) if reply.declared is None else reply.declared
        self.send_header("Content-Length", str(length))
        self.close_connection = length != len(reply.body)
        self.end_headers()
        self.wfile.write(reply.body)
        self.wfile.flush()

    def finish(self) -> None:
        try:
            super().finish()
        except (OSError, ValueError):  # the connection was broken on purpose
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Keep the terminal for the table."""
