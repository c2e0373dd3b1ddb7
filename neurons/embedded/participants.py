"""The participants of a competition on this machine: honest miners and a cheat."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neurons.embedded.settings import CPU_LENGTH, common_environment, miner_settings
from neurons.embedded.upstream import make_upstream
from neurons.runtime.identity import Identity
from neurons.runtime.settings import Settings
from neurons.runtime.values import PROJECT
from neurons.wire.client import ApiClient
from quasar_kernels.contract import OVERLAY, QUASAR_DIR

CODE = ("neurons", "harness", "quasar_kernels")
CHUNK = "chunk_size: int = 64"
"""The line of the overlay that each miner changes."""

CHUNKS = (64, 1, 4, 16, 2, 32)
"""Tokens in a step of each miner's kernel; the second miner's kernel is clearly slower."""

CHEAT = '''

def chunk_quasar(q, k, v, beta, *_, **__):
    """Skip the recurrence: much faster, and wrong."""
    return v + 0 * (q + k + beta.sum()), None
'''
CHEATS_CLAIM = 5e6


@dataclass
class Entry:
    """One participant, its kernel and its result."""

    name: str
    kernel: str
    identity: Identity
    row: dict[str, Any] | None = None  # the API's row of its submission; None before its verdict
    weight: float = 0.0  # its share of the emission in the round that has ended
    reason: str = ""  # the reason of its verdict, from the validator's log

    @property
    def rank(self) -> int | None:
        return None if self.row is None else self.row.get("rank")


def start_miner(
    settings: Settings, entry: Entry, chunk: int, home: Path, log_file: Path
) -> subprocess.Popen[bytes]:
    """Start the daemon for one cycle with its own copy of code and kernels in `home`.

    Its kernel processes `chunk` tokens per step.
    """
    code = home / "code"
    shutil.rmtree(code, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    for part in CODE:
        shutil.copytree(PROJECT / part, code / part, ignore=ignored)
    kernel = code / "quasar_kernels/overlay" / QUASAR_DIR / "chunk_torch.py"
    kernel.write_text(kernel.read_text().replace(CHUNK, f"chunk_size: int = {chunk}"))
    environment = {
        **common_environment(settings),
        **miner_settings(settings, entry.name, home),
        "PYTHONPATH": str(code),
        "SUBMISSION_MODE": "direct",
    }
    with log_file.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "neurons.miner", "once"],
            cwd=code,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def submit_cheat(settings: Settings, url: str, entry: Entry, repository: Path) -> None:
    """Submit a fork that keeps the rules but skips the recurrence, with a high claim."""

    def change(source: Path) -> None:
        ignored = shutil.ignore_patterns("__pycache__")  # the rule book forbids compiled files
        shutil.copytree(OVERLAY, source, dirs_exist_ok=True, ignore=ignored)
        file = source / QUASAR_DIR / "chunk.py"
        file.write_text(file.read_text() + CHEAT)

    fork = make_upstream(repository, change)
    commit, key = (repository / "refs/heads/main").read_text().strip(), entry.identity
    target = settings.target_sequence_length
    claim = {
        "miner_hotkey": key.hotkey,
        "fork_url": fork,
        "commit_hash": commit,
        "tokens_per_sec": CHEATS_CLAIM,
    }
    with closing(ApiClient(url, key)) as api:
        api.register("cheat", "100k")
        api.submit(target if isinstance(target, int) else CPU_LENGTH, claim, wire_version=1)
