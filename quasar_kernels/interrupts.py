"""Ctrl-C in a command: status 130 and no traceback, also while its modules are imported."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended, as shells give it."""


def exit_at_once() -> None:
    """End this process on Ctrl-C without cleaning up: for times when there is nothing to clean.

    An exception would be no substitute: importing prints it, and drops some. A process that
    ignores Ctrl-C, as a background job of a shell does, goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def run(main: Callable[[], int]) -> NoReturn:
    """Run an imported command, in which Ctrl-C raises KeyboardInterrupt, and end the process."""
    try:
        if signal.getsignal(signal.SIGINT) is _exit:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main()
    except KeyboardInterrupt:
        status = INTERRUPTED
    exit_at_once()
    sys.exit(status)


def _exit(*_: object) -> NoReturn:
    os._exit(INTERRUPTED)
