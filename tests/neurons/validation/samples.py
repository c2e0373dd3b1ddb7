"""Forks in real git repositories, and a stand-in for the measurement."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from harness.report import GateResult, Measurement
from harness.runner import MeasurementError
from quasar_kernels.contract import LAYER_FILE, QUASAR_DIR, REQUIRED_IMPORTS, TARGET_FILES

GATE = GateResult(
    passed=True,
    checks=(),
    device="cpu",
    dtype="float32",
    longest=2048,
    seconds=0.0,
    seed="00",
    source_digest="d",
)


def measurement(length: int, speed: float) -> Measurement:
    return Measurement(
        length=length,
        tokens_per_sec=speed,
        vram_mb=0.0,
        elapsed_seconds=1.0,
        runs=10,
        first_call_seconds=1.0,
        import_seconds=1.0,
        cache="shared",
        source_file="chunk.py",
        layer_file="quasar.py",
        source_digest="d",
        gate=GATE,
        started_at=datetime(2026, 1, 1, tzinfo=timezone.utc),
    )


@dataclass
class Measured:
    """Answers measurements from `answers` in their order, then always `speed`."""

    speed: float = 1000.0
    answers: list[float | Exception] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    gates: list[GateResult | bool] = field(default_factory=list)
    trees: list[Path] = field(default_factory=list)
    on_call: Callable[[], object] = lambda: None

    def __call__(
        self,
        tree: Path,
        length: int,
        *,
        gate: bool | GateResult,
        stop: threading.Event | None,
        **_: object,
    ) -> Measurement:
        assert (tree / QUASAR_DIR / "chunk.py").is_file()
        self.lengths.append(length)
        self.gates.append(gate)
        self.trees.append(tree)
        self.on_call()
        if stop is not None and stop.is_set():
            raise MeasurementError("stopped on request", "stopped")
        answer = self.answers.pop(0) if self.answers else self.speed
        if isinstance(answer, Exception):
            raise answer
        return measurement(length, answer)


@dataclass
class ForkRepository:
    """A repository with a work tree; `url` is what a miner on this machine submits."""

    path: Path

    @property
    def url(self) -> str:
        return self.path.as_uri()

    def git(self, *args: str) -> str:
        user = ("-c", "user.name=miner", "-c", "user.email=miner@example.org")
        done = subprocess.run(
            ["git", *user, *args], cwd=self.path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(self, files: dict[str, str]) -> str:
        for name, text in files.items():
            file = self.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        self.git("add", "--all", "--force")
        self.git("commit", "--quiet", "--allow-empty", "-m", "change")
        return self.git("rev-parse", "HEAD")


def make_fork(path: Path) -> ForkRepository:
    """Make a fork whose first commit keeps every rule."""
    path.mkdir()
    repository = ForkRepository(path)
    repository.git("init", "--quiet", "--initial-branch=main")
    files = {f"{QUASAR_DIR}/{name}": "import torch\n" for name in TARGET_FILES}
    files[f"{QUASAR_DIR}/chunk.py"] = "\n".join(REQUIRED_IMPORTS) + "\n"
    files[f"{QUASAR_DIR}/csrc/kernel.cu"] = "// kernel\n"
    files[str(LAYER_FILE)] = "class QuasarAttention: ...\n"
    repository.commit(files)
    return repository
