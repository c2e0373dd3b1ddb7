"""Runs the miner's command as an operator does, in a process of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from tests import PROJECT
from tests.processes import run_python


def run(
    *arguments: str,
    cwd: Path = PROJECT,
    entry: tuple[str, ...] = ("-m", "neurons.miner"),
    **environ: Any,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m neurons.miner ARGUMENT...`, without a .env and in a bare environment."""
    bare = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "ENV_FILE": "/dev/null"}
    return run_python(*entry, *arguments, cwd=cwd, env={**bare, **environ})
