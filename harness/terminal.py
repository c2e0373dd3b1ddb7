"""Terminal output of commands: progress lines, and an end without a traceback on a signal."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TextIO

P = ParamSpec("P")

_ENDING = (signal.SIGINT, signal.SIGTERM)


def one_line(text: str) -> str:
    """Return untrusted text on one line without unprintable characters."""
    return printable(" ".join(text.expandtabs(1).splitlines())).strip()


def printable(text: str, allowed: str = "") -> str:
    """Return untrusted text without unprintable characters, except those in `allowed`."""
    return "".join(
        c if c.isprintable() or c in allowed else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Progress:
    """Prints a line for each event and, on a terminal, the current activity below these lines."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._console = self._status = None
        if self._stream.isatty():
            from rich.console import Console

            self._console = Console(file=self._stream, highlight=False, soft_wrap=True)
            self._status = self._console.status("")

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def print(self, text: str) -> None:
        """Print a line that stays; parts of the text may come from code under test."""
        text = printable(text, allowed="\n")
        if self._console is not None:
            self._console.print(text, markup=False)
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def show(self, text: str) -> None:
        """Show the current activity if the stream is a terminal."""
        if self._status is not None:
            from rich.text import Text

            self._status.update(Text(printable(text)))  # a str would be read as markup


def ends_quietly(main: Callable[P, int]) -> Callable[P, int]:
    """Return a command that ends without a traceback on Ctrl-C and SIGTERM.

    Its `finally` blocks run, so workers end and temporary folders are deleted. The exit status is
    130 or 143, as if the signal had killed the process.
    """

    @wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        if threading.current_thread() is not threading.main_thread():
            return main(*args, **kwargs)  # only the main thread may change signal handlers
        earlier = {number: signal.signal(number, _interrupt) for number in _ENDING}
        try:
            return main(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            sys.stderr.write("stopped\n")
            return 128 + int((*interrupt.args, signal.SIGINT)[0])
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    return run


def _interrupt(number: int, _frame: object) -> None:
    for ending in _ENDING:  # `finally` blocks are not interrupted again
        signal.signal(ending, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def span(seconds: float) -> str:
    """Return a duration in the largest unit of which it has at least two."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
