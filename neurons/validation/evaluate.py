"""One submission from its address to its verdict: clone, check the rules, time, compare."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from harness.report import Measurement
from harness.runner import Measure, MeasurementError, measure
from harness.series import Policy, Series
from harness.workload import VALIDATOR_LENGTHS
from neurons.errors import Retry
from neurons.observe import get_logger
from neurons.processes.runtime import Stopped
from neurons.protocol import QueuedSubmission
from neurons.validation.sandbox import BadFork, clone, sandbox
from neurons.validation.verdict import Verdict, is_claim, judge, reject
from quasar_kernels.contract import check_tree

POLICY = Policy(longest_first=True, repeated=frozenset({"crash", "out_of_memory"}))
"""One run a length behind one gate; what may be this machine's fault is tried a second time."""

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
    """What an evaluation needs besides the submission.

    Attributes:
        folder: where the sandboxes are made.
        timeout: seconds for each measuring process.
        allow_file: whether a fork on this machine's disk may be cloned.
        stop: ends an evaluation promptly, without a verdict.
        measure: `harness.runner.measure` or its stand-in.
    """

    folder: Path
    device: str
    timeout: float
    allow_file: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    measure: Measure = measure

    def evaluate(self, submission: QueuedSubmission) -> Verdict:
        """Return the verdict on a revealed submission.

        Raises:
            Stopped: asked to end; the submission has no verdict.
        """
        if not is_claim(submission.tokens_per_sec):
            return reject(f"The claim of {submission.tokens_per_sec} tokens/s is no speed.")
        try:
            return self._attempt(submission)
        except Retry as first:
            self._check_stop()
            log.warning("once more", submission=submission.id, reason=first.reason)
        try:
            return self._attempt(submission)
        except Retry as second:
            self._check_stop()
            return reject(second.reason)

    def _attempt(self, submission: QueuedSubmission) -> Verdict:
        with sandbox(self.folder) as folder:
            try:
                tree = clone(
                    submission.fork_url or "",
                    submission.commit_hash or "",
                    folder,
                    allow_file=self.allow_file,
                    stop=self.stop,
                )
            except BadFork as error:
                return reject(str(error))
            if violations := check_tree(tree):
                return reject(f"The fork breaks the rules: {violations[0]}")
            return self._time(tree, submission)

    def _time(self, tree: Path, submission: QueuedSubmission) -> Verdict:
        target = submission.target_sequence_length
        series = _ValidatorSeries(
            *(tree, POLICY, self.device, self.timeout, self.stop, self.measure),
            submission=submission.id,
        )
        try:
            series.run({*VALIDATOR_LENGTHS, target})
            speed = series.of(target)[0].tokens_per_sec
            verdict = judge(submission.tokens_per_sec, speed)
            if not verdict.passed:  # interference can only slow a run down: the better one counts
                again = series.sample(target).tokens_per_sec
                verdict = judge(submission.tokens_per_sec, max(again, speed))
            return verdict
        except MeasurementError as error:
            self._check_stop()
            return reject(f"No measurement ({error.kind}): {error.reason}")

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise Stopped("asked to stop")
