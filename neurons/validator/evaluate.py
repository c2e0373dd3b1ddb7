"""One submission from its address to its verdict: clone, check the rules, time, compare."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.measuring.process import Confinement
from harness.measuring.runner import Measure, MeasurementError, call, measure
from harness.measuring.series import Policy, Series
from harness.report import Kind, Measurement
from harness.workload import VALIDATOR_LENGTHS
from neurons.runtime.errors import Postponed, Retry
from neurons.runtime.observe import get_logger
from neurons.runtime.process import Stopped
from neurons.validator.clone import BadFork, Sources, clone, submission_folder
from neurons.validator.verdict import Verdict, is_claim, judge, reject
from neurons.wire.protocol import Benchmarks, QueuedSubmission
from neurons.wire.rules import SHORTEST_TARGET

POLICY = Policy(longest_first=True, repeated=frozenset({"crash", "out_of_memory"}))
"""One run a length behind one gate; what may be this machine's fault is tried a second time."""

AMBIGUOUS: frozenset[Kind] = frozenset(
    {"timeout", "out_of_memory", "limit", "crash", "protocol", "import"}
)
"""Failures that a faulty machine causes as well: a control run then decides whose fault it is."""

BUDGET = 2.0
"""All measurements of a submission take at most so many times the seconds of one process."""

CHECK_SECONDS, CONTROL_SECONDS = 60.0, 180.0

log = get_logger("validator")


@dataclass
class _ValidatorSeries(Series):
    submission: int = 0

    def measured(self, measurement: Measurement) -> None:
        log.info(
            "measured",
            submission=self.submission,
            length=measurement.length,
            tokens_per_sec=round(measurement.tokens_per_sec, 1),
        )

    def repeating(self, length: int, error: MeasurementError) -> None:
        log.warning("measuring once more", length=length, reason=error.reason)


@dataclass(frozen=True)
class Evaluator:
    """The parts of an evaluation other than the submission.

    Attributes:
        folder: where the clones are made.
        timeout: seconds for each measuring process.
        sources: where forks may be cloned from.
        stop: ends an evaluation promptly, without a verdict.
        confinement: the sandbox of a fork's code; None runs it with this user's rights.
        measure: `harness.measuring.runner.measure` or a fake.
    """

    folder: Path
    device: str
    timeout: float
    sources: Sources = field(default_factory=Sources)
    stop: threading.Event = field(default_factory=threading.Event)
    confinement: Confinement | None = None
    measure: Measure = measure

    def evaluate(self, submission: QueuedSubmission) -> Verdict:
        """Return the verdict on a revealed submission.

        Raises:
            Postponed: nothing is known yet, through no fault of the submission's.
            Stopped: on request; the submission has no verdict.
        """
        if not is_claim(submission.tokens_per_sec):
            return reject(f"The claim of {submission.tokens_per_sec} tokens/s is no speed.")
        target = submission.target_sequence_length
        if target < SHORTEST_TARGET:
            return reject(f"The target of {target} tokens is below {SHORTEST_TARGET}.")
        try:
            with submission_folder(self.folder) as folder:
                tree = clone(
                    submission.fork_url or "",
                    submission.commit_hash or "",
                    folder,
                    sources=self.sources,
                    stop=self.stop,
                )
                if broken := self._broken_rules(tree):
                    return reject(f"The fork breaks the rules: {broken[0]}")
                return self._time(tree, submission)
        except BadFork as error:
            return reject(str(error))
        except MeasurementError as error:
            return self._failed(error)
        except Retry as fault:
            self._check_stop()
            raise Postponed(fault.reason) from fault

    def check_machine(self) -> None:
        """Return when this machine calculates as it should, in the confinement of the forks.

        Raises:
            Postponed: it does not, and why.
            Stopped: on request.
        """
        try:
            call(
                *("harness.worker.machine.control:run_control", self.device),
                device=self.device,
                timeout=CONTROL_SECONDS,
                stop=self.stop,
                confinement=self.confinement,
            )
        except MeasurementError as error:
            self._check_stop()
            log_tail = f"; {error.log_tail.strip()[-300:]}" if error.log_tail.strip() else ""
            raise Postponed(
                f"The control run failed on this machine: {error}{log_tail}",
                "Correct what the sentence names, and start the validator again: at its start it "
                "checks the packages, and nvidia-smi shows the state of a GPU.",
            ) from error

    def _broken_rules(self, tree: Path) -> list[str]:
        found = call(
            *("harness.worker.rules:find_broken_rules", str(tree)),
            device="cpu",
            timeout=CHECK_SECONDS,
            stop=self.stop,
            tree=tree,
            confinement=self.confinement,
        )
        return [str(rule) for rule in found["sentences"]]  # type: ignore[union-attr]

    def _time(self, tree: Path, submission: QueuedSubmission) -> Verdict:
        target = submission.target_sequence_length
        taken = partial(self._measure_until, time.monotonic() + BUDGET * self.timeout)
        series = _ValidatorSeries(
            *(tree, POLICY, self.device, self.timeout, self.stop, taken),
            submission=submission.id,
        )
        try:
            series.run({*VALIDATOR_LENGTHS, target})
            speed = series.of(target)[0].tokens_per_sec
            verdict = judge(submission.tokens_per_sec, speed)
            if not verdict.passed:  # interference can only slow a run down: the better one counts
                again = series.sample(target)
                series.measurements.append(again)
                verdict = judge(submission.tokens_per_sec, max(again.tokens_per_sec, speed))
        except MeasurementError as error:
            verdict = self._failed(error)
        found = series.measurements
        return replace(verdict, measured=_figures(found), device=_device(found))

    def _measure_until(
        self, deadline: float, tree: Path, length: int, *, timeout: float, **options: Any
    ) -> Measurement:
        left = deadline - time.monotonic()
        if left <= 0:
            seconds = BUDGET * self.timeout
            raise MeasurementError(f"not judged within {seconds:g} s, all lengths", "timeout")
        options |= {"confinement": self.confinement, "proven": True}
        return self.measure(tree, length, timeout=min(timeout, left), **options)

    def _failed(self, error: MeasurementError) -> Verdict:
        self._check_stop()
        if error.kind in AMBIGUOUS:
            self.check_machine()
        return reject(f"No measurement ({error.kind}): {error.reason}")

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise Stopped("asked to stop")


def _figures(measurements: Iterable[Measurement]) -> Benchmarks:
    """Return the best run of each length as the wire has it."""
    figures: Benchmarks = {}
    for one in sorted(measurements, key=lambda one: (one.length, one.tokens_per_sec)):
        figures[str(one.length)] = {"tokens_per_sec": one.tokens_per_sec, "vram_mb": one.vram_mb}
    return figures


def _device(measurements: Iterable[Measurement]) -> str | None:
    """Return the GPU's name, or how many cores of a CPU there are, where anything was timed."""
    machine = next((one.environment for one in measurements if one.environment), None)
    if machine is None:
        return None
    return machine.gpu or f"CPU, {machine.cpu_count} cores"
