"""The state machine: transitions, frozen fields, failures and pauses."""

from __future__ import annotations

from typing import Any

import pytest

from neurons.miner import cycle
from neurons.miner.cycle import IllegalTransition, State, Step
from tests.neurons.miner.parts import COMMITTING, draft

FULL: dict[str, Any] = {**COMMITTING, "submission_id": 1, "reveal_block": 1}


@pytest.mark.parametrize(
    ("state", "to"),
    [
        (State.COMMITTED, State.COMMITTING),  # back
        (State.VALIDATED, State.NEW),  # from a final state
        (State.HELD, State.REVEALED),  # only by `resume`
    ],
)
def test_illegal_transitions_are_refused(state: State, to: State) -> None:
    with pytest.raises(IllegalTransition):
        cycle.advance(draft(state=state, **FULL), to, 1.0)


def test_a_state_requires_its_fields() -> None:
    claimed = draft(state=State.CLAIMED, **{**FULL, "salt": None})
    with pytest.raises(IllegalTransition, match="COMMITTING needs salt"):
        cycle.advance(claimed, State.COMMITTING, 1.0)


@pytest.mark.parametrize("name", ["tokens_per_sec", "salt"])
def test_fields_are_frozen_after_the_commitment(name: str) -> None:
    committing = draft(state=State.COMMITTING, **FULL)
    with pytest.raises(IllegalTransition, match=name):
        cycle.advance(committing, State.COMMITTED, 1.0, **{name: "other"})


def test_failures_are_counted_until_a_success() -> None:
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


def test_held_resumes_its_earlier_state_unless_it_is_final() -> None:
    failed = cycle.fail(draft(state=State.COMMITTED, **FULL), "r", 1.0, 0.0)
    held = cycle.hold(failed, "reason", "remedy", 2.0)
    assert cycle.resume(held, 3.0).state is State.COMMITTED
    assert cycle.resume(held, 3.0).attempts == 0
    with pytest.raises(IllegalTransition, match="cannot be held"):
        cycle.hold(held, "again", "remedy", 3.0)
    final = cycle.hold(draft(), "reason", "remedy", 2.0, final=True)
    with pytest.raises(IllegalTransition, match="no state to resume"):
        cycle.resume(final, 3.0)
    ended = cycle.abandon(final, "enough", 4.0)
    assert ended.closed
    with pytest.raises(IllegalTransition, match="is already final"):
        cycle.abandon(ended, "again", 5.0)
    with pytest.raises(IllegalTransition, match="cannot fail"):
        cycle.fail(ended, "late", 5.0, 0.0)


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
    assert cycle.next_step(direct) is Step.SUBMIT
