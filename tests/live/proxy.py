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
_FORWARDED_HEADERS = ("Hotkey", "Signature", "Content-Type", "Accept")


@dataclass(frozen=True)
class Record:
    """One request, without body and headers, which contain credentials and salts."""

    method: str
    route: str
    replied: bool  # whether the API replied
    status: int | None  # the API's own status; None without a reply
    fault: str | None


class Proxy:
    """A proxy on a free loopback port, which runs during its `with` block.

    Args:
        upstream: the API's address, http on loopback.
        plan: the faults; None for none.

    Attributes:
        url: the address for the miner.
        records: all requests, in order.
        after: called with each record after its reply was sent, in the request's thread.
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
        with self._lock:
            return self._plan.draw(method, route) if self._plan else None

    def note(self, record: Record) -> None:
        with self._lock:
            self.records.append(record)

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply | None:
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
        headers = {name: self.headers[name] for name in _FORWARDED_HEADERS if name in self.headers}
        fault = proxy.draw(self.command, route)
        time.sleep(fault.delay if fault else 0.0)
        forwarded = fault is None or fault.forwarded
        reply = proxy.forward(self.command, self.path, headers, body) if forwarded else None
        name, status = (fault.name if fault else None), (reply.status if reply else None)
        record = Record(self.command, route, reply is not None, status, name)
        proxy.note(record)
        if forwarded and reply is None:
            self._answer(_UNREACHABLE)
        else:
            self._answer(fault.change(reply) if fault else reply)
        proxy.after(record)

    def _answer(self, reply: Reply | None) -> None:
        if reply is None:
            self.reset()
            return
        length = len(reply.body) if reply.declared is None else reply.declared
        self.close_connection = length != len(reply.body)
        self.send(reply.status, reply.body, {**reply.headers, "Content-Length": str(length)})
