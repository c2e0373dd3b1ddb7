"""The claim under simulated noise: the promises, on fewer trials than the page shows."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.random import default_rng

from benchmarks.honesty.page import DATA, RATIO_LEAST, REFUTED_MOST, limits
from benchmarks.honesty.results import load
from benchmarks.honesty.shapes import SHAPES, Shape
from benchmarks.honesty.simulate import simulate
from benchmarks.limits import missed

BY_NAME = {shape.name: shape for shape in SHAPES}
CHEAP = [
    shape
    for shape in SHAPES
    # chances near the limit need more trials than a test has time for
    if not shape.name.startswith(("Gaussian, deviation 5", "Gaussian, deviation 1", "heavy"))
]


@pytest.mark.parametrize("shape", CHEAP, ids=lambda shape: shape.name)
def test_the_claim_is_hardly_ever_refuted_and_high_where_it_is_quiet(shape: Shape) -> None:
    found = simulate(shape, 40, default_rng(7), draws=100_000)
    assert found.refuted < REFUTED_MOST
    if shape.healthy:
        assert found.ratio >= RATIO_LEAST


def test_the_simulation_sees_a_claim_that_is_too_high() -> None:
    """Noise that the runs do not show must come out as refuted, or the figures mean nothing."""
    quiet = BY_NAME["Gaussian, deviation 0.4%"]
    worse = quiet._replace(later=lambda generator, count: np.full(count, 1 / 0.85))
    assert simulate(worse, 5, default_rng(7), draws=1000).refuted == 1


def test_more_runs_of_the_same_noise_are_claimed_no_lower_on_average() -> None:
    from benchmarks.honesty.simulate import LENGTH, measurements
    from harness.claim import derive_claim

    runs = BY_NAME["Gaussian, deviation 0.4%"].draw(default_rng(7), 200, 10)

    def mean(count: int) -> float:
        claims = [
            derive_claim({LENGTH: measurements(runs, trial)[:count]}, LENGTH).tokens_per_sec
            for trial in range(200)
        ]
        return float(np.mean(claims))

    means = [mean(count) for count in (3, 5, 10)]
    assert means == pytest.approx(sorted(means), rel=5e-4)
    assert means[0] < means[1]


def test_the_committed_simulation_keeps_every_promise() -> None:
    run = load(DATA)
    assert {one.shape for one in run.shapes} == set(BY_NAME)
    assert missed(limits(run)) == []
