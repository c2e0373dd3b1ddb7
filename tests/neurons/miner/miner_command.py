"""Runs the miner's command line in a separate process."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neurons.runtime.identity import create_throwaway
from tests import PROJECT
from tests.processes import run_python

BARE = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "ENV_FILE": "/dev/null"}
"""An environment without a .env and without settings."""


def idle_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a real miner that soon waits, because its API is down."""
    create_throwaway(folder / "wallets", "w")
    return {
        **BARE,
        "HOME": str(folder),
        "VALIDATOR_API_URL": "http://127.0.0.1:9",
        "FORK_REMOTE": str(folder / "fork.git"),
        "WALLET_PATH": str(folder / "wallets"),
        "WALLET_MINER_NAME": "w",
        "STATE_DIR": str(folder / "state"),
        "SUBTENSOR_NETWORK": "offline",
        "DEVICE": "cpu",
    }


Command = Callable[..., subprocess.CompletedProcess[str]]


def run(
    *arguments: str,
    cwd: Path = PROJECT,
    entry: tuple[str, ...] = ("-m", "neurons.miner"),
    **environ: Any,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m neurons.miner ARGUMENT...` in the bare environment and `environ`."""
    return run_python(*entry, *arguments, cwd=cwd, env={**BARE, **environ})
