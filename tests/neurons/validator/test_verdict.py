"""The verdict, at and around the limits."""

from __future__ import annotations

import math

import pytest

from neurons.validator.verdict import judge, refute, reject


@pytest.mark.parametrize(
    ("claim", "actual", "score"),
    [
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


def test_a_reason_stays_on_one_printable_line() -> None:
    """It may name a fork's files, and is shown on terminals and pages."""
    reason = reject("a.so\nPASSED: \x1b[32m\u202egood\x9b").reason
    assert reason == "a.so PASSED: \N{REPLACEMENT CHARACTER}[32m\ufffdgood\ufffd"


def test_a_failed_logit_verification_replaces_the_reason() -> None:
    confirmed = judge(100.0, 95.0)
    refuted = refute(confirmed)
    assert "Confirmed" not in refuted.reason
    assert "95.0 tokens/s measured, 100.0 claimed" in refuted.reason
    assert refuted.score == confirmed.score  # the API excludes it by its verification
