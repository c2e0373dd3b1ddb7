"""Heartbeats: log lines during long work, and a service's state for systemd (sd_notify(3))."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from structlog.stdlib import BoundLogger

from neurons.runtime.loading import environment

FIRST_SECONDS, LONGEST_SECONDS = 15.0, 600.0
TICK_SECONDS = 1.0


@contextmanager
def heartbeat(
    log: BoundLogger,
    work: str,
    *,
    first: float = FIRST_SECONDS,
    longest: float = LONGEST_SECONDS,
    terminal: TextIO | None = None,
    **details: object,
) -> Iterator[None]:
    """Log that `work` continues after `first` seconds, at intervals that double to `longest`.

    On a terminal, a line at the bottom shows the elapsed seconds.
    """
    terminal, ended, began = terminal or sys.stdout, threading.Event(), time.monotonic()
    live = terminal.isatty()

    def beat() -> None:
        pause, due = first, began + first
        while not ended.wait(TICK_SECONDS if live else max(0.0, due - time.monotonic())):
            if time.monotonic() >= due:
                log.info(
                    "still at work", work=work, seconds=round(time.monotonic() - began), **details
                )
                pause = min(2 * pause, longest)
                due += pause
            if live:
                # The cursor returns to the start of the line: the next log line overwrites it.
                terminal.write(f"\r\x1b[2K{work}, {time.monotonic() - began:.0f} s\r")
                terminal.flush()

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if live:
            terminal.write("\r\x1b[2K")
            terminal.flush()


def notify(*facts: str) -> None:
    """Send facts such as `READY=1` or `STATUS=a sentence` to systemd, if NOTIFY_SOCKET is set."""
    address = environment().get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    name = "\0" + address[1:] if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto("\n".join(facts).encode(), name)
