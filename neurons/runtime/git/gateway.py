"""A proxy for git when it fetches from an untrusted address: public hosts only, limited bytes.

git uses it as its http.proxy. For each connection, also after a redirect, the gateway resolves the
name once, checks the addresses and connects to one of them. This prevents DNS rebinding.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import select
import socket
import socketserver
import threading
from collections.abc import Callable, Collection
from typing import Any

HTTPS = 443
HEAD_BYTES = 2**13
SECONDS = 15.0
IDLE_SECONDS = 60.0

_EMBEDDING = ((ipaddress.IPv6Network("64:ff9b::/96"), 0), (ipaddress.IPv6Network("2002::/16"), 80))
"""Networks with an IPv4 address inside each IPv6 address, and the number of bits after it."""


def is_public(address: str) -> bool:
    """Return whether an address, or the IPv4 address embedded in it, is public."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped
        for network, shift in _EMBEDDING:
            if parsed in network:
                inner = ipaddress.IPv4Address(int(parsed) >> shift & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return parsed.is_global and not (parsed.is_multicast or parsed.is_reserved)


class Gateway(socketserver.ThreadingTCPServer):
    """A proxy on loopback that accepts only CONNECT and runs during its `with` block.

    Args:
        hosts: the names of allowed hosts; an empty collection allows every public host.
        most: limit in bytes on the data received through all connections together.
        public: returns whether connections to an address are allowed.

    Attributes:
        refusal: why a connection was refused or cut, as a sentence; "" for none.
        unreachable: the last failure to reach an allowed host, as a sentence; "" for none.
    """

    daemon_threads = True

    def __init__(
        self, hosts: Collection[str], most: int, public: Callable[[str], bool] = is_public
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.hosts, self.left, self.most, self.public = hosts, most, most, public
        self.refusal = self.unreachable = ""
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        """The value of git's http.proxy."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Gateway:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        """Ignore a broken connection, since git reports it."""

    def open(self, host: str, port: int) -> socket.socket | None:
        """Return a connection to an allowed host, or None with `refusal` or `unreachable` set."""
        if port != HTTPS or (self.hosts and host.lower() not in self.hosts):
            self.refusal = f"Nothing is fetched from {host}:{port}."
            return None
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self.unreachable = f"The name {host} cannot be resolved: {error}."
            return None
        addresses = list(dict.fromkeys(str(row[4][0]) for row in entries))
        inside = [address for address in addresses if not self.public(address)]
        if inside:
            self.refusal = f"Nothing is fetched from {host}: {inside[0]} is not a public address."
            return None
        for address in addresses:
            try:
                return socket.create_connection((address, port), SECONDS)
            except OSError as error:
                self.unreachable = f"{host} cannot be reached: {error}."
        return None


class _Connection(socketserver.BaseRequestHandler):
    server: Gateway

    def handle(self) -> None:
        self.request.settimeout(SECONDS)
        head = b""
        while b"\r\n\r\n" not in head and len(head) < HEAD_BYTES:
            data = self.request.recv(HEAD_BYTES)
            if not data:
                return
            head += data
        match = re.match(rb"CONNECT \[?([^\s\]]+?)\]?:(\d{1,5}) HTTP/1", head)
        if match is None:
            self.request.sendall(b"HTTP/1.1 405 Method Not Allowed\r\n\r\n")
            return
        remote = self.server.open(match[1].decode("ascii", "replace"), int(match[2]))
        if remote is None:
            status = b"403 Forbidden" if self.server.refusal else b"502 Bad Gateway"
            self.request.sendall(b"HTTP/1.1 " + status + b"\r\n\r\n")
            return
        with remote:
            self.request.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            with contextlib.suppress(OSError):
                self._carry(remote)

    def _carry(self, remote: socket.socket) -> None:
        ends = {self.request: remote, remote: self.request}
        while ready := select.select(list(ends), [], [], IDLE_SECONDS)[0]:
            for end in ready:
                data = end.recv(2**16)
                if not data:
                    return
                if end is remote:
                    self.server.left -= len(data)
                    if self.server.left < 0:
                        limit = f"{self.server.most / 2**20:.0f} MiB"
                        self.server.refusal = f"The fork's download exceeds {limit}."
                        return
                ends[end].sendall(data)
