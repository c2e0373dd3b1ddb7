"""Restarts, changed settings, full disks and outages during months of the daemon."""

import errno
import sqlite3
from typing import Any

import pytest
from structlog.testing import capture_logs

from neurons.miner import cycle
from neurons.miner.context import Context
from neurons.miner.cycle import State
from neurons.miner.daemon import run_cycle, run_forever, warn_at_start
from neurons.runtime.errors import Held, Retry
from neurons.runtime.process import Stopped
from neurons.wire.client import ApiClient
from tests.neurons.fake_validator_api import COMMIT, REVEAL, Fault
from tests.neurons.miner.parts import Key, Miner, Waits, states, stop_after


@pytest.mark.parametrize("held", [False, True])
def test_a_commitment_to_another_target_is_finished_first(miner, fake_api, held):
    first = miner(waiter=Waits(stop_after(1)))
    committed = run_cycle(first)
    assert committed.state is State.COMMITTED
    if held:  # the next start ends its pause
        paused = cycle.pause(committed, Held("The branch moved.", "Go back."), first.now(), 0.0)
        first.journal.transition(committed, paused)
    first.journal.close()
    second = miner(target_sequence_length=1024)
    assert run_cycle(second).target_sequence_length == 1024
    assert [s.state for s in second.journal.latest(5)] == [State.VALIDATED] * 2
    assert fake_api.count(REVEAL) == 2


def test_row_17_the_cycle_continues_after_a_full_disk(context, monkeypatch):
    real = context.journal.transition
    failures: list[Exception] = [
        sqlite3.OperationalError("database or disk is full"),
        OSError(errno.ENOSPC, "No space left on device"),
    ]

    def transition(*arguments: Any, **names: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*arguments, **names)

    monkeypatch.setattr(context.journal, "transition", transition)
    with capture_logs() as logs:
        done = run_cycle(context)
    assert (done.state, failures) == (State.VALIDATED, [])
    assert [row["event"] for row in logs].count("paused") == 2


def test_only_a_new_round_or_changed_kernels_cause_a_submission(context, fake_api, kernels, waits):
    ends: list[int] = []

    def then(seconds: float) -> None:
        if seconds != 5.0:
            return
        ends.append(len(fake_api.rows))
        if len(ends) == 3:
            fake_api.round_id = 2
        if len(ends) == 5:
            kernels.content = "kernel 2\n"
        if len(ends) == 7:
            raise Stopped("enough")

    waits.then = then
    run_forever(context)
    assert ends == [1, 1, 1, 2, 2, 3, 3]


def test_the_tuner_runs_between_cycles_for_later_submissions(context, fake_api, kernels, waits):
    events: list[str] = []

    class FindsOnce:
        """A tuner that finds faster kernels at its first start."""

        due = True

        def start(self, length: int) -> None:
            assert context.journal.live_submissions() == []
            events.append(f"start {length}")
            kernels.content = "tuned\n"

        def stop(self) -> None:
            events.append(f"stop {len(fake_api.rows)}")

    tuner: Any = FindsOnce()
    context.tuner = tuner
    waits.then = lambda seconds: stop_after(1)(0) if seconds == 5.0 and len(events) == 4 else None
    run_forever(context)
    # started after each verdict, stopped before the next cycle and at the program's end
    assert events == ["start 2048", "stop 1", "start 2048", "start 2048", "stop 2"]
    assert len({row["commit_hash"] for row in fake_api.rows}) == 2


def test_a_restart_does_not_submit_the_same_again(miner, fake_api, waits):
    waits.then = lambda seconds: stop_after(1)(0) if seconds == 5.0 else None
    for _ in range(2):
        context = miner()
        run_forever(context)
        context.journal.close()
    assert len(fake_api.rows) == 1


def test_row_07_a_long_outage_is_retried_with_bounded_pauses(context, fake_api, waits):
    fake_api.faults["/register_miner"].extend([Fault(503, "down")] * 60)
    assert run_cycle(context).state is State.VALIDATED
    pauses = waits.seconds[:60]
    assert max(pauses) <= 300
    assert sum(pauses) > 3600
    assert all(pause > 1 for pause in pauses)


@pytest.mark.parametrize("ahead", [0.0, 86400.0])
def test_row_12_a_start_tries_at_once_whatever_the_clock_or_the_server_said(miner, waits, ahead):
    """At boot the clock may be a day ahead; a server may request a pause of a day."""
    first = miner(now=lambda: 1e9 + ahead, waiter=Waits(stop_after(3)))
    first.client = ApiClient("http://127.0.0.1:9", Key())  # nothing listens there
    failed = run_cycle(first)
    assert (failed.state, failed.resume_state, failed.attempts) == (State.FAILED, State.NEW, 3)
    first.journal.close()
    with capture_logs() as logs:
        assert run_cycle(miner(now=lambda: 1e9, waiter=waits)).state is State.VALIDATED
    assert max(waits.seconds) == 1.0  # the poll of the queue
    (line,) = [row for row in logs if row["event"] == "trying again"]
    assert "refused" in line["reason"]


def test_row_07_each_failed_attempt_is_one_line(context, fake_api):
    fake_api.faults[COMMIT].extend([Fault(503, "busy")] * 3)
    with capture_logs() as logs:
        run_cycle(context)
    lines = [row for row in logs if "busy" in str(row)]
    assert [(row["attempt"], row["log_level"]) for row in lines] == [
        (attempt, "warning") for attempt in (1, 2, 3)
    ]


def test_an_unreachable_fork_is_retried(context, kernels, monkeypatch):
    push, failures = kernels.push, [Retry("git push: connection reset")] * 2

    def flaky(commit: str) -> None:
        if failures:
            raise failures.pop()
        push(commit)

    monkeypatch.setattr(kernels, "push", flaky)
    done = run_cycle(context)
    assert done.state is State.VALIDATED
    path = [State.NEW, State.FAILED, State.NEW, State.FAILED, State.NEW, State.PUBLISHED]
    assert states(context, done.id)[:6] == path


def test_a_stop_does_not_change_the_state(context: Context) -> None:
    context.waiter = None
    context.stop.set()
    assert run_cycle(context).state is State.NEW
    run_forever(context)  # returns


def test_a_start_warns_of_another_hotkeys_submission(miner: Miner) -> None:
    context = miner(waiter=Waits(stop_after(1)))
    committed = run_cycle(context)

    with capture_logs() as logs:
        warn_at_start(context)
        assert logs == []
        warn_at_start(miner(identity=Key("5Other")))
    (line,) = logs
    assert (line["submission"], line["hotkey"]) == (committed.id, Key().hotkey)
    assert "WALLET_HOTKEY" in line["remedy"]


def test_a_start_ends_a_long_pause_by_one_try_and_keeps_the_count(miner, fake_api):
    fake_api.faults[COMMIT].extend([Fault(429, "slow down", {"Retry-After": "86400"})] * 2)
    first = miner(waiter=Waits(stop_after(1)))
    assert run_cycle(first).attempts == 1
    first.journal.close()
    with capture_logs() as logs:
        again = run_cycle(miner(waiter=Waits(stop_after(1))))
    assert (again.state, again.attempts, fake_api.count(COMMIT)) == (State.FAILED, 2, 2)
    assert any(row["event"] == "trying again" and "slow down" in row["reason"] for row in logs)


def test_a_submission_that_an_earlier_version_held_is_tried_again(context, kernels, waits):
    """Earlier versions stored no time of the next try, and waited for their owner."""
    refuse = [Held("403", "Check the token.")]
    kernels.on_verify = lambda: (_ for _ in ()).throw(refuse.pop()) if refuse else None
    assert run_cycle(context).state is State.HELD
    with sqlite3.connect(context.journal.path) as database:
        database.execute("UPDATE submissions SET retry_at = NULL, attempts = 0")
    context.waiter = Waits(lambda seconds: stop_after(1)(0) if seconds == 5.0 else None)
    run_forever(context)
    assert context.journal.get(1).state is State.VALIDATED
