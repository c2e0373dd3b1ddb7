"""The claim under simulated noise: its limits, on fewer trials than the page shows."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.random import default_rng

from benchmarks.cases import claim_acceptance
from benchmarks.cases.claim_noise import SHAPES, Shape
from benchmarks.cases.claim_simulation import MAX_REFUTED, MIN_RATIO, simulate

BY_NAME = {shape.name: shape for shape in SHAPES}
CHEAP = [
    shape
    for shape in SHAPES
    # chances near the limit need more trials than a test has time for
    if not shape.name.startswith(("Gaussian, deviation 5", "Gaussian, deviation 1", "heavy"))
]


@pytest.mark.parametrize("shape", CHEAP, ids=lambda shape: shape.name)
def test_the_claim_is_rarely_refuted_and_high_with_little_noise(shape: Shape) -> None:
    found = simulate(shape, 40, default_rng(7), draws=100_000)
    assert found.figures["refuted"] < MAX_REFUTED
    if shape.healthy:
        assert found.figures["ratio"] >= MIN_RATIO


def test_the_simulation_refutes_a_claim_that_is_too_high() -> None:
    """A validator with slower runs than all of the miner's refutes the claim."""
    quiet = BY_NAME["Gaussian, deviation 0.4%"]
    worse = quiet._replace(later=lambda generator, count: np.full(count, 1 / 0.85))
    assert simulate(worse, 5, default_rng(7), draws=1000).figures["refuted"] == 1


def test_the_independent_loop_measures_a_known_speed(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    layer = tmp_path / "fla/layers/quasar.py"
    layer.parent.mkdir(parents=True)
    # a layer that takes a thousandth of a second for a token: its speed is known
    layer.write_text(
        "import time\nimport torch\n"
        "class QuasarAttention(torch.nn.Module):\n"
        "    def __init__(self, hidden_size, head_dim, num_heads, mode, use_short_conv):\n"
        "        super().__init__()\n"
        "        assert (hidden_size, head_dim, num_heads) == (512, 64, 8)\n"
        "    def forward(self, x):\n"
        "        time.sleep(x.shape[1] / 1000)\n"
        "        return x, None, None\n"
    )
    found = claim_acceptance.validator_runs(tmp_path, [4, 8], "cpu", at_once=2)
    assert [tokens for tokens, _ in found] == [4, 8]
    assert all(0 < speed <= 1000 for _, speed in found)
