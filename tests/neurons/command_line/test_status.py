"""What `status` says of a submission in each state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neurons.command_line.status import deadline_of, next_action
from neurons.mining.submissions.cycle import RETRY_AFTER_MAX_SECONDS, State
from tests.neurons.mining.parts import draft


@pytest.mark.parametrize("state", list(State))
def test_status_says_what_comes_next(state: State) -> None:
    submission = draft(state=state, remedy="do this", retry_at=5.0, reveal_block=77)
    if state is State.FAILED:
        submission = replace(submission, resume_state=State.CLAIMED)
    said = next_action(submission)
    assert said
    assert (deadline_of(submission, 1.0) == 5.0) is (state is State.FAILED)
    if state is State.HELD:
        assert said == "do this"
    if state is State.COMMITTED:
        assert "77" in said


def test_a_clock_that_was_set_back_shows_no_pause_of_days() -> None:
    failed = replace(draft(state=State.FAILED, resume_state=State.CLAIMED), retry_at=30 * 86400.0)
    assert deadline_of(failed, 100.0) == 100.0 + RETRY_AFTER_MAX_SECONDS
    assert deadline_of(failed, 30 * 86400.0 - 5) == failed.retry_at
