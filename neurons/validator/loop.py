"""The validator's loop: it judges the queue and writes the verdicts, one submission per GPU.

Each attempt is recorded before its evaluation begins. If the validator crashes meanwhile, the next
start continues with other submissions.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from structlog.contextvars import bound_contextvars

from neurons.runtime.errors import ConfigError, Postponed
from neurons.runtime.heartbeat import heartbeat
from neurons.runtime.observe import get_logger
from neurons.runtime.process import Stopped
from neurons.validator.api import ApiFault, JudgedBefore, ValidatorApi
from neurons.validator.attempts import BEGUN_SECONDS, Attempts, age
from neurons.validator.evaluate import Evaluator, FaultyMachine
from neurons.validator.logits import LogitVerifier
from neurons.validator.verdict import Verdict, refute
from neurons.validator.weights import WeightSetter
from neurons.wire.protocol import QueuedSubmission
from neurons.wire.rules import weighted_score

BY_AGE_EVERY = 4
MAX_BUSY_REPLIES = 6
"""Postponements, about an hour in all, after which a busy inference server counts as failed."""

LOW_CLAIM_SHARE = 0.25
"""Part of the time limit that a submission gets at first if its claim is too low to earn a share;
each postponement doubles it."""

LARGE_QUEUE, LARGE_QUEUE_SECONDS = 100, 60.0
"""A queue with more submissions is read again only after this pause."""

POLL_SECONDS = 30.0
"""Pause between two polls of the queue while some GPUs are idle and others are not."""

IDLE_SECONDS = 3600.0
"""Pause between two log lines of a validator that has nothing to judge."""

log = get_logger("validator")

Reply = TypeVar("Reply")


@dataclass
class Evaluation:
    """A running evaluation."""

    submission: QueuedSubmission
    evaluator: Evaluator
    share: float  # of the time limit
    timer: Callable[[], float]
    seconds: float = 0.0  # its duration, once it has ended

    def run(self) -> Verdict:
        """Return the evaluator's verdict; all log lines of the evaluation name the GPU."""
        began = self.timer()
        named = log.bind(submission=self.submission.id, **self.details)
        try:
            with bound_contextvars(**self.details), heartbeat(named, "judging"):
                return self.evaluator.evaluate(self.submission, self.share)
        finally:
            self.seconds = self.timer() - began

    @property
    def details(self) -> dict[str, str]:
        """The GPU's name for the log, if there are several GPUs."""
        return {"gpu": self.evaluator.gpu} if self.evaluator.gpu else {}


class Validator:
    """Polls the queue and judges its submissions; each evaluator works on one at a time.

    Evaluators run in threads. Everything else (attempts, API, logits, weights) happens in the
    calling thread.
    """

    def __init__(
        self,
        api: ValidatorApi,
        evaluators: Sequence[Evaluator],
        attempts: Attempts,
        stop: threading.Event,
        weights: WeightSetter | None = None,
        logits: LogitVerifier | None = None,
    ) -> None:
        self._api, self._evaluators, self._attempts = api, evaluators, attempts
        self._stop, self._weights, self._logits = stop, weights, logits
        self.timer: Callable[[], float] = time.monotonic
        self._free: list[Evaluator] = []
        self._running: dict[Future[Verdict], Evaluation] = {}
        self._begun = 0  # evaluations of this process
        self._seen: set[int] = set()
        self._queue: Sequence[QueuedSubmission] = []
        self._queue_until = 0.0
        self._idle_line = (-1, 0.0)  # `_begun` and the time when idleness was last logged

    def run_forever(self, interval: float) -> None:
        """Judge the queue until a stop, with pauses of `interval` seconds."""
        while not self._stop.is_set():
            try:
                self.run_once()
                self._report_idleness()
            except ApiFault as error:
                log.warning("the API did not answer", reason=str(error), seconds=interval)
            except sqlite3.OperationalError as error:  # a full disk, for example
                log.error(
                    "attempts cannot be written to STATE_DIR; the validator tries again",
                    reason=str(error),
                    remedy="Free space on its disk.",
                    seconds=interval,
                )
            self._stop.wait(interval)

    def _report_idleness(self) -> None:
        """Log that no submission is due: after each evaluation, then every hour."""
        begun, logged = self._idle_line
        if begun != self._begun or self.timer() >= logged + IDLE_SECONDS:
            self._idle_line = (self._begun, self.timer())
            log.info("no submission is due", queued=len(self._queue), judged=self._begun)

    def run_once(self) -> None:
        """Judge the submissions in the queue.

        After each submission, finalize finished rounds and set weights, because a busy queue may
        never become empty. Raises ApiFault if the API does not answer, and a ConfigError if it does
        not accept this validator's verdicts.
        """
        self._free, self._seen, self._queue = [*self._evaluators], set(), []
        with ThreadPoolExecutor(len(self._evaluators)) as pool:
            try:
                while self._start(pool) or self._running:
                    self._finish_some()
                if not self._stop.is_set():
                    self._set_weights()
            finally:
                self._abandon()

    def _start(self, pool: ThreadPoolExecutor) -> bool:
        """Start due submissions while evaluators are free; return whether there were any."""
        any_due = False
        while self._free and not self._stop.is_set() and (submission := self._next()) is not None:
            any_due = True
            self._seen.add(submission.id)
            verdict = self._attempts.of(submission).verdict
            if verdict is None:
                self._begin(pool, submission)
            else:  # an earlier call could not write it to the API
                self._settle(submission, partial(self._write, submission, verdict))
        return any_due

    def _next(self) -> QueuedSubmission | None:
        """Return the next submission to judge; the order of the queue may change at each call.

        Every fourth choice goes by age alone: a stream of new clients delays nobody for ever.
        Submissions of one hotkey are judged one after another. A submission during which the
        validator crashed is judged alone, so that another crash does not count against others.
        """
        running = [one.submission for one in self._running.values()]
        if any(self._attempts.of(one).deaths for one in running):
            return None
        busy = {one.miner_hotkey for one in running}
        by_age = self._begun % BY_AGE_EVERY == BY_AGE_EVERY - 1
        while True:
            known = self._queue
            queue = self._read_queue()
            new = [
                one for one in queue if one.id not in self._seen and one.miner_hotkey not in busy
            ]
            due = [one for one in new if self._attempts.is_due(one)]
            first = min(due, key=age if by_age else self._attempts.queue_key, default=None)
            if first is None or queue is not known:
                break
            if self._tolerate(partial(self._api.is_queued, first)):
                break
            self._queue = []
        alone = first is not None and self._attempts.of(first).deaths > 0
        return None if alone and running else first

    def _read_queue(self) -> Sequence[QueuedSubmission]:
        """Return the queue; a large one is read only from time to time."""
        if len(self._queue) <= LARGE_QUEUE or self.timer() >= self._queue_until:
            self._queue = self._tolerate(self._api.queue) or []
            if len(self._queue) > LARGE_QUEUE:
                self._queue_until = self.timer() + LARGE_QUEUE_SECONDS
        return self._queue

    def _share_of_time(self, submission: QueuedSubmission) -> float:
        """Return the part of the time limit for a submission: below 1 if its claim is too low."""
        least, claim = self._api.score_to_earn, submission.tokens_per_sec or 0.0
        if least is None or weighted_score(claim, submission.target_sequence_length) > least:
            return 1.0
        return min(1.0, LOW_CLAIM_SHARE * 2.0 ** min(self._attempts.of(submission).faults, 10))

    def _begin(self, pool: ThreadPoolExecutor, submission: QueuedSubmission) -> None:
        share = self._share_of_time(submission)
        evaluation = Evaluation(submission, self._free.pop(0), share, self.timer)
        log.info(
            "judging",
            submission=submission.id,
            hotkey=submission.miner_hotkey,
            fork=submission.fork_url,
            commit=submission.commit_hash,
            target=submission.target_sequence_length,
            claim=submission.tokens_per_sec,
            **evaluation.details,
        )
        self._attempts.begin(submission)
        self._begun += 1
        self._running[pool.submit(evaluation.run)] = evaluation

    def _finish_some(self) -> None:
        """Write the verdicts of the evaluations that end first."""
        pause = POLL_SECONDS if self._free else None
        for future in wait(self._running, pause, FIRST_COMPLETED).done:
            evaluation = self._running.pop(future)
            self._record_time(evaluation)
            if isinstance(future.exception(), FaultyMachine) and (self._free or self._running):
                log.error("this GPU is not used until the queue is judged", **evaluation.details)
            else:
                self._free.append(evaluation.evaluator)
            with bound_contextvars(**evaluation.details):
                submission = evaluation.submission
                self._settle(submission, partial(self._conclude, submission, future))
            if not self._stop.is_set():
                self._set_weights()

    def _settle(self, submission: QueuedSubmission, work: Callable[[], None]) -> None:
        """Finish a submission by calling `work`, or record why there is no verdict."""
        try:
            work()
        except Stopped:
            self._stop.set()
            self._attempts.stop(submission)
        except ConfigError:
            self._attempts.stop(submission)
            raise
        except JudgedBefore as error:
            self._attempts.forget(submission)
            log.warning("verdict not counted", submission=submission.id, reason=str(error))
        except ApiFault as error:  # kept: the next poll writes it without measuring again
            log.warning("verdict not written", submission=submission.id, reason=str(error))
        except Postponed as fault:
            pause = self._attempts.postpone(submission, str(fault))
            log.warning(
                "postponed",
                submission=submission.id,
                reason=str(fault),
                remedy=fault.remedy or "none: it is tried again",
                seconds=round(pause),
            )
        except Exception as error:  # one submission must not prevent the evaluation of others
            self._attempts.postpone(submission, f"{type(error).__name__}: {error}")
            log.exception("no verdict", submission=submission.id)

    def _abandon(self) -> None:
        """After an error, stop the running evaluations; the next start writes ready verdicts."""
        if self._running:
            self._stop.set()
        for future, evaluation in self._running.items():
            error = future.exception()  # waits for its end
            self._record_time(evaluation)
            if error is None:
                self._attempts.conclude(evaluation.submission, future.result())
            else:
                self._attempts.stop(evaluation.submission)
        self._running.clear()

    def _record_time(self, evaluation: Evaluation) -> None:
        self._attempts.record_time(evaluation.submission, evaluation.seconds - BEGUN_SECONDS)

    def _set_weights(self) -> None:
        if self._weights is not None:
            self._tolerate(self._weights.run_once)

    def _tolerate(self, call: Callable[[], Reply]) -> Reply | None:
        """Return the result of an API call; None if it fails while evaluations run."""
        try:
            return call()
        except ApiFault as error:
            if not self._running:
                raise
            log.warning("the API did not answer", reason=str(error))
            return None

    def _conclude(self, submission: QueuedSubmission, future: Future[Verdict]) -> None:
        verdict = future.result()
        self._attempts.conclude(submission, verdict)
        self._write(submission, verdict)

    def _write(self, submission: QueuedSubmission, verdict: Verdict) -> None:
        comparison, failed = None, not verdict.passed
        if verdict.passed and self._logits is not None:
            final = self._attempts.of(submission).faults >= MAX_BUSY_REPLIES
            began = self.timer()
            try:
                with self._evaluators[0].lock.shared():  # no target may be timed meanwhile
                    comparison = self._logits.verify(submission, final=final)
            finally:  # a slow server delays all others, so its miner pays for the time
                self._attempts.record_time(submission, self.timer() - began)
        if comparison is not None:
            log.info("logits", **comparison.verification.model_dump(exclude_none=True))
            self._api.record_verification(comparison.verification)
            if not comparison.verification.verified:
                verdict = refute(verdict)
                failed = comparison.answered  # without a reply, nothing is refuted
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
        if failed and submission.ip_address:
            try:
                self._api.record_failure(submission.ip_address)
            except ApiFault as error:  # the verdict counts; only the address's ban may come later
                log.warning("failure not counted", submission=submission.id, reason=str(error))
