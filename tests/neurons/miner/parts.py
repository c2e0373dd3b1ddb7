"""Fakes for tests of the miner: hotkey, fork, benchmark and waits; and drafts of submissions."""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness.hardware.machine import Environment, Snapshot, Telemetry
from harness.sample import Correctness, Sample
from harness.source import source_digest
from neurons.miner.context import Context
from neurons.miner.cycle import State, Submission
from neurons.miner.journal import Journal
from neurons.runtime.identity import Identity
from neurons.runtime.loading import Sources
from neurons.runtime.observe import get_logger
from neurons.runtime.process import Stopped
from neurons.runtime.settings import Settings
from neurons.wire.client import ApiClient
from tests.harness import samples

HOTKEY = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
SPEEDS = {512: 1000.5, 1024: 2000.25, 2048: 3000.125}
ENVIRONMENT = samples.environment()
SETTLED = [2048] * 5
"""The samples of the default target that a claim needs."""


class Key(Identity):
    """A hotkey whose signatures only the fake API accepts."""

    def __init__(self, hotkey: str = HOTKEY) -> None:
        super().__init__(hotkey, None)

    def sign(self, text: str) -> str:
        return hashlib.sha512(text.encode()).hexdigest()


@dataclass
class FakeFork:
    """A checkout with one file; `pushed` and `verified` record the calls."""

    worktree: Path
    url: str = "https://github.com/alice/flash-linear-attention"
    content: str = "kernel 1\n"
    pushed: list[str] = field(default_factory=list)
    verified: list[str] = field(default_factory=list)
    on_verify: Callable[[], object] = lambda: None  # called by `verify`
    served: str = ""  # an address that serves commits regardless of branches

    def prepare(self) -> None:
        folder = self.worktree / "fla"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "chunk.py").write_text(self.content)

    def commit(self) -> str:
        return hashlib.sha1((self.worktree / "fla" / "chunk.py").read_bytes()).hexdigest()  # noqa: S324

    def push(self, commit: str) -> None:
        self.pushed.append(commit)

    def verify(self, commit: str) -> None:
        assert commit in self.pushed or self.pushed == []
        self.verified.append(commit)
        self.on_verify()

    def check_public(self) -> None:
        """Every fake fork is public."""

    def serves(self, url: str, commit: str) -> bool:
        """Return whether validators can fetch the commit by its hash from `served`."""
        return url == self.served and commit != ""

    def digest(self) -> str:
        """Return a digest of the content, as `overlay_digest` does for the real fork."""
        return hashlib.sha256(self.content.encode()).hexdigest()


@dataclass
class FakeBench:
    """Returns samples without measuring: `SPEEDS`, and a little more at each call."""

    calls: list[int] = field(default_factory=list)  # the length of each call
    checks: list[int] = field(default_factory=list)  # the length of each check
    # by length, the exceptions of successive calls; None for a call that succeeds
    faults: dict[int, list[Exception | None]] = field(default_factory=dict)
    disturbed: int = 0  # the number of first calls during which another program uses the GPU
    environment: Environment = ENVIRONMENT
    factor: float = 1.0  # the machine's speed
    lock: Any = field(default_factory=threading.Lock)  # one call at a time

    def __call__(self, tree: Path, length: int, *_: Any, **__: Any) -> Sample:
        with self.lock:
            return self._measure(tree, length)

    def check(self, tree: Path, length: int, *_: Any) -> Correctness:
        self.checks.append(length)
        digest = source_digest(tree)
        return samples.make_correctness(
            digest=digest, device="cpu", dtype="float32", longest=length
        )

    def _measure(self, tree: Path, length: int) -> Sample:
        self.calls.append(length)
        faults = self.faults.get(length)
        fault = faults.pop(0) if faults else None
        if fault:
            raise fault
        file = str(tree / "fla" / "chunk.py")
        measured = samples.make_sample(
            length,
            self.factor * (SPEEDS.get(length, 4000.0) + len(self.calls)),
            vram_mb=0.0,
            source_file=file,
            layer_file=file,
            source_digest=source_digest(tree),
            correctness=None,
            environment=self.environment,
            started_at=datetime.now(timezone.utc),
        )
        if len(self.calls) > self.disturbed:
            return measured
        used = Snapshot(memory_used_mb=30_000.0)
        telemetry = Telemetry(before=used, after=used)
        return measured.model_copy(update={"telemetry": telemetry, "tokens_per_sec": 1e9})


class Waits:
    """Waits that return at once; `then` is called at each and may raise `Stopped`."""

    def __init__(self, then: Callable[[float], object] | None = None) -> None:
        self.seconds: list[float] = []
        self.then = then

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        if self.then:
            self.then(seconds)
        if len(self.seconds) > 2000:
            raise AssertionError("a tight loop")


def stop_after(count: int) -> Callable[[float], None]:
    """Return a `then` that stops at the wait number `count`."""
    left = iter(range(count - 1, -1, -1))

    def then(seconds: float) -> None:
        if next(left, 0) == 0:
            raise Stopped("enough")

    return then


def make_settings(state_dir: Path, **flags: Any) -> Settings:
    """Return settings that do not depend on the environment."""
    env_file = state_dir / "empty.env"
    state_dir.mkdir(parents=True, exist_ok=True)
    env_file.touch(mode=0o600)
    values = {
        "state_dir": state_dir,
        "target_sequence_length": 2048,
        "claim_runs": 1,
        "device": "cpu",
        "optimization_interval": 5.0,
        **flags,
    }
    return Sources(values, env_file, {}).settings()


Miner = Callable[..., Context]


def make_context(state_dir: Path, api_url: str, **options: Any) -> Context:
    """Return a context with a real journal and client and otherwise fake parts.

    Args:
        options: fields of the context and of its settings, by name.
    """
    flags = {name: options.pop(name) for name in Settings.model_fields if name in options}
    key, waits = Key(), options.get("waiter", Waits())
    fork = options.get("fork") or FakeFork(state_dir / "fork")
    bench = options.pop("measure", None) or FakeBench()
    parts: dict[str, Any] = {
        "settings": make_settings(state_dir, **flags),
        "identity": key,
        "journal": Journal(state_dir / "journal.sqlite"),
        "client": options.get("client") or ApiClient(api_url, key, wait=waits),
        "fork": fork,
        "log": get_logger("test"),
        "measure": bench,
        "check": bench.check,
        "probe": lambda *_: ENVIRONMENT,
        "content_digest": fork.digest,
        "waiter": waits,
        "jitter": lambda: 0.5,
        **options,
    }
    return Context(**parts)


def draft(**changes: Any) -> Submission:
    fields: dict[str, Any] = {
        "id": 1,
        "hotkey": HOTKEY,
        "target_sequence_length": 2048,
        "mode": "commit_reveal",
        "publish_at": "before_commit",
        "api_url": "https://api.example",
    }
    return Submission(**{**fields, **changes})


def history(log: Journal, key: int) -> list[State]:
    """Return the states of a submission in their order."""
    query = "SELECT state FROM events WHERE submission = ? AND kind != 'noted' ORDER BY id"
    return [State(row["state"]) for row in log._database.execute(query, (key,))]


def states(context: Context, key: int) -> list[State]:
    return history(context.journal, key)


COMMITTING: dict[str, Any] = {
    "fork_url": "https://github.com/alice/fork",
    "commit_hash": "a" * 40,
    "content_digest": "d",
    "report": "reports/a.json",
    "tokens_per_sec": 1234.5678901234567,
    "vram_mb": 12.25,
    "benchmarks": {"512": {"tokens_per_sec": 0.1 + 0.2, "vram_mb": 0.0}},
    "salt": "5" * 64,
    "commitment_hash": "c" * 64,
    "round_id": 7,
}
"""The fields of a submission in COMMITTING."""


def new(log: Journal, target: int = 2048, hotkey: str = HOTKEY) -> Submission:
    """Insert a new submission."""
    first = draft(id=0, target_sequence_length=target, hotkey=hotkey, created_at=1.0)
    return log.insert(replace(first, updated_at=1.0))


def close(log: Journal, submission: Submission, state: State = State.VALIDATED) -> Submission:
    """Move a submission to a final state."""
    return log.transition(submission, replace(submission, state=state, updated_at=2.0))
