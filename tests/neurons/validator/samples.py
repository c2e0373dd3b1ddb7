"""Forks in real git repositories, and a fake measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.measuring.runner import MeasurementError, Options
from harness.sample import Correctness, Sample
from quasar_kernels.contract import LAYER_FILE, QUASAR_DIR, REQUIRED_IMPORTS, TARGET_FILES
from tests.harness import samples
from tests.repositories import commit, make_checkout, run_git

CORRECTNESS = samples.make_correctness(longest=65536)


@dataclass
class Measured:
    """A fake measurement: it returns `answers` in order, then always `speed`."""

    speed: float = 1000.0
    answers: list[float | Exception] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    checks: list[int] = field(default_factory=list)
    trees: list[Path] = field(default_factory=list)
    proven: list[bool] = field(default_factory=list)
    on_call: Callable[[], object] = lambda: None

    def check(self, tree: Path, length: int, options: Options) -> Correctness:
        self.checks.append(length)
        return CORRECTNESS

    def __call__(
        self, tree: Path, length: int, options: Options, *, proven: bool = False, **_: object
    ) -> Sample:
        self.proven.append(proven)
        assert (tree / QUASAR_DIR / "chunk.py").is_file()
        self.lengths.append(length)
        self.trees.append(tree)
        self.on_call()
        if options.stop is not None and options.stop.is_set():
            raise MeasurementError("stopped on request", "stopped")
        answer = self.answers.pop(0) if self.answers else self.speed
        if isinstance(answer, Exception):
            raise answer
        return samples.make_sample(length, answer, correctness=None, vram_mb=0.0)


@dataclass
class ForkRepository:
    """A fork with a work tree; a miner on this machine submits `url`."""

    path: Path

    @property
    def url(self) -> str:
        return self.path.as_uri()

    def git(self, *words: str) -> str:
        return run_git(self.path, *words)

    def commit(self, files: dict[str, str]) -> str:
        return commit(self.path, files)


def make_fork(path: Path) -> ForkRepository:
    """Make a fork whose first commit keeps all rules."""
    files = {f"{QUASAR_DIR}/{name}": "import torch\n" for name in TARGET_FILES}
    files[f"{QUASAR_DIR}/chunk.py"] = "\n".join(REQUIRED_IMPORTS) + "\n"
    files[f"{QUASAR_DIR}/csrc/kernel.cu"] = "// kernel\n"
    files[str(LAYER_FILE)] = "class QuasarAttention: ...\n"
    return ForkRepository(make_checkout(path, files))
