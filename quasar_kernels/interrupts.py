"""Ctrl-C in a command: exit status 130 and no traceback, even during the command's imports."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended, the same as in shells."""


def exit_on_ctrl_c() -> None:
    """Make Ctrl-C end this process at once, while there is nothing to clean up.

    An exception does not suffice: during an import it is printed or even dropped. A process that
    ignores Ctrl-C, such as a shell's background job, still ignores it.
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
    exit_on_ctrl_c()
    sys.exit(status)


def _exit(*_: object) -> NoReturn:
    os._exit(INTERRUPTED)
