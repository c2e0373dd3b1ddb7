"""Heartbeats: log lines during long work, and a service's state for systemd (sd_notify(3))."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from structlog.stdlib import BoundLogger

from neurons.runtime.loading import environment

FIRST_SECONDS, MAX_SECONDS = 15.0, 30.0


@contextmanager
def heartbeat(
    log: BoundLogger,
    work: str,
    *,
    first: float = FIRST_SECONDS,
    longest: float = MAX_SECONDS,
    progress: Callable[[], Mapping[str, object]] = dict,
    **details: object,
) -> Iterator[None]:
    """Log after `first` seconds, then every `longest` seconds, that `work` continues.

    Each line contains what `progress` returns, and `details`.
    """
    ended, began = threading.Event(), time.monotonic()

    def beat() -> None:
        pause = first
        while not ended.wait(pause):
            seconds = round(time.monotonic() - began)
            log.info("still at work", work=work, seconds=seconds, **progress(), **details)
            pause = longest

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def notify(*facts: str) -> None:
    """Send facts such as `READY=1` or `STATUS=a sentence` to systemd, if NOTIFY_SOCKET is set."""
    address = environment().get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    name = "\0" + address[1:] if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto("\n".join(facts).encode(), name)
