"""Tells systemd how a service of `Type=notify` stands (sd_notify(3)); elsewhere it does nothing."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(*facts: str) -> None:
    """Send facts such as `READY=1`, `STOPPING=1` or `STATUS=a sentence` where systemd listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    name = "\0" + address[1:] if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto("\n".join(facts).encode(), name)
