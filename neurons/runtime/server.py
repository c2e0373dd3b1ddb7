"""Serves HTTP by uvicorn, and tells whoever waits for the server that it is there."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from neurons.runtime.listen import BACKLOG
from neurons.runtime.notify import notify
from neurons.runtime.patience import ImpatientProtocol

GRACE_SECONDS = 5
"""What a request may take that is under way when the server is told to stop."""


class Server(uvicorn.Server):
    """uvicorn, whose clients must not leave it waiting, and which believes no proxy.

    Args:
        app: what answers, by ASGI.
        ready: is called with the address and the port once the server listens.
        port_file: the port is written there then.
    """

    def __init__(
        self,
        app: Callable[..., Any],
        ready: Callable[[str, int], None],
        port_file: Path | None = None,
    ) -> None:
        self._ready, self._port_file = ready, port_file
        super().__init__(
            uvicorn.Config(
                app,
                http=ImpatientProtocol,
                ws="none",
                backlog=BACKLOG,
                log_config=None,  # neurons.runtime.observe takes uvicorn's loggers too
                log_level="warning",
                access_log=False,  # our own line shows neither the query nor headers
                server_header=False,
                proxy_headers=False,  # an app that asks for addresses knows whom to believe
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then tell systemd, the log and the port file."""
        await super().startup(sockets)
        if not self.started:
            return
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        notify("READY=1")
        self._ready(host, port)
        if self._port_file is not None:
            part = self._port_file.with_name(f"{self._port_file.name}.part")
            part.write_text(f"{port}\n")
            os.replace(part, self._port_file)  # a reader never sees half a number
