"""Binds a server's address and serves an application there with uvicorn."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from harness.files import write_atomically
from neurons.runtime.errors import ConfigError, Problem
from neurons.runtime.heartbeat import notify
from neurons.runtime.middleware import OneLength

BACKLOG = 128
"""Connections that Linux queues until the server accepts them."""
GRACE_SECONDS = 5
"""Seconds in which running requests must end when the server stops."""
MAX_CONNECTIONS = 500
"""Limit on open connections and running requests, beyond which uvicorn answers 503."""
HEAD_BYTES = 2**16
"""Limit on a request's first line and headers together; longer ones are answered with 400."""


def listen(host: str, port: int, settings: tuple[str, str]) -> socket.socket:
    """Return a socket that listens on TCP with TCP_NODELAY; port 0 selects a free one.

    A ConfigError names the `settings` of host and port if they cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        place = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        of_host, of_port = settings
        reason = str(error.strerror).partition(" (while")[0].capitalize()  # without the address
        remedy = f"Set {of_host} to an address of this machine."
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            remedy = f"Set another {of_port}, or stop the program that uses it."
        setting = f"{of_host}={host}, {of_port}={port}"
        raise ConfigError(
            Problem(f"{setting}: cannot bind {host}:{port} ({reason}).", remedy)
        ) from error
    # Accepted connections inherit this option. asyncio sets it only on sockets that it creates.
    # Without it, a reply's body waits up to 40 ms until the client acknowledges the head.
    place.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return place


class Server(uvicorn.Server):
    """uvicorn with limits on connections and request heads; it trusts no proxy header.

    The reverse proxy handles slow clients (docs/subnet.md). When the server listens, it writes the
    port file, and calls `ready` with address and port.
    """

    def __init__(
        self, app: ASGIApp, ready: Callable[[str, int], None], port_file: Path | None = None
    ) -> None:
        self._ready, self._port_file = ready, port_file
        super().__init__(
            uvicorn.Config(
                OneLength(app),
                http="h11",
                ws="none",
                backlog=BACKLOG,
                limit_concurrency=MAX_CONNECTIONS,
                h11_max_incomplete_event_size=HEAD_BYTES,
                log_config=None,  # neurons.runtime.observe formats uvicorn's logs too
                log_level="warning",
                access_log=False,  # the application logs requests, without query and headers
                server_header=False,
                proxy_headers=False,  # the application knows which proxies to trust
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, write the port file, call `ready` and notify systemd."""
        await super().startup(sockets)
        if not self.started:
            return
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        if self._port_file is not None:
            write_atomically(self._port_file, f"{port}\n")
        self._ready(host, port)
        notify("READY=1")
