"""The state machine by itself."""

from __future__ import annotations

from typing import Any

import pytest

from neurons.miner import cycle
from neurons.miner.cycle import IllegalTransition, State, Step
from tests.neurons.miner.parts import draft

FULL: dict[str, Any] = {
    "fork_url": "u",
    "commit_hash": "a" * 40,
    "content_digest": "d",
    "report": "r",
    "tokens_per_sec": 1.0,
    "benchmarks": {},
    "salt": "s",
    "commitment_hash": "c",
    "round_id": 1,
    "submission_id": 1,
    "reveal_block": 1,
}
PATH = [
    *(State.PUBLISHED, State.MEASURED, State.CLAIMED, State.COMMITTING),
    *(State.COMMITTED, State.REVEALING, State.REVEALED, State.VALIDATED),
]


@pytest.mark.parametrize(
    ("state", "to"),
    [
        (State.NEW, State.CLAIMED),
        (State.CLAIMED, State.REVEALING),
        (State.COMMITTING, State.CLAIMED),
        (State.COMMITTED, State.NEW),
        (State.COMMITTED, State.COMMITTING),
        (State.REVEALED, State.REVEALING),
        (State.VALIDATED, State.NEW),
        (State.HELD, State.REVEALED),
    ],
)
def test_arrows_that_do_not_exist_are_refused(state: State, to: State) -> None:
    with pytest.raises(IllegalTransition):
        cycle.advance(draft(state=state, **FULL), to, 1.0)


@pytest.mark.parametrize("state", PATH)
def test_a_state_needs_what_it_stands_on(state: State) -> None:
    before = PATH[PATH.index(state) - 1] if state is not PATH[0] else State.NEW
    needed = cycle._REQUIRED.get(state, ())
    for name in needed:
        fields = {**FULL, name: None}
        with pytest.raises(IllegalTransition, match=name):
            cycle.advance(draft(state=before, **fields), state, 1.0)


@pytest.mark.parametrize("name", cycle.FROZEN_FIELDS)
def test_a_commitment_is_frozen(name: str) -> None:
    committing = draft(state=State.COMMITTING, **FULL)
    with pytest.raises(IllegalTransition, match=name):
        cycle.advance(committing, State.COMMITTED, 1.0, **{name: "other"})


def test_failures_come_back_and_are_forgotten_by_success() -> None:
    submission = draft()
    for attempt in range(1, 4):
        failed = cycle.fail(submission, "reset", 100.0, 1.0)
        assert (failed.state, failed.position) == (State.FAILED, State.NEW)
        assert failed.attempts == attempt
        submission = cycle.resume(failed, 200.0)
        assert (submission.state, submission.reason) == (State.NEW, None)
    assert cycle.advance(submission, State.PUBLISHED, 1.0, **FULL).attempts == 0
    with pytest.raises(IllegalTransition):
        cycle.fail(failed, "again", 1.0, 0.0)


def test_held_goes_back_to_where_it_was_unless_it_is_final() -> None:
    failed = cycle.fail(draft(state=State.COMMITTED, **FULL), "r", 1.0, 0.0)
    held = cycle.hold(failed, "reason", "remedy", 2.0)
    assert cycle.resume(held, 3.0).state is State.COMMITTED
    assert cycle.resume(held, 3.0).attempts == 0
    final = cycle.hold(draft(), "reason", "remedy", 2.0, final=True)
    with pytest.raises(IllegalTransition):
        cycle.resume(final, 3.0)
    ended = cycle.abandon(final, "enough", 4.0)
    assert ended.closed
    with pytest.raises(IllegalTransition):
        cycle.abandon(ended, "again", 5.0)


@pytest.mark.parametrize("state", list(State))
def test_only_what_is_live_can_be_held_fail_or_come_back(state: State) -> None:
    submission = draft(state=state, resume_state=State.NEW, attempts=4, **FULL)
    waits = state in (State.FAILED, State.HELD)
    acts = {
        "cannot be held": (
            state in cycle.CLOSED or state is State.HELD,
            lambda: cycle.hold(submission, "r", "m", 9.0),
        ),
        "cannot fail": (
            state in cycle.CLOSED or waits,
            lambda: cycle.fail(submission, "r", 9.0, 0.0),
        ),
        "no state to resume": (not waits, lambda: cycle.resume(submission, 9.0)),
        "is already final": (
            state in cycle.CLOSED,
            lambda: cycle.abandon(submission, "enough", 9.0),
        ),
    }
    for words, (refused, act) in acts.items():
        if refused:
            with pytest.raises(IllegalTransition, match=words):
                act()
        else:
            assert act().updated_at == 9.0


@pytest.mark.parametrize(
    ("attempts", "jitter", "after", "seconds"),
    [
        *((n, 1.0, None, 2.0**n) for n in range(1, 9)),
        *((9, 1.0, None, 300.0), (10_000, 1.0, None, 300.0), (3, 0.5, None, 6.0)),
        *((1, 0.25, 60.0, 60.25), (1, 0.25, 1e9, 3600.25), (8, 1.0, 60.0, 256.0)),
    ],
)
def test_row_07_pauses_double_up_to_five_minutes_and_follow_the_server_for_an_hour(
    attempts: int, jitter: float, after: float | None, seconds: float
) -> None:
    assert cycle.backoff_seconds(attempts, jitter, after) == seconds


def test_a_direct_submission_takes_the_claim_over_and_nothing_else() -> None:
    claim = {"commit_hash": "c", "tokens_per_sec": 2.0, "benchmarks": {"512": {"vram_mb": 1.0}}}
    early = draft(state=State.PREMATURE, reason="too early", **{**FULL, **claim})
    direct = cycle.direct_draft(early, 5.0)
    assert (direct.state, direct.mode, direct.id) == (State.CLAIMED, "direct", 0)
    assert (direct.fork_url, direct.commit_hash, direct.tokens_per_sec) == ("u", "c", 2.0)
    assert direct.benchmarks == early.benchmarks
    left = (direct.salt, direct.commitment_hash, direct.submission_id, direct.reveal_block)
    assert left == (None, None, None, None)
    assert (direct.reason, direct.round_id, direct.created_at) == (None, None, 5.0)
    assert cycle.next_step(direct) is Step.SUBMIT
