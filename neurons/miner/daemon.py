"""The daemon: runs the steps of submissions and retries after faults, until it is stopped."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import TypeVar

from neurons.miner import cycle, selection
from neurons.miner.api_address import absent, follow_api, is_absent, require_competition
from neurons.miner.context import PATIENCE, Context
from neurons.miner.cycle import BEFORE_COMMITMENT, State, Submission
from neurons.miner.journal import Journal, StaleSubmission
from neurons.miner.recorder import progress_of
from neurons.miner.standing import is_due
from neurons.miner.steps import commit, follow, prepare, reveal, submit
from neurons.runtime.errors import Fault, Held
from neurons.runtime.heartbeat import FIRST_SECONDS, heartbeat
from neurons.runtime.identity import registration_command
from neurons.runtime.process import DISK_FAULTS, Stopped
from neurons.wire.outcomes import NotOnSubnet

Result = TypeVar("Result")

StepFunction = Callable[[Submission, Context], Submission]

STEPS: dict[State, tuple[str, StepFunction]] = {
    State.NEW: ("publish", prepare.publish),
    State.PUBLISHED: ("measure", prepare.measure),
    State.MEASURED: ("claim", prepare.claim),
    State.COMMITTING: ("commit", commit.run),
    State.COMMITTED: ("reveal", reveal.run),
    State.SUBMITTING: ("submit", submit.run),
    State.REVEALING: ("reveal", reveal.run),
    State.REVEALED: ("follow", follow.run),
}
"""Name and function of each state's step. From CLAIMED, the mode selects commit or submit."""
MIN_INTERVAL_SECONDS = 1.0
REMIND_SECONDS = 3600.0


def run_cycle(context: Context) -> Submission:
    """End all pauses, as a start does, then process a submission until it is closed or HELD.

    Commitments to other targets come first. After a premature commitment, the miner submits the
    same claim directly. At a stop, it returns the unfinished submission; without one it raises
    Stopped.
    """
    _despite_faults(context, lambda: selection.end_pauses(context))
    return _run_cycle(context)


def _run_cycle(context: Context) -> Submission:
    for other in _despite_faults(context, lambda: selection.others(context)):
        _drive(other, context)
    submission = _drive(_despite_faults(context, lambda: selection.current(context)), context)
    if submission.never_revealed and context.submission_mode == "direct":
        submission = _drive(_despite_faults(context, lambda: selection.create(context)), context)
    return submission


def run_forever(
    context: Context, after_cycle: Callable[[Submission], object] = lambda _: None
) -> None:
    """Run a cycle whenever there is something to submit, until stopped."""
    watch = _Watch(context)
    interval = max(context.settings.optimization_interval, MIN_INTERVAL_SECONDS)
    try:
        _despite_faults(context, lambda: selection.end_pauses(context))
        if selection.live(context) is not None or _despite_faults(context, watch.wants_cycle):
            after_cycle(_run_cycle(context))
        else:
            context.log.info("waiting for a new round or changed kernels")
        while True:
            due = _despite_faults(context, lambda: selection.seconds_to_retry(context))
            context.wait(min(interval, max(due, MIN_INTERVAL_SECONDS)))
            if _despite_faults(context, watch.wants_cycle):
                _stop_tuning(context)
                after_cycle(_run_cycle(context))
            else:
                _tune(context)
    except Stopped:
        context.log.info("stopped")
    finally:
        _stop_tuning(context)


def _tune(context: Context) -> None:
    """Look for faster kernels, once after each cycle and while no submission is live."""
    last = context.journal.last_closed(context.identity.hotkey, context.settings.target)
    if context.tuner and last and last.commit_hash and selection.live(context) is None:
        context.tuner.start(last.target_sequence_length)


def _stop_tuning(context: Context) -> None:
    if context.tuner:
        context.tuner.stop()
        context.tuner.due = True


def release(journal: Journal, submission: Submission, now: float) -> Submission:
    """Resume a HELD submission at its owner's request; or raise an IllegalTransition."""
    if submission.state is State.HELD and submission.resume_state is None:
        raise cycle.IllegalTransition(
            f"Submission {submission.id} cannot continue: {submission.reason} Abandon it instead."
        )
    after = cycle.resume(submission, now, reset=True)
    return journal.transition(submission, after, kind="acknowledged")


def abandon(journal: Journal, submission: Submission, now: float) -> Submission:
    """End a live submission without a verdict, at its owner's request."""
    after = cycle.abandon(submission, "Abandoned by its owner.", now)
    return journal.transition(submission, after, kind="acknowledged")


def warn_at_start(context: Context) -> None:
    """Warn of other hotkeys' unfinished submissions, and of an API that judges commitments early.

    Only the hotkey of a commitment can reveal it.
    """
    for other in context.journal.live_submissions():
        if other.hotkey != context.identity.hotkey and other.position not in BEFORE_COMMITMENT:
            context.log.warning(
                "an unfinished submission belongs to a hotkey that is not configured",
                submission=other.id,
                hotkey=other.hotkey,
                state=other.state.value,
                remedy="set WALLET_MINER_NAME and WALLET_HOTKEY back until its verdict",
            )
    known = context.journal.judges_early(context.client.base_url, context.now())
    if context.insists_on_reveal and known is not None:
        context.log.warning(
            "this API shows signs of judging commitments before their reveal, when nothing can "
            "be measured; SUBMISSION_MODE=auto or direct avoids that"
        )


def _drive(submission: Submission, context: Context) -> Submission:
    """Run steps until the submission is closed or held, or until a stop."""
    key = submission.id

    def advance() -> Submission:
        present = context.journal.get(key)  # a full disk may have interrupted the step half-way
        return _run_step(present, context) if has_step(present) else present

    while has_step(submission) and not context.stop.is_set():
        try:
            submission = _despite_faults(context, advance)
        except Stopped:
            return context.journal.get(key)
        except StaleSubmission:
            submission = context.journal.get(key)
    return submission


def _despite_faults(context: Context, act: Callable[[], Result]) -> Result:
    """Return the result of `act`; while the disk or the system fails, pause and call it again.

    The process continues, because the journal may be unable to record such a fault, and a process
    manager would give up after a few failed starts. `act` must read its starting point from the
    journal. A stop during a pause raises Stopped.
    """
    failures = 0
    while True:
        try:
            return act()
        except (sqlite3.OperationalError, OSError) as error:
            failures += 1
            what = "operating system error"
            if isinstance(error, sqlite3.Error) or error.errno in DISK_FAULTS:
                what = "cannot write to the state folder"
            _pause(context, failures, f"{what}: {error}")


def _pause(context: Context, failures: int, reason: str) -> None:
    """Log a fault that is not journaled, and wait; pauses grow. A stop raises Stopped."""
    seconds = cycle.backoff_seconds(failures, context.jitter())
    context.log.error("paused", reason=reason, seconds=round(seconds))
    context.wait(seconds)


def has_step(submission: Submission) -> bool:
    """Return whether there is a next step: not if the submission is closed or HELD."""
    return not (submission.closed or submission.state is State.HELD)


def _run_step(submission: Submission, context: Context) -> Submission:
    if submission.state is State.FAILED:
        end = submission.retry_at or 0.0
        # at most the whole pause: the clock may have been turned back since
        context.wait(min(max(end - context.now(), 0.0), end - submission.updated_at))
        return selection.resume(submission, context)
    state = submission.state
    if state is State.CLAIMED:
        state = State.SUBMITTING if submission.mode == "direct" else State.COMMITTING
    name, run = STEPS[state]
    try:
        submission = follow_api(submission, context)
        if submission.state in (State.NEW, State.CLAIMED):
            require_competition(context)
        quiet = context.quiet_seconds
        with heartbeat(
            context.log,
            name,
            first=min(FIRST_SECONDS, quiet),
            longest=quiet,
            progress=lambda: progress_of(context.settings.state_dir),
            submission=submission.id,
        ):
            return run(submission, context)
    except Fault as caught:
        fault = caught
        if isinstance(fault, NotOnSubnet):
            command = registration_command(context.settings)
            fault.remedy = f"Register the hotkey on the chain, then start again: `{command}`."
        if context.stop.is_set() and not isinstance(fault, Held):
            raise Stopped("stop requested") from fault
    except sqlite3.IntegrityError:
        reason = "Another live submission has this hotkey and target length."
        fault = Held(reason, f"Wait for its verdict, or run `{context.script} abandon`.")
    present = context.journal.get(submission.id)
    holds = context.journal.holds(present)
    return context.record(
        present, cycle.pause(present, fault, context.now(), context.jitter(), holds)
    )


class _Watch:
    """Decides between cycles whether another one is due."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._last_logged: dict[str, float] = {}
        self._failures = 0
        self._ranked_at = -REMIND_SECONDS

    def wants_cycle(self) -> bool:
        """Return whether there is a submission to continue, or something new to submit."""
        context = self._context
        live = selection.live(context)
        if selection.others(context):
            return True
        if live is not None:
            if live.state is not State.HELD or selection.is_due(live, context):
                return True
            self._remind("still held", submission=live.id, reason=live.reason, remedy=live.remedy)
            return False
        if is_absent(context):
            self._remind(absent(context))
            return False
        try:
            now = context.client.current_round()
        except Fault as fault:
            self._failures += 1
            if self._failures >= PATIENCE:
                context.alerts.begin("api", f"the API does not answer: {fault.reason}", "away")
            _pause(context, self._failures, fault.reason)
            return False
        self._failures = 0
        context.alerts.end("api", "away")
        last = context.journal.last_closed(context.identity.hotkey, context.settings.target)
        digest, mode = context.content_digest(), context.submission_mode
        if is_due(last, now, digest, mode):
            return True
        self._remind("these kernels have their verdict; waiting for changed ones or a new round")
        self._watch_rank(last)
        return False

    def _watch_rank(self, last: Submission | None) -> None:
        """Check once an hour whether the hotkey is still ranked; if not, send one alert."""
        now = time.monotonic()
        if last is None or last.rank is None or now - self._ranked_at < REMIND_SECONDS:
            return
        self._ranked_at = now
        try:
            rows = self._context.client.weights(int(last.round_id or 0)).weights
        except Fault:
            return
        if rows and all(row.hotkey != last.hotkey for row in rows):
            text = f"submission {last.id} had rank {last.rank} and is not ranked any more"
            self._context.alerts.begin("rank", text, last.id)

    def _remind(self, sentence: str, **details: object) -> None:
        """Log `sentence` at most once in REMIND_SECONDS."""
        now = time.monotonic()
        if now - self._last_logged.get(sentence, -REMIND_SECONDS) >= REMIND_SECONDS:
            self._last_logged[sentence] = now
            self._context.log.info(sentence, **details)
