"""The output of a training: a line every ten seconds, and a bar on a terminal."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS = 10.0
"""Seconds between two lines."""


class Reporter:
    """Prints the progress of a training: after its first step, every `SECONDS`, and at its end.

    Args:
        console: the output for lines, and on a terminal for a bar.
        done, steps: number of steps at the start, and at the end.
    """

    def __init__(self, console: Console, done: int, steps: int) -> None:
        self._console, self._steps = console, steps
        self._printed: int | None = None  # steps at the last line
        self._begun, self._at = done, time.monotonic()
        self._losses: list[float] = []
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", completed=done, total=steps)

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, loss: float) -> None:
        """Record a step: the number of steps so far, and its loss in nats per byte."""
        self._losses.append(loss)
        self._bar.update(self._task, completed=done, description=f"loss {loss:.3f}")
        now = time.monotonic()
        if self._printed is not None and now - self._at < SECONDS and done < self._steps:
            return
        since = self._begun if self._printed is None else self._printed
        each = (now - self._at) / (done - since)
        mean = sum(self._losses) / len(self._losses)
        self._console.print(
            f"step {done:,} of {self._steps:,}: loss {mean:.3f}, {each:.3g} s per step, "
            f"{duration(each * (self._steps - done))} left"
        )
        self._printed, self._at, self._losses = done, now, []


def duration(seconds: float) -> str:
    """Return a time as hours, minutes and seconds: `2:05:09`, or `5:09` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
