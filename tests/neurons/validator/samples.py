"""Forks in real git repositories, and a fake measurement."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.measuring.runner import MeasurementError
from harness.report import GateResult, Measurement
from quasar_kernels.contract import LAYER_FILE, QUASAR_DIR, REQUIRED_IMPORTS, TARGET_FILES
from tests.harness import samples
from tests.repositories import commit, make_checkout, run_git

GATE = samples.gate_result(longest=2048)


@dataclass
class Measured:
    """Answers measurements from `answers` in their order, then always `speed`."""

    speed: float = 1000.0
    answers: list[float | Exception] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    gates: list[GateResult | bool] = field(default_factory=list)
    trees: list[Path] = field(default_factory=list)
    proven: list[bool] = field(default_factory=list)
    on_call: Callable[[], object] = lambda: None

    def __call__(
        self,
        tree: Path,
        length: int,
        *,
        gate: bool | GateResult,
        stop: threading.Event | None,
        proven: bool = False,
        **_: object,
    ) -> Measurement:
        self.proven.append(proven)
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
        return samples.measurement(length, answer, gate=GATE, vram_mb=0.0)


@dataclass
class ForkRepository:
    """A repository with a work tree; `url` is what a miner on this machine submits."""

    path: Path

    @property
    def url(self) -> str:
        return self.path.as_uri()

    def git(self, *words: str) -> str:
        return run_git(self.path, *words)

    def commit(self, files: dict[str, str]) -> str:
        return commit(self.path, files)


def make_fork(path: Path) -> ForkRepository:
    """Make a fork whose first commit keeps every rule."""
    files = {f"{QUASAR_DIR}/{name}": "import torch\n" for name in TARGET_FILES}
    files[f"{QUASAR_DIR}/chunk.py"] = "\n".join(REQUIRED_IMPORTS) + "\n"
    files[f"{QUASAR_DIR}/csrc/kernel.cu"] = "// kernel\n"
    files[str(LAYER_FILE)] = "class QuasarAttention: ...\n"
    return ForkRepository(make_checkout(path, files))
