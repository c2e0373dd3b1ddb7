"""The validator's loop: one submission after another, from the queue to the written verdict.

The attempt is recorded before the evaluation begins. If the validator dies during it, the next
start continues with the other submissions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from neurons.runtime.errors import ConfigError, Postponed
from neurons.runtime.heartbeat import heartbeat
from neurons.runtime.observe import get_logger
from neurons.runtime.process import Stopped
from neurons.validator.api import ApiFault, ValidatorApi
from neurons.validator.attempts import Attempts
from neurons.validator.evaluate import Evaluator
from neurons.validator.logits import LogitVerifier
from neurons.validator.verdict import Verdict, refute
from neurons.validator.weights import WeightSetter
from neurons.wire.protocol import QueuedSubmission

BUSY_ALLOWED = 6
"""Postponements, an hour of them, after which a miner's busy inference server has failed."""

log = get_logger("validator")


class Validator:
    """Polls the queue and judges its submissions, one at a time."""

    def __init__(
        self,
        api: ValidatorApi,
        evaluator: Evaluator,
        attempts: Attempts,
        stop: threading.Event,
        weights: WeightSetter | None = None,
        logits: LogitVerifier | None = None,
    ) -> None:
        self._api, self._evaluator, self._attempts = api, evaluator, attempts
        self._stop, self._weights, self._logits = stop, weights, logits
        self.timer: Callable[[], float] = time.monotonic

    def run_forever(self, interval: float) -> None:
        """Judge the queue every `interval` seconds until the stop."""
        while not self._stop.is_set():
            try:
                self.run_once()
            except ApiFault as error:
                log.warning("the API did not answer", reason=str(error), seconds=interval)
            self._stop.wait(interval)

    def run_once(self) -> None:
        """Judge the submissions in the queue; those that failed before come last.

        After each one, rounds that are over end and weights are set: a full queue may never end.

        Raises:
            ApiFault: the API does not answer.
            ConfigError: the API does not take this validator's verdicts.
        """
        seen: set[int] = set()
        while not self._stop.is_set():
            submission = self._next(seen)
            if submission is not None:
                seen.add(submission.id)
                if not self._attempt(submission):
                    return
            if self._weights is not None:
                self._weights.run_once()
            if submission is None:
                return

    def _next(self, seen: set[int]) -> QueuedSubmission | None:
        """Return the next submission to judge; each evaluation changes the order."""
        waiting = [one for one in self._api.queue() if one.id not in seen]
        due = [one for one in waiting if self._attempts.is_due(one)]
        return min(due, key=self._attempts.turn, default=None)

    def _attempt(self, submission: QueuedSubmission) -> bool:
        """Judge a submission, or note why not; return whether to go on."""
        try:
            self._judge(submission)
        except Stopped:
            self._attempts.stop(submission)
            return False
        except ConfigError:
            self._attempts.stop(submission)
            raise
        except Postponed as fault:
            pause = self._attempts.postpone(submission, str(fault))
            log.warning(
                "postponed",
                submission=submission.id,
                reason=str(fault),
                remedy=fault.remedy or "none: it is tried again",
                seconds=round(pause),
            )
        except Exception as error:  # one submission must not end the others' evaluation
            self._attempts.postpone(submission, f"{type(error).__name__}: {error}")
            log.exception("no verdict", submission=submission.id)
        return True

    def _judge(self, submission: QueuedSubmission) -> None:
        verdict = self._attempts.of(submission).verdict
        if verdict is None:
            log.info(
                "judging",
                submission=submission.id,
                hotkey=submission.miner_hotkey,
                fork=submission.fork_url,
                commit=submission.commit_hash,
                target=submission.target_sequence_length,
                claim=submission.tokens_per_sec,
            )
            self._attempts.begin(submission)
            began = self.timer()
            try:
                with heartbeat(log, "judging", submission=submission.id):
                    verdict = self._evaluator.evaluate(submission)
            finally:
                self._attempts.spend(submission, self.timer() - began)
            self._attempts.conclude(submission, verdict)
        try:
            self._write(submission, verdict)
        except ApiFault as error:  # kept: the next poll writes it without measuring again
            log.warning("verdict not written", submission=submission.id, reason=str(error))

    def _write(self, submission: QueuedSubmission, verdict: Verdict) -> None:
        verification = None
        if verdict.passed and self._logits is not None:
            final = self._attempts.of(submission).faults >= BUSY_ALLOWED
            verification = self._logits.verify(submission, final=final)
        if verification is not None:
            log.info("logits", **verification.model_dump(exclude_none=True))
            self._api.record_verification(verification)
            if not verification.verified:
                verdict = refute(verdict)
        basis = verdict.reason, verdict.measured or None, verdict.device
        self._api.mark(submission.id, verdict.score, *basis)
        self._attempts.forget(submission)
        log.info(
            "verdict",
            submission=submission.id,
            score=round(verdict.score, 4),
            actual=verdict.actual,
            reason=verdict.reason,
        )
        if not verdict.passed and submission.ip_address:
            self._api.record_failure(submission.ip_address)
