"""Takes the address that a server listens on, or says which setting to change."""

from __future__ import annotations

import errno
import socket

from neurons.runtime.errors import ConfigError, Problem

BACKLOG = 128
"""Clients that may wait to be let in, and that are let in between two looks at the others."""


def listen(host: str, port: int, settings: tuple[str, str]) -> socket.socket:
    """Return a socket that listens on TCP, and whose connections send at once what they are given.

    Args:
        host: a name or an address of this machine.
        port: 0 takes a free one.
        settings: where both were set.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        place = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        of_host, of_port = settings
        said = str(error.strerror).partition(" (while")[0].capitalize()  # without the address
        remedy = f"Set {of_host} to an address of this machine."
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            remedy = f"Set another {of_port}, or stop what has it."
        given = f"{of_host}={host}, {of_port}={port}"
        raise ConfigError(
            Problem(f"{given}: nobody can be served there ({said}).", remedy)
        ) from error
    # asyncio sets this for sockets that it makes itself; connections take it over from this one.
    # Else a reply's body waits for the client to confirm its head, for 40 ms.
    place.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return place
