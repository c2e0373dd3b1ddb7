"""A proxy on loopback between the miner and an API, which records the requests."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.servers import Handler, Server, serving

UPSTREAM_SECONDS = 60.0
_FORWARDED_HEADERS = ("Hotkey", "Signature", "Content-Type", "Accept")


@dataclass(frozen=True)
class Record:
    """One request, without body and headers, which contain credentials and salts."""

    method: str
    route: str
    status: int | None  # None if the API did not reply


class Proxy:
    """A proxy on a free loopback port, which runs during its `with` block.

    Args:
        upstream: the API's address, http on loopback.

    Attributes:
        url: the address for the miner.
        records: all requests, in order.
        after: called with each record after its reply was sent, in the request's thread.
    """

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (str(parts.hostname), int(parts.port or 80))
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

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]] | None:
        """Return the API's status, body and headers; None if it does not reply."""
        connection = http.client.HTTPConnection(*self._upstream, timeout=UPSTREAM_SECONDS)
        try:
            connection.request(method, path, body or None, headers)
            reply = connection.getresponse()
            content = reply.read()
            kept = {n: v for n, v in reply.getheaders() if n.lower() in ("content-type", "date")}
            return reply.status, content, kept
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
        reply = proxy.forward(self.command, self.path, headers, body)
        record = Record(self.command, route, reply[0] if reply else None)
        proxy.records.append(record)
        self.send(*(reply or (502, b"<html><title>502 Bad Gateway</title></html>", {})))
        proxy.after(record)
