"""Compile what a benchmark calls side by side, before anything is timed.

Most of a run's time would go into flash-linear-attention's many variants otherwise, which are
compiled one after another at their first call. What is compiled stays in Triton's cache.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from benchmarks import commands

FLAG = "--compile"
"""A module's command is given this and what to call; it calls that once and ends."""


def side_by_side(module: str, calls: Sequence[Sequence[object]]) -> None:
    """Run `python -m MODULE --compile ...` for each of `calls`, all at once.

    One that fails costs time alone: its kernels are compiled when they are measured.
    flash-linear-attention would also keep what it found the fastest variants, which is of no use
    while others are at work: FLA_CACHE_RESULTS=0 keeps it from that.
    """
    environ = os.environ | {"FLA_CACHE_RESULTS": "0"}
    started = [
        subprocess.Popen(commands.python(module, FLAG, *call), env=environ) for call in calls
    ]
    for process in started:
        process.wait()
    commands.say(f"compiled: {len(calls)} calls side by side")
