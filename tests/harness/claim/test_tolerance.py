"""The quantile against an independent one, and the tolerance bound under simulated noise."""

from __future__ import annotations

import math
import random

import mpmath
import pytest

from harness.claim.tolerance import lower_bound, student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("probability", [0.6, 10 / 11, 1 - 5e-5])
def test_the_quantile_has_its_probability(freedom: int, probability: float) -> None:
    t = student_quantile(probability, freedom)
    beyond = mpmath.betainc(
        freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True
    )  # of both tails together
    assert float(beyond) / 2 == pytest.approx(1 - probability, rel=1e-6)


def test_a_further_run_is_below_the_bound_with_the_stated_probability() -> None:
    draw = random.Random(1)
    missed, trials = 0, 10_000
    for _ in range(trials):
        *runs, further = (math.exp(draw.gauss(0, 0.02)) for _ in range(5))
        missed += further < lower_bound(runs, 0.02)
    # four standard deviations of a binomial count; NOISE_FLOOR can only lower it
    assert missed / trials == pytest.approx(0.02, abs=4 * math.sqrt(0.02 * 0.98 / trials))
