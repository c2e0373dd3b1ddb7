"""The claim under simulated noise: the promises, on fewer trials than the page shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.random import default_rng

from benchmarks.cases import claim_acceptance
from benchmarks.cases.claim_noise import SHAPES, Shape
from benchmarks.cases.claim_simulation import RATIO_LEAST, REFUTED_MOST, limits, simulate
from benchmarks.engine.limits import missed
from benchmarks.engine.results import Entry, Run, load
from benchmarks.report import claim as page
from benchmarks.report.documents import RESULTS
from tests.benchmarks.runs import run_of

BY_NAME = {shape.name: shape for shape in SHAPES}
CHEAP = [
    shape
    for shape in SHAPES
    # chances near the limit need more trials than a test has time for
    if not shape.name.startswith(("Gaussian, deviation 5", "Gaussian, deviation 1", "heavy"))
]

DOCUMENT = RESULTS / "claim.md"


@pytest.mark.parametrize("shape", CHEAP, ids=lambda shape: shape.name)
def test_the_claim_is_hardly_ever_refuted_and_high_where_it_is_quiet(shape: Shape) -> None:
    found = simulate(shape, 40, default_rng(7), draws=100_000)
    assert found.figures["refuted"] < REFUTED_MOST
    if shape.healthy:
        assert found.figures["ratio"] >= RATIO_LEAST


def test_the_simulation_sees_a_claim_that_is_too_high() -> None:
    """Noise that the runs do not show must come out as refuted, or the figures mean nothing."""
    quiet = BY_NAME["Gaussian, deviation 0.4%"]
    worse = quiet._replace(later=lambda generator, count: np.full(count, 1 / 0.85))
    assert simulate(worse, 5, default_rng(7), draws=1000).figures["refuted"] == 1


def test_more_runs_of_the_same_noise_are_claimed_no_lower_on_average() -> None:
    from benchmarks.cases.claim_simulation import LENGTH, measurements
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


def test_a_loop_that_knows_nothing_of_the_harness_judges_the_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    layer = tmp_path / "fla/layers/quasar.py"
    layer.parent.mkdir(parents=True)
    # a layer that takes a hundredth of a second for a token: its speed is known
    layer.write_text(
        "import time\nimport torch\n"
        "class QuasarAttention(torch.nn.Module):\n"
        "    def __init__(self, hidden_size, head_dim, num_heads, mode, use_short_conv):\n"
        "        super().__init__()\n"
        "        assert (hidden_size, head_dim, num_heads) == (512, 64, 8)\n"
        "    def forward(self, x):\n"
        "        time.sleep(x.shape[1] / 100)\n"
        "        return x, None, None\n"
    )
    found = claim_acceptance.validator_runs(tmp_path, [4, 8, 8], "cpu", at_once=2)
    assert [tokens for tokens, _ in found] == [4, 8, 8]
    assert all(0 < speed <= 100 for _, speed in found)


def judged(
    speeds: tuple[float, ...] = (100.0, 101.0, 99.0), validator: float = 101.9, **settings: float
) -> Run:
    figures = {"harness": 101.0, "validator": validator, "host_share": 0.1}
    usual = {
        "target": 1000,
        "cycle_seconds": 100.0,
        "confirm_seconds": 40.0,
        "claim": 99.0,
        "claim_runs": 5,
    }
    return run_of(
        "claim_acceptance",
        Entry(table="validator", of={"tokens": 1000}, series={"tokens_per_sec": speeds}),
        Entry(table="agreement", of={"tokens": 1000}, figures=figures),
        settings={**usual, **settings},
    )


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, None),
        ({"speeds": (100.0, 89.0, 100.0)}, "refute the claim: 1, limit 0"),
        ({"claim": 96.0}, "claim / median"),
        ({"cycle_seconds": 241.0}, "from nothing"),
        ({"confirm_seconds": 61.0}, "confirming"),
        (
            {"validator": 99.0},
            "1,000 tokens, harness and validator's loop apart, %: 2.02, limit 1",
        ),
    ],
)
def test_what_must_hold_on_a_gpu(changes: dict[str, Any], what: str | None) -> None:
    found = missed(claim_acceptance.limits(judged(**changes)))
    assert len(found) == (what is not None)
    assert all(str(what) in line for line in found)


def test_the_page_shows_a_run_on_a_gpu() -> None:
    text = page.acceptance(judged(claim=99e6, speeds=(100e6, 101e6, 99e6)))
    assert "| claim at 1,000 tokens | 99.0 M tokens/s by 5 runs |" in text
    assert "| validator's loop | 3 runs, 99.0 to 101.0, median 100.0 |" in text


def test_the_committed_simulation_keeps_every_promise() -> None:
    run = load(page.SIMULATION)
    assert {entry.of["shape"] for entry in run.entries} == set(BY_NAME)
    assert missed(limits(run)) == []
