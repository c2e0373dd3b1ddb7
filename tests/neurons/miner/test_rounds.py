"""Comparison of rounds, and whether a new submission is due."""

from dataclasses import replace

import pytest

from neurons.miner import standing as rounds
from neurons.miner.cycle import State, Submission
from neurons.wire.protocol import Round
from tests.neurons.miner.parts import draft

MONDAY, SUNDAY = "2026-01-05T00:00:00", "2026-01-04T00:00:00"
ROUND = Round(
    id=3, round_number=3, start_time=MONDAY, end_time="", status="active", time_remaining_seconds=1
)


def test_the_same_content_is_due_once_a_round() -> None:
    last = draft(state=State.VALIDATED, round_id=3, round_start=MONDAY, content_digest="d")

    def is_due(last: Submission | None, *, digest: str = "d", mode: str = "direct") -> bool:
        return rounds.is_due(last, ROUND, digest, mode)

    assert is_due(None)
    assert not is_due(last)
    assert is_due(replace(last, round_id=2))
    assert is_due(last, digest="e")
    assert is_due(replace(last, state=State.ABANDONED))
    premature = replace(last, state=State.PREMATURE)
    assert is_due(premature)
    assert not is_due(premature, mode="commit_reveal")
    assert not is_due(replace(premature, weighted_score=1.0))  # it was revealed, and may be ranked


@pytest.mark.parametrize(
    ("number", "start", "relation"),
    [
        (2, MONDAY, "later"),
        (3, MONDAY, "same"),
        (3, None, "same"),  # an older version did not store the start
        (3, SUNDAY, "other database"),
        (30, MONDAY, "other database"),
        (None, None, "later"),  # the submission was never in a round
    ],
)
def test_a_round_is_identified_by_its_number_and_its_start(number, start, relation):
    submission = draft(round_id=number, round_start=start)
    assert rounds.compare_round(submission, ROUND).value == relation


def test_a_start_that_cannot_be_read_proves_no_new_database() -> None:
    submission = draft(round_id=3, round_start=MONDAY)
    now = ROUND.model_copy(update={"start_time": "Monday"})
    assert rounds.compare_round(submission, now) is rounds.Relation.SAME
