"""Searches for faster kernels while the miner is idle, one proposal at a time.

A proposal is accepted if it keeps the rules, passes the correctness check, and is faster than the
present kernels by the criterion of `python -m harness compare`. It is published with the next
submission, which starts because the content has changed.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from structlog.stdlib import BoundLogger

from harness.analysis.ab_compare import BLOCKS, Comparison
from harness.analysis.difference import Difference
from harness.hardware.machine import Environment
from harness.measuring.runner import (
    CheckTree,
    Measure,
    MeasurementError,
    Options,
    check,
    measure,
    probe,
)
from neurons.miner.publishing.tuned_kernels import Evidence, TunedKernels
from neurons.runtime.child import run_command
from neurons.runtime.settings import Settings
from quasar_kernels.contract import (
    QUASAR_DIR,
    Scope,
    check_tree,
    compiled_files,
    copy_overlay,
    overlay_digest,
    overlay_files,
)

FILE_BYTES, ALL_BYTES = 2**21, 2**24
"""Limits in bytes on one file of a proposal, and on all its files together."""


class Rejected(Exception):
    """A proposal is not accepted; the message has the reason, as a sentence."""


@dataclass
class Tuner:
    """Tries one proposal of each command after each cycle, in a separate thread."""

    settings: Settings
    tuned: TunedKernels  # the tuned kernels in the state folder
    fork: Path  # the fork's worktree, with the modules that the kernels import
    log: BoundLogger
    blocks: int = BLOCKS
    check: CheckTree = check
    measure: Measure = measure
    probe: Callable[..., Environment] = probe
    due: bool = True  # whether a cycle has ended since the last proposal
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def commands(self) -> Iterator[Sequence[str]]:
        """Yield the commands that make proposals: the search of constants and TUNE_COMMAND."""
        settings = self.settings
        if settings.agent_iterations:
            options: dict[str, object] = {
                "--overlay": ".",
                "--trials": settings.agent_iterations,
                "--seconds": settings.tune_seconds / 2,
                "--gpus": settings.tune_gpus,
                "--storage": self.tuned.folder / "trials.json",
                # a candidate that hangs ends early enough to be stored
                "--timeout": min(settings.bench_timeout_seconds, settings.tune_seconds / 4),
            }
            words = (str(word) for option in options.items() for word in option)
            yield (sys.executable, "-m", "harness.tune", *words)
        if settings.tune_command:
            yield settings.tune_words

    def start(self, length: int) -> None:
        """Start the commands for a target of `length` tokens if a proposal is due and none runs."""
        commands = list(self.commands())
        if not (self.due and commands) or (self._thread and self._thread.is_alive()):
            return
        self.due = False
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._run, args=(commands, length), name="tuner", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the running proposal and all its processes; return when they have ended."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, commands: Sequence[Sequence[str]], length: int) -> None:
        for command in commands:
            if self._stop.is_set():
                return
            try:
                self.log.info("looking for faster kernels", command=shlex.join(command))
                difference = self.try_one(command, length)
                self.log.info(
                    "tuned kernels will be published", gain=str(difference), length=length
                )
            except Rejected as refusal:
                self.log.info("the present kernels stay", reason=str(refusal))
            except MeasurementError as error:
                self.log.info("the present kernels stay", reason=f"{error.reason}.")
            except OSError as error:
                self.log.warning("cannot tune", reason=str(error))

    def try_one(self, command: Sequence[str], length: int) -> Difference:
        """Run a command that proposes an overlay; publish the overlay if it is faster.

        Raises Rejected with the reason, a MeasurementError if a tree fails its check or cannot be
        timed, and an OSError if the disk is full.
        """
        self.tuned.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        scope, present, settings = self.settings.fork_scope, self.tuned.root(), self.settings
        shipped = overlay_digest()
        with tempfile.TemporaryDirectory(prefix="tuning-") as name:
            overlay, before, after = (Path(name, part) for part in ("overlay", "before", "after"))
            copy_overlay(present, overlay)
            self._propose(command, overlay, length)
            check_files(overlay, present, scope)
            copy_fork(self.fork, present, overlay, scope, after)
            copy_fork(self.fork, present, present, scope, before)
            options = Options(settings.device, settings.bench_timeout_seconds, stop=self._stop)
            comparison = Comparison(options, self.blocks, measure=self.measure, check=self.check)
            ((_, difference),) = comparison.run(before, after, [length])
            if not difference.faster:
                raise Rejected(f"Its gain is within the noise: {difference}.")
            if overlay_digest() != shipped:
                raise Rejected("The shipped kernels were changed during the search.")
            machine = self.probe(Options(settings.device, stop=self._stop))
            evidence = Evidence(
                shipped=shipped,
                overlay=overlay_digest(root=overlay),
                proposed_by=tuple(command),
                gpu=machine.gpu,
                length=length,
                pairs=self.blocks,
                ratio=difference.ratio,
                low=difference.low,
                high=difference.high,
                at=datetime.now(timezone.utc),
            )
            if self._stop.is_set():
                raise Rejected("It was stopped.")
            self.tuned.publish(overlay, evidence)
        return difference

    def _propose(self, command: Sequence[str], overlay: Path, length: int) -> None:
        """Run a command in `overlay`, a copy of the kernels; raise Rejected if it fails."""
        settings, text = self.settings, shlex.join(command)
        variables = {
            "AGENT_ITERATIONS": str(settings.agent_iterations),
            "TARGET_SEQUENCE_LENGTH": str(length),
        }
        try:
            problem = run_command(
                command,
                variables=variables,
                cwd=overlay,
                seconds=settings.tune_seconds,
                device=settings.device,
                stop=self._stop,
            )
        except OSError as error:
            raise Rejected(f"{text} cannot be started: {error.strerror}.") from error
        if problem:
            raise Rejected(f"{text} {problem}.")


def check_files(overlay: Path, present: Path, scope: Scope) -> None:
    """Raise Rejected if nothing changed, or for a link, a misplaced file or too many bytes."""
    total, known = 0, set(map(Path, overlay_files(root=present)))
    for path in sorted(overlay.rglob("*")):
        name = path.relative_to(overlay)
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise Rejected(f"{name} is not a regular file.")
        if path.is_dir() or "__pycache__" in name.parts or path.suffix == ".pyc":
            continue
        if name not in known and Path(QUASAR_DIR) not in name.parents:
            raise Rejected(f"{name} is outside {QUASAR_DIR}.")
        size = path.stat().st_size
        total += size
        if size > FILE_BYTES or total > ALL_BYTES:
            sizes = f"{name} has {size:,} bytes, the files up to it {total:,}"
            raise Rejected(f"{sizes}; the limits are {FILE_BYTES:,} and {ALL_BYTES:,}.")
    if overlay_digest(scope, overlay) == overlay_digest(scope, present):
        raise Rejected("The command changed no published file.")


def copy_fork(fork: Path, present: Path, overlay: Path, scope: Scope, tree: Path) -> None:
    """Make `tree` a copy of the worktree `fork` with `overlay` in place of `present`.

    Raises Rejected if the copy breaks a rule of the subnet.
    """
    skipped = shutil.ignore_patterns("__pycache__", ".git")
    shutil.copytree(fork / "fla", tree / "fla", ignore=skipped)
    for name in overlay_files(scope, present):
        (tree / name).unlink(missing_ok=True)
    for name in overlay_files(scope, overlay):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(overlay / name, tree / name)
    broken = [f"{name}: The file is compiled code." for name in compiled_files(tree)]
    broken += map(str, check_tree(tree))
    if broken:
        raise Rejected(f"It breaks the rules: {broken[0]}")
