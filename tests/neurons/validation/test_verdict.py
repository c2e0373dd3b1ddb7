"""The verdict, at and around the border."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurons.validation.verdict import judge

SPEEDS = st.floats(min_value=1e-3, max_value=1e12)


@pytest.mark.parametrize(
    ("claim", "actual", "score"),
    [
        (1000.0, 1000.0, 1.0),
        (1000.0, 1250.0, 1.25),
        (1000.0, 900.0, 0.9),
        (1000.0, 899.9, 0.0),
        (1000.0, 0.0, 0.0),
        (1000.0, math.nan, 0.0),
        (1000.0, math.inf, 0.0),
        (0.0, 1000.0, 0.0),
        (-1.0, 1000.0, 0.0),
        (math.nan, 1000.0, 0.0),
        (math.inf, 1000.0, 0.0),
        (None, 1000.0, 0.0),
        (0.5, 1.0, 2.0),  # slow, but a speed
    ],
)
def test_judge(claim: float | None, actual: float, score: float) -> None:
    verdict = judge(claim, actual)
    assert verdict.score == pytest.approx(score)
    assert verdict.passed == (score > 0)


def test_a_verdict_stays_as_it_was_given() -> None:
    verdict = judge(1000.0, 500.0)
    with pytest.raises(AttributeError):
        verdict.score = 1.0  # type: ignore[misc]


def test_the_reason_names_both_speeds() -> None:
    assert "Measured 500.0 of the claimed 1000.0" in judge(1000.0, 500.0).reason


@given(claim=SPEEDS, actual=SPEEDS)
def test_the_score_is_a_number_that_a_higher_claim_never_raises(
    claim: float, actual: float
) -> None:
    score = judge(claim, actual).score
    assert math.isfinite(score)
    assert score == 0.0 or score >= 0.9
    assert judge(claim * 1.1, actual).score <= score
