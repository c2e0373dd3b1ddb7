"""Processes that prepare side by side and then work one at a time; each may fail alone.

An implementation has a process of its own: an error on a GPU stays in the process it befell, and
one that hangs is killed. All start at once, import and compile, and then one after the other has
the GPU for itself. No torch here.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from benchmarks.commands import say

PREPARING = 0.6
"""Share of the limit after which nobody is waited for who still prepares."""
GRACE = 15.0
"""Seconds beyond the limit that a call in flight may take before its process is killed."""


class Turn(NamedTuple):
    """What a worker is given when its turn has come."""

    ends: float  # on time.monotonic's clock

    def left(self) -> float:
        """Return the seconds left."""
        return self.ends - time.monotonic()


class Lost(NamedTuple):
    """A worker ended without a word, or was killed."""

    name: str
    reason: str


class _Ready(NamedTuple):
    pass


class _Done(NamedTuple):
    pass


Worker = Callable[[str, int, Any], Callable[[Turn], Iterator[object]]]
"""Prepares by a name, its share and further options, and returns what its turn yields."""


def _serve(connection: Connection, worker: Worker, name: str, share: int, options: Any) -> None:
    try:
        turn = worker(name, share, options)
        connection.send(_Ready())
        if share == 0:
            for found in turn(connection.recv()):
                connection.send(found)
        connection.send(_Done())
    except Exception as error:  # whatever it is, the others go on
        connection.send(Lost(name, f"{type(error).__name__}: {error}"))


class _Child:
    def __init__(self, worker: Worker, name: str, share: int, options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.name, self.share = name, share
        self.first: object = None  # what it said of its preparing: ready, or lost
        self.connection, theirs = context.Pipe()
        arguments = (theirs, worker, name, share, options)
        self.process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def received(self, until: float) -> object:
        """Return the next message, or Lost where there is none until then or ever again."""
        if not self.connection.poll(max(0.0, until - time.monotonic())):
            self.process.kill()
            return Lost(self.name, "killed: not done within the limit")
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            return Lost(self.name, f"its process ended with exit status {self.process.exitcode}")


def in_turns(
    worker: Worker, shares: Sequence[tuple[str, int]], options: Any, limit: float, ends: float
) -> Iterator[object]:
    """Start all, wait until all are prepared, and yield what each says in its turn.

    Args:
        worker: importable by its module and name; runs in the processes.
        shares: names in the order of their turns, and how many processes prepare for each; the
            first of them has the turn.
        options: whatever the worker takes, picklable.
        limit: seconds that the whole may take, of which `PREPARING` for preparing.
        ends: when the limit passes, on time.monotonic's clock.

    Yields:
        what the workers' turns yield, and `Lost` for those that end early.
    """
    children = [
        _Child(worker, name, share, options) for name, count in shares for share in range(count)
    ]
    try:
        _prepared(children, ends - (1 - PREPARING) * limit)
        first = [child for child in children if child.share == 0]
        for child in sorted(first, key=lambda child: child.first is None):
            yield from _turn(child, ends)
    finally:
        for child in children:
            child.process.kill()
            child.process.join()


def _prepared(children: Sequence[_Child], until: float) -> None:
    """Wait until all are ready or have ended, or the time is up."""
    waiting: dict[object, _Child] = {child.connection: child for child in children}
    while waiting and time.monotonic() < until:
        connections = [child.connection for child in waiting.values()]
        for found in wait(connections, until - time.monotonic()):
            child = waiting.pop(found)
            child.first = child.received(until)
            if isinstance(child.first, Lost):
                say(f"{child.name}, share {child.share}: {child.first.reason}")
    for child in waiting.values():
        say(f"{child.name}, share {child.share}, is not prepared yet")


def _turn(child: _Child, ends: float) -> Iterator[object]:
    """Give a worker its turn, late where it was still preparing, and yield what it says."""
    until = ends + GRACE
    prepared = child.received(until) if child.first is None else child.first
    if isinstance(prepared, Lost):
        yield prepared
        return
    with suppress(OSError):  # it has died since; `received` tells how
        child.connection.send(Turn(ends))
    while not isinstance(found := child.received(until), _Done):
        yield found
        if isinstance(found, Lost):
            return
