"""Which round it is, and whether that calls for a new submission."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neurons.miner import rounds
from neurons.miner.cycle import State, Submission
from neurons.wire.protocol import Round
from tests.neurons.miner.parts import draft

ROUND = Round(
    id=3,
    round_number=3,
    start_time="monday",
    end_time="",
    status="active",
    time_remaining_seconds=1,
)


def test_the_same_content_is_due_once_a_round() -> None:
    last = draft(state=State.VALIDATED, round_id=3, round_start="monday", content_digest="d")

    def is_due(last: Submission | None, *present: str | int) -> bool:
        number, start, digest, mode = (*present, *(3, "monday", "d", "direct")[len(present) :])
        now = ROUND.model_copy(update={"id": number, "start_time": start})
        return rounds.is_due(last, now, str(digest), str(mode))

    assert is_due(None)
    assert not is_due(last)
    assert is_due(last, 4)
    assert is_due(last, 3, "tuesday")  # the server counts from 1 again
    assert is_due(last, 3, "monday", "e")
    assert is_due(last, 3, "monday", "a")
    again = "".join(("digest", " 1"))  # equal, and no longer the same object
    assert not is_due(replace(last, content_digest=again), 3, "monday", "digest 1")
    assert not is_due(replace(last, round_start=None))  # of a version that did not write it down
    for state in (State.REJECTED, State.RANKED, State.UNRANKED):
        assert not is_due(replace(last, state=state))
    assert is_due(replace(last, state=State.ABANDONED))
    early = replace(last, state=State.PREMATURE)
    assert is_due(early)
    assert not is_due(early, 3, "monday", "d", "commit_reveal")
    assert not is_due(replace(early, weighted_score=1.0))  # it was revealed, and may be ranked


@pytest.mark.parametrize(
    ("own", "start", "now", "found"),
    [
        (3, "monday", 4, "later"),
        (3, "monday", 3, "same"),
        (3, None, 3, "same"),
        (3, "sunday", 3, "other database"),
        (300, "monday", 300, "same"),
        (300, "monday", 30, "other database"),
        (None, None, 1, "later"),  # it was never in a round
    ],
)
def test_a_round_is_known_by_its_number_and_its_start(own, start, now, found):
    submission = draft(round_id=own, round_start=start)
    told = ROUND.model_copy(update={"id": now}).model_dump_json()
    present = Round.model_validate_json(told)  # a number of its own, as the server's is
    assert rounds.compare_round(submission, present).value == found
