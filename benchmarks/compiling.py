"""Compile what a benchmark calls side by side, before anything is timed.

Most of a run's time would go into flash-linear-attention's variants otherwise: Triton compiles them
one after another at their first call, and times each for an eighth of a second. What is compiled
stays in Triton's cache.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from benchmarks import autotuning
from benchmarks.engine import commands

FLAG = "--compile"
"""A module's command is given this, its arguments, and the place and number of a share."""

MOST = 16
"""Processes at most: each holds a context and inputs on the GPU."""

TOKENS = 2048
"""Tokens that suffice to compile a function whose variants depend on no length."""


class Share(NamedTuple):
    """One of the processes that compile."""

    place: int
    of: int

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Share:
        """Read a share from the last two of a command's arguments."""
        place, of = map(int, arguments[-2:])
        return cls(place, of)

    def has(self, number: int) -> bool:
        """Tell whether the piece of work of this number is this share's."""
        return number % self.of == self.place

    def of_variants(self) -> AbstractContextManager[None]:
        """Let Triton's autotuners compile this share of their variants, and time none."""
        return autotuning.compiling(0, self.place, self.of)


def attempt(what: object, call: Callable[[], object]) -> None:
    """Call once; a failure is said, and left to the measurement to judge."""
    try:
        call()
    except Exception as error:  # whatever a compiler or a library raises
        commands.say(f"{what} did not compile: {type(error).__name__}: {error}"[:300])


def side_by_side(module: str, *arguments: object) -> None:
    """Run `python -m MODULE --compile ARGUMENTS PLACE OF` for each share, one a core, all at once.

    A process that fails costs time alone: its kernels are compiled when they are measured.
    flash-linear-attention would also keep what it found the fastest variants, which is of no use
    while none is timed: FLA_CACHE_RESULTS=0 keeps it from that.
    """
    count = min(MOST, len(os.sched_getaffinity(0)))
    environ = os.environ | {"FLA_CACHE_RESULTS": "0"}
    started = [
        subprocess.Popen(
            commands.python(module, FLAG, *arguments, place, count), env=environ
        )
        for place in range(count)
    ]  # fmt: skip
    for process in started:
        process.wait()
    commands.say(f"compiled by {count} processes side by side")
