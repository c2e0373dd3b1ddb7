"""Progress and tables for a person: live on a terminal, one line an event elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from harness.analysis.stats import rich_table, table
from harness.report import Failure, Measurement


class Progress:
    """Says what has happened, one line an event, and on a terminal what is going on below it.

    Use it in `with`; the line about what goes on vanishes at its end. Only a terminal needs rich.
    """

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

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._console is not None:
            self._console.print(text, markup=False)
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def doing(self, text: str) -> None:
        """Show what goes on now; nothing where the stream is no terminal."""
        if self._status is not None:
            self._status.update(text)


def show_table(
    measurements: Sequence[Measurement],
    failures: Iterable[Failure] = (),
    stream: TextIO | None = None,
) -> None:
    """Print the table of a series as the stream takes it."""
    stream = stream or sys.stdout
    if stream.isatty():
        from rich.console import Console

        Console(file=stream).print(rich_table(measurements, failures))
    else:
        stream.write(table(measurements, failures) + "\n")
        stream.flush()
