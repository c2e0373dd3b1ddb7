"""A proxy on loopback between the miner and an API: it records requests and injects faults."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.live.faults import Fault, FaultPlan, Reply
from tests.servers import Handler, Server, serving

UPSTREAM_SECONDS = 60.0
_UNREACHABLE = Reply(502, b"<html><title>502 Bad Gateway</title></html>")
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
        server = _Server(_Handler)
        server.proxy, self.url = self, server.url
        self._serving = serving(server)

    def __enter__(self) -> Proxy:
        self._serving.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._serving.__exit__(*error)

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


class _Server(Server):
    proxy: Proxy


class _Handler(Handler):
    server: _Server

    def serve(self) -> None:
        proxy, route = self.server.proxy, urlsplit(self.path).path
        body = self.read_body()
        headers = {name: self.headers[name] for name in _PASSED_ON if name in self.headers}
        fault = proxy.draw(self.command, route)
        time.sleep(fault.delay if fault else 0.0)
        asked = fault is None or fault.forwarded
        reply = proxy.forward(self.command, self.path, headers, body) if asked else None
        name, status = (fault.name if fault else None), (reply.status if reply else None)
        record = Record(self.command, route, reply is not None, status, name)
        proxy.note(record)
        if asked and reply is None:
            self._pass_on(_UNREACHABLE)
        else:
            self._pass_on(fault.change(reply) if fault else reply)
        proxy.after(record)

    def _pass_on(self, reply: Reply | None) -> None:
        if reply is None:
            self.reset()
            return
        length = len(reply.body) if reply.declared is None else reply.declared
        self.close_connection = length != len(reply.body)
        self.send(reply.status, reply.body, {**reply.headers, "Content-Length": str(length)})
