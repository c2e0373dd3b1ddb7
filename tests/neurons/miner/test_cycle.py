"""The state machine: transitions, frozen fields, failures and pauses."""

from dataclasses import replace
from typing import Any

import pytest

from neurons.miner import cycle
from neurons.miner.cycle import CLOSED, IllegalTransition, State
from neurons.runtime.errors import Fault, Held, HeldUntilRelease, Retry
from neurons.wire.outcomes import Banned, Busy, HashMismatch
from tests.neurons.miner.parts import COMMITTING, draft

FULL: dict[str, Any] = {**COMMITTING, "submission_id": 1, "reveal_block": 1}


@pytest.mark.parametrize(
    ("state", "to", "missing", "changed", "words"),
    [
        pytest.param("COMMITTED", "COMMITTING", (), (), "COMMITTED", id="back"),
        pytest.param("VALIDATED", "NEW", (), (), "VALIDATED", id="from a final state"),
        pytest.param("HELD", "REVEALED", (), (), "HELD", id="from HELD without resume"),
        pytest.param("CLAIMED", "COMMITTING", ["salt"], (), "needs salt", id="without a field"),
        pytest.param("COMMITTING", "COMMITTED", (), ["salt"], "salt", id="a frozen salt"),
        pytest.param(
            "COMMITTING", "COMMITTED", (), ["tokens_per_sec"], "tokens", id="a frozen claim"
        ),
    ],
)
def test_illegal_transitions_are_refused(state, to, missing, changed, words):
    submission = draft(state=State(state), **{**FULL, **dict.fromkeys(missing)})
    with pytest.raises(IllegalTransition, match=words):
        cycle.advance(submission, State(to), 1.0, **dict.fromkeys(changed, "other"))


def test_failures_are_counted_until_a_success() -> None:
    submission = draft()
    for attempt in range(1, 4):
        failed = cycle.pause(submission, Retry("reset"), 100.0, 1.0)
        assert (failed.state, failed.position) == (State.FAILED, State.NEW)
        assert failed.attempts == attempt
        submission = cycle.resume(failed, 200.0)
        assert (submission.state, submission.reason) == (State.NEW, None)
    assert cycle.advance(submission, State.PUBLISHED, 1.0, **FULL).attempts == 0
    with pytest.raises(IllegalTransition, match="cannot be paused"):
        cycle.pause(failed, Retry("again"), 1.0, 0.0)


def test_only_release_resets_the_number_of_failures() -> None:
    held = cycle.pause(draft(attempts=4), Held("reason", "remedy"), 2.0, 0.0)
    assert (held.state, held.reason, held.remedy) == (State.HELD, "reason", "remedy")
    assert cycle.resume(held, 3.0).attempts == 5
    assert cycle.resume(held, 3.0, reset=True).attempts == 0


def test_a_fault_may_be_held_after_some_failures() -> None:
    submission, seen = draft(), []
    for _ in range(4):
        paused = cycle.pause(submission, Fault("died", "look", 60.0, held_after=2), 0.0, 0.0)
        seen.append((paused.state, paused.retry_at))
        submission = cycle.resume(paused, 0.0)
    assert seen == [(State.FAILED, 60.0)] * 2 + [(State.HELD, 600.0)] * 2


@pytest.mark.parametrize("state", State)
def test_the_pauses_of_held_grow_to_six_hours_except_before_a_reveal(state: State) -> None:
    if state in (*CLOSED, State.HELD, State.FAILED):
        with pytest.raises(IllegalTransition):
            cycle.pause(draft(state=state), Held("r", "m"), 0.0, 1.0)
        return
    pauses = [
        cycle.pause(draft(state=state, attempts=50), Held("r", "m"), 0.0, 1.0, holds).retry_at
        for holds in (0, 1, 2, 3, 4, 5, 6, 1000)
    ]
    before_reveal = state in (State.COMMITTED, State.REVEALING)
    growing = [600.0, 1200.0, 2400.0, 4800.0, 9600.0, 19200.0, 21600.0, 21600.0]
    assert pauses == ([600.0] * 8 if before_reveal else growing)


@pytest.mark.parametrize(
    ("state", "fault", "seconds"),
    [
        (State.COMMITTED, Busy("429", 86400.0), 600.0),
        (State.REVEALING, Busy("429", 86400.0), 600.0),
        (State.REVEALING, Banned("403", 86400.0), 3600.0),
        (State.COMMITTING, Busy("429", 86400.0), 3600.0),
    ],
)
def test_before_a_reveal_only_a_ban_pauses_longer_than_ten_minutes(state, fault, seconds):
    assert cycle.pause(draft(state=state), fault, 0.0, 0.0).retry_at == seconds


def test_some_faults_wait_for_the_owner() -> None:
    refused = cycle.pause(draft(), HeldUntilRelease("reason", "remedy"), 2.0, 0.0)
    assert not refused.paused
    assert not cycle.may_continue(refused, 1e12)
    assert cycle.resume(refused, 3.0).state is State.NEW
    final = cycle.pause(draft(state=State.REVEALING), HashMismatch("reason", "remedy"), 2.0, 0.0)
    assert not final.paused
    with pytest.raises(IllegalTransition, match="no state to resume"):
        cycle.resume(final, 3.0)
    ended = cycle.abandon(final, "enough", 4.0)
    assert ended.closed
    with pytest.raises(IllegalTransition, match="is already final"):
        cycle.abandon(ended, "again", 5.0)


@pytest.mark.parametrize(
    ("now", "due"), [(99.0, True), (100.0, False), (699.0, False), (700.0, True)]
)
def test_a_pause_ends_in_time_or_when_the_clock_is_set_back(now: float, due: bool) -> None:
    held = cycle.pause(draft(), Held("reason", "remedy"), 100.0, 0.0)
    assert cycle.may_continue(held, now) is due
    earlier_version = replace(held, retry_at=None)
    assert cycle.may_continue(earlier_version, now)


@pytest.mark.parametrize(
    ("attempts", "jitter", "after", "seconds"),
    [
        *((1, 1.0, None, 2.0), (2, 1.0, None, 4.0), (8, 1.0, None, 256.0)),
        *((9, 1.0, None, 300.0), (10_000, 1.0, None, 300.0), (3, 0.5, None, 6.0)),
        *((1, 0.25, 60.0, 60.25), (1, 0.25, 1e9, 3600.25), (8, 1.0, 60.0, 256.0)),
    ],
)
def test_row_07_pauses_double_up_to_five_minutes_and_obey_retry_after_up_to_an_hour(
    attempts: int, jitter: float, after: float | None, seconds: float
) -> None:
    assert cycle.backoff_seconds(attempts, jitter, after) == seconds


def test_a_direct_draft_has_the_claim_and_none_of_the_commitment() -> None:
    direct = cycle.direct_draft(draft(state=State.PREMATURE, reason="too early", **FULL), 5.0)
    assert (direct.state, direct.mode, direct.id) == (State.CLAIMED, "direct", 0)
    for name in ("fork_url", "commit_hash", "tokens_per_sec", "benchmarks", "report"):
        assert getattr(direct, name) == FULL[name]
    assert (direct.salt, direct.commitment_hash, direct.submission_id) == (None, None, None)
    assert (direct.reason, direct.round_id, direct.created_at) == (None, None, 5.0)
