"""The tolerance bound against an independent quantile, and what it promises of normal noise."""

from __future__ import annotations

import math
import random

import mpmath
import pytest

from harness.claim.tolerance import NOISE_FLOOR, lower_bound, student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 9, 30])
@pytest.mark.parametrize("probability", [0.6, 10 / 11, 0.999, 1 - 5e-5, 1 - 1e-6])
def test_the_quantile_has_its_probability(freedom: int, probability: float) -> None:
    t = student_quantile(probability, freedom)
    beyond = mpmath.betainc(
        freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True
    )  # of both tails together
    assert float(beyond) / 2 == pytest.approx(1 - probability, rel=1e-6)


@pytest.mark.parametrize(
    ("probability", "freedom"), [(0.3, 3), (0.5, 3), (1.0, 3), (1.5, 3), (0.9, 0)]
)
def test_an_impossible_quantile_is_refused(probability: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        student_quantile(probability, freedom)


def test_a_further_run_misses_the_bound_as_often_as_asked() -> None:
    draw = random.Random(1)
    missed, trials = 0, 40_000
    for _ in range(trials):
        *runs, further = (math.exp(draw.gauss(0, 0.02)) for _ in range(5))
        missed += further < lower_bound(runs, 0.02)
    # four deviations of a binomial count; the floor under the deviation can only help
    assert missed / trials == pytest.approx(0.02, abs=4 * math.sqrt(0.02 * 0.98 / trials))


def test_runs_that_agree_by_chance_are_not_believed() -> None:
    assert lower_bound([100.0] * 5, 1 / 11) < 100 * (1 - NOISE_FLOOR)


def test_one_run_bounds_nothing() -> None:
    assert lower_bound([100.0], 0.1) == 0
    with pytest.raises(ValueError, match="at least one"):
        lower_bound([], 0.1)
