"""Searches for faster kernels while the miner is idle, one proposal at a time.

A proposal is accepted if it keeps the rules, passes the correctness check, and is faster than the
present kernels by the criterion of `python -m harness compare`. It is published with the next
submission, which starts because the content has changed.
"""

from __future__ import annotations

import shlex
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
from neurons.miner.proposal import Rejected, check_files, copy_fork, propose
from neurons.miner.publishing.tuned_kernels import Evidence, TunedKernels
from neurons.runtime.settings import Settings
from quasar_kernels.contract import copy_overlay, overlay_digest


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
            propose(
                command,
                overlay,
                variables={
                    "AGENT_ITERATIONS": str(settings.agent_iterations),
                    "TARGET_SEQUENCE_LENGTH": str(length),
                },
                device=settings.device,
                seconds=settings.tune_seconds,
                stop=self._stop,
            )
            check_files(overlay, present, scope)
            copy_fork(self.fork, present, overlay, scope, after)
            copy_fork(self.fork, present, present, scope, before)
            difference = self._compare(before, after, length)
            if not difference.faster:
                raise Rejected(f"Its gain is not beyond the noise: {difference}.")
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

    def _compare(self, before: Path, after: Path, length: int) -> Difference:
        options = Options(
            self.settings.device, self.settings.bench_timeout_seconds, stop=self._stop
        )
        comparison = Comparison(options, self.blocks, measure=self.measure, check=self.check)
        ((_, difference),) = comparison.run(before, after, [length])
        return difference
