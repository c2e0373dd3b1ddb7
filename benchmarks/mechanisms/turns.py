"""Processes that work side by side, and by turns where each must have the GPU for itself.

An implementation has a process of its own: an error on a GPU stays in the process it befell, and
one that hangs is killed. No torch here.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from benchmarks.engine.commands import say

TOGETHER_SHARE = 0.6
"""Share of the time left after which work side by side is not waited for any longer."""
GRACE = 15.0
"""Seconds beyond the limit that a call in flight may take before its process is killed."""


class Wait(Enum):
    """What a worker yields to wait; it goes on with a `Left`."""

    TURN = "until it alone may work"
    TOGETHER = "until all may work side by side"


class Left(NamedTuple):
    """The time that there is."""

    ends: float  # on time.monotonic's clock

    def seconds(self) -> float:
        """Return the seconds left."""
        return self.ends - time.monotonic()


class Lost(NamedTuple):
    """A worker failed, ended without a word, or was killed."""

    name: str
    reason: str


class _End(Enum):
    DONE = "a worker has nothing more to say"


Work = Generator[object, Left, None]
Worker = Callable[[str, int, Any], Work]
"""Takes a name, its share of the work before the first wait, and further options."""


def _serve(connection: Connection, worker: Worker, name: str, share: int, options: Any) -> None:
    try:
        work = worker(name, share, options)
        found = next(work)
        while True:
            connection.send(found)
            found = work.send(connection.recv()) if isinstance(found, Wait) else next(work)
    except StopIteration:
        connection.send(_End.DONE)
    except Exception as error:  # whatever it is, the others go on
        connection.send(Lost(name, f"{type(error).__name__}: {error}"))


class _Child:
    def __init__(self, worker: Worker, name: str, share: int, options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.name, self.share = name, share
        self.waits: Wait | None = None  # for what; None: it works, or has ended
        self.over = False
        self.connection, theirs = context.Pipe()
        arguments = (theirs, worker, name, share, options)
        self.process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def works(self) -> bool:
        """Tell whether it neither waits nor has ended."""
        return self.waits is None and not self.over

    def go(self, left: Left) -> None:
        """Let it work on."""
        self.waits = None
        with suppress(OSError):  # it has died since; `said` tells how
            self.connection.send(left)

    def said(self, until: float) -> Iterator[object]:
        """Yield its next message if it is no wait or end, or `Lost` where none comes in time."""
        found: object
        if not self.connection.poll(max(0.0, until - time.monotonic())):
            self.process.kill()
            found = Lost(self.name, "killed: not done within the limit")
        else:
            try:
                found = self.connection.recv()
            except EOFError:
                self.process.join()
                status = self.process.exitcode
                found = Lost(self.name, f"its process ended with exit status {status}")
        self.waits = found if isinstance(found, Wait) else None
        self.over = isinstance(found, (Lost, _End))
        if self.share and isinstance(found, Lost):
            say(f"{self.name}, share {self.share}: {found.reason}")  # its first share goes on
        elif self.waits is None and found is not _End.DONE:
            yield found


def in_turns(
    worker: Worker, shares: Sequence[tuple[str, int]], options: Any, limit: float
) -> Iterator[object]:
    """Start all, and yield what they say: first side by side, then by turns, and so on.

    Args:
        worker: importable by its module and name; runs in the processes.
        shares: names in the order of their turns, and how many processes each has; those but the
            first are to end before they wait.
        options: whatever the worker takes, picklable.
        limit: seconds that the whole may take.

    Yields:
        what the workers yield but waits, and `Lost` for those that end early.
    """
    left = Left(time.monotonic() + limit)
    children = [
        _Child(worker, name, share, options) for name, count in shares for share in range(count)
    ]
    try:
        expected = children
        while working := [child for child in children if not child.over]:
            yield from _together(expected, left)
            for child in working:  # who was late before may have come to its wait
                while child.works() and child.connection.poll():
                    yield from child.said(time.monotonic())
            turns = [child for child in working if child.waits is Wait.TURN]
            if not turns and all(child.works() for child in working):
                turns = working  # those alone that were not waited for
            for child in turns:
                yield from _turn(child, left)
            expected = [child for child in working if child.waits is Wait.TOGETHER]
            for child in expected:
                child.go(left)
    finally:
        for child in children:
            child.process.kill()
            child.process.join()


def _together(children: Sequence[_Child], left: Left) -> Iterator[object]:
    """Yield what all say until each waits or has ended, or the time for it is up.

    Whoever is late goes on, and has its turn once it is found waiting or nobody else is left.
    """
    until = time.monotonic() + TOGETHER_SHARE * max(0.0, left.seconds())
    working: dict[object, _Child] = {child.connection: child for child in children}
    while working and time.monotonic() < until:
        for found in wait([c.connection for c in working.values()], until - time.monotonic()):
            child = working[found]
            yield from child.said(until)
            if not child.works():
                del working[found]
    for child in working.values():
        say(f"{child.name}, share {child.share}, is not waited for")


def _turn(child: _Child, left: Left) -> Iterator[object]:
    """Give a worker its turn, where it has yet to come to it then, and yield what it says."""
    until = max(left.ends, time.monotonic()) + GRACE
    while child.works():
        yield from child.said(until)
    if child.waits is Wait.TURN:
        child.go(left)
        while child.works():
            yield from child.said(until)
