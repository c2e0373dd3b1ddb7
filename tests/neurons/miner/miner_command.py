"""Runs the miner's command line in a process, as an operator does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import PROJECT
from tests.processes import run_python

BARE = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "ENV_FILE": "/dev/null"}
"""An environment without a .env and without settings."""

Command = Callable[..., subprocess.CompletedProcess[str]]


def run(
    *arguments: str,
    cwd: Path = PROJECT,
    entry: tuple[str, ...] = ("-m", "neurons.miner"),
    **environ: Any,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m neurons.miner ARGUMENT...` in the bare environment and `environ`."""
    return run_python(*entry, *arguments, cwd=cwd, env={**BARE, **environ})
