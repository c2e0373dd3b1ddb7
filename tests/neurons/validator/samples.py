"""Forks in real git repositories, fake measurements, and validators with fake evaluations."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.measuring.runner import MeasurementError, Options
from harness.sample import Correctness, Sample
from neurons.validator.api import ValidatorApi
from neurons.validator.attempts import Attempts
from neurons.validator.evaluate import SharedLock
from neurons.validator.loop import Validator
from neurons.validator.verdict import Verdict, judge
from neurons.wire.protocol import QueuedSubmission
from quasar_kernels.contract import LAYER_FILE, QUASAR_DIR, REQUIRED_IMPORTS, TARGET_FILES
from tests.harness import samples
from tests.neurons.live_api import VALIDATOR, LiveApi
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


class Judge:
    """A fake evaluation: its verdict, or the error that it raises, by submission."""

    def __init__(
        self, gpu: str = "", answers: Mapping[str, Any] | None = None, **further: Any
    ) -> None:
        self.gpu, self.answers = gpu, {**(answers or {}), **further}
        self.judged: list[int] = []
        self.shares: list[float] = []
        self.lock = SharedLock()

    def evaluate(self, submission: QueuedSubmission, share: float = 1.0) -> Verdict:
        self.judged.append(submission.id)
        self.shares.append(share)
        answer = self.answers.get(f"s{submission.id}", judge(1.0, 1.0))
        if isinstance(answer, BaseException):
            raise answer
        return answer


@dataclass
class Bench:
    """A validator with fake evaluations, and a clock that tests move."""

    api: LiveApi
    judge: Judge
    file: Path
    now: float = 1_770_000_000.0
    further: tuple[Judge, ...] = ()

    def run_once(self) -> None:
        self.start().run_once()

    def start(self) -> Validator:
        attempts = Attempts(self.file, self.api.url, lambda: self.now)
        client = ValidatorApi(self.api.url, VALIDATOR)
        judges: list[Any] = [self.judge, *self.further]
        return Validator(client, judges, attempts, threading.Event())


def scores(api: LiveApi) -> dict[int, float]:
    rows = api.get("/get_submission_stats")["top_performers"]
    return {row["id"]: row["score"] for row in rows}


Benches = Callable[..., Bench]
