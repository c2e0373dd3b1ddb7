"""Evaluates one submission: clone, check rules and results, time, compare with the claim."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from harness.measuring.process import Confinement
from harness.measuring.runner import (
    CheckTree,
    Measure,
    MeasurementError,
    Options,
    call,
    check,
    confirm,
    measure,
    require_passed,
)
from harness.sample import Kind, Sample
from harness.terminal import counted
from harness.workload import VALIDATOR_LENGTHS
from neurons.runtime.errors import Postponed, Retry
from neurons.runtime.observe import get_logger
from neurons.runtime.process import Stopped
from neurons.validator.clone import BadFork, Sources, clone, submission_folder
from neurons.validator.verdict import Verdict, is_claim, judge, reject
from neurons.wire.protocol import Benchmarks, QueuedSubmission
from neurons.wire.rules import MIN_TARGET

REPEATED: frozenset[Kind] = frozenset({"crash", "out_of_memory"})
"""Failures that this machine may have caused: the process is started a second time."""

AMBIGUOUS: frozenset[Kind] = frozenset(
    {"timeout", "out_of_memory", "limit", "crash", "protocol", "import"}
)
"""Failures that a faulty machine also causes; they count only if a control run succeeds.
Another fork may also cause them, so a process that fails while others run is repeated alone."""

BUDGET = 2.0
"""Time limit of all of a submission's measurements, as a multiple of one process's."""

CHECK_SECONDS, CONTROL_SECONDS = 60.0, 180.0

log = get_logger("validator")

Result = TypeVar("Result")


class FaultyMachine(Postponed):
    """The control run failed: this machine or its GPU cannot measure."""


class SharedLock:
    """A lock that several threads share or one holds exclusively; the latter has priority."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing = self._waiting = 0
        self._alone = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Share the lock, once no thread holds it exclusively or waits for that."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._waiting)
            self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock exclusively, once no other thread holds it."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._alone and not self._sharing)
            self._waiting -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


@dataclass(frozen=True)
class Evaluator:
    """Evaluates submissions on one device, with these settings.

    Evaluations that run at the same time share a lock. An evaluation holds it exclusively during
    repetitions and while it times the target, so that no other fork slows it down or helps it.
    """

    folder: Path
    device: str
    timeout: float  # seconds for each measuring process
    sources: Sources = field(default_factory=Sources)
    # ends an evaluation promptly, without a verdict
    stop: threading.Event = field(default_factory=threading.Event)
    # the sandbox of a fork's code; None runs it with this user's rights
    confinement: Confinement | None = None
    # the sandbox while other evaluations may run; None if there is only one evaluator
    share: Confinement | None = None
    lock: SharedLock = field(default_factory=SharedLock)
    gpu: str = ""  # the name of this evaluation's GPU in the log, if there are several
    measure: Measure = measure
    check: CheckTree = check

    def evaluate(self, submission: QueuedSubmission, share: float = 1.0) -> Verdict:
        """Return the verdict on a revealed submission.

        Raises Postponed if this machine or the network failed, or if `share` is below 1 and the
        measurements need more than this share of their time limit; and Stopped after a stop.
        """
        if not is_claim(submission.tokens_per_sec):
            return reject(
                f"The claim must be a positive, finite speed, not {submission.tokens_per_sec}."
            )
        target = submission.target_sequence_length
        if target < MIN_TARGET:
            return reject(f"The target of {target} tokens is below {MIN_TARGET}.")
        try:
            with submission_folder(self.folder) as folder:
                with self.lock.shared():
                    tree = clone(
                        submission.fork_url or "",
                        submission.commit_hash or "",
                        folder,
                        sources=self.sources,
                        stop=self.stop,
                    )

                def check_rules(*, alone: bool) -> list[str]:
                    with self.lock.alone() if alone else self.lock.shared():
                        self._check_stop()
                        options = self._options("cpu", CHECK_SECONDS, alone=alone)
                        return self._broken_rules(tree, options)

                broken = self._twice(check_rules, target, alone=False)
                if broken:
                    return reject(f"The fork breaks the rules: {broken[0]}")
                return self._time(tree, submission, share)
        except BadFork as error:
            return reject(str(error))
        except MeasurementError as error:
            return self._failed(error)
        except Retry as fault:
            self._check_stop()
            raise Postponed(fault.reason) from fault

    def check_machine(self) -> None:
        """Do a control run in the forks' confinement.

        Raises FaultyMachine if it fails, and Stopped after a stop.
        """
        try:
            with self.lock.shared():
                call(
                    *("harness.worker.checks:run_control", self.device),
                    options=self._options(self.device, CONTROL_SECONDS),
                )
        except MeasurementError as error:
            self._check_stop()
            last = " ".join(error.log_tail.split())[-300:]
            raise FaultyMachine(
                f"The control run failed on this machine: {error}{last and f'; {last}'}",
                "Remove this cause and start the validator again, which checks the packages at its "
                "start. nvidia-smi shows the state of a GPU.",
            ) from error

    def _broken_rules(self, tree: Path, options: Options) -> list[str]:
        function = "harness.worker.checks:find_broken_rules"
        result = call(function, str(tree), options=options, tree=tree)
        return [str(rule) for rule in result["texts"]]  # type: ignore[union-attr]

    def _options(self, device: str, timeout: float, *, alone: bool = False) -> Options:
        confinement = self.confinement if alone else self.share or self.confinement
        return Options(device, timeout, self.stop, own=False, confinement=confinement)

    def _time(self, tree: Path, submission: QueuedSubmission, share: float) -> Verdict:
        """Check the results, time all lengths, and compare the target's speed with the claim.

        One correctness check at the longest length covers all lengths.
        """
        target = submission.target_sequence_length
        lengths = sorted({*VALIDATOR_LENGTHS, target}, reverse=True)
        deadline = time.monotonic() + min(share, 1.0) * BUDGET * self.timeout
        samples: dict[int, Sample] = {}

        def attempt(work: Callable[[Path, int, Options], Result], length: int) -> Result:
            def run(*, alone: bool) -> Result:
                nonlocal deadline
                since = time.monotonic()
                with self.lock.alone() if alone else self.lock.shared():
                    deadline += time.monotonic() - since
                    self._check_stop()
                    return work(tree, length, self._within(deadline, alone=alone))

            return self._twice(run, length, alone=work is timed and length == target)

        timed = partial(self.measure, proven=True)
        try:
            correctness = require_passed(attempt(self.check, lengths[0]))
            for length in lengths:
                samples[length] = confirm(attempt(timed, length), correctness)
                speed = round(samples[length].tokens_per_sec, 1)
                log.info("measured", submission=submission.id, length=length, tokens_per_sec=speed)
            verdict = judge(submission.tokens_per_sec, samples[target].tokens_per_sec)
            if not verdict.passed:  # other work only slows a run down, so the faster counts
                again = confirm(attempt(timed, target), correctness)
                samples[target] = max(again, samples[target], key=lambda one: one.tokens_per_sec)
                verdict = judge(submission.tokens_per_sec, samples[target].tokens_per_sec)
        except MeasurementError as error:
            if share < 1.0 and error.kind == "timeout" and time.monotonic() >= deadline:
                seconds = share * BUDGET * self.timeout
                reason = f"The claim is too low to earn a share, so it had only {seconds:g} s."
                raise Postponed(reason) from error
            verdict = self._failed(error)
        measured = samples.values()
        return replace(verdict, measured=_figures(measured), device=_device(measured))

    def _within(self, deadline: float, *, alone: bool) -> Options:
        left = deadline - time.monotonic()
        if left <= 0:
            seconds = BUDGET * self.timeout
            raise MeasurementError(f"all lengths together took more than {seconds:g} s", "timeout")
        return self._options(self.device, min(self.timeout, left), alone=alone)

    def _twice(self, work: Callable[..., Result], length: int, *, alone: bool) -> Result:
        """Return the result of `work`; repeat it once if its failure may not be the fork's."""
        try:
            return work(alone=alone)
        except MeasurementError as error:
            repeated = REPEATED if alone or self.share is None else AMBIGUOUS
            if self.stop.is_set() or error.kind not in repeated:
                raise
            log.warning("measuring again", length=length, reason=error.reason)
        return work(alone=True)

    def _failed(self, error: MeasurementError) -> Verdict:
        self._check_stop()
        if error.kind in AMBIGUOUS:
            self.check_machine()
        verdict = reject(f"No measurement ({error.kind}): {error.reason}")
        return replace(verdict, timed_out=error.kind == "timeout")

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise Stopped("stop requested")


def _figures(samples: Iterable[Sample]) -> Benchmarks:
    """Return the samples' figures in the wire's form, the shortest length first."""
    return {
        str(one.length): {"tokens_per_sec": one.tokens_per_sec, "vram_mb": one.vram_mb}
        for one in sorted(samples, key=lambda one: one.length)
    }


def _device(samples: Iterable[Sample]) -> str | None:
    """Return the GPU's name, or the number of a CPU's cores; None if nothing was timed."""
    machine = next((one.environment for one in samples if one.environment), None)
    if machine is None:
        return None
    return machine.gpu or f"CPU, {counted(machine.cpu_count, 'core')}"
