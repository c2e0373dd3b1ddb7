"""How often a validator refutes the claim under simulated noise, and how low the claim is.

    python -m benchmarks claim_simulation --out benchmarks/honesty.json

Each trial draws a miner's runs from one noise distribution, uses as many of the first ones as the
miner would, and derives the claim with `harness.claim`. A validator's run refutes the claim if it
is below ACCEPTED_SHARE of it. A million draws resolve a chance of one in 100,000.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import datetime, timezone

import numpy as np
from numpy.random import Generator, default_rng

from benchmarks.cases.claim_noise import SHAPES, Runs, Shape
from benchmarks.engine.limits import Criterion
from benchmarks.engine.results import Entry, Run, start
from harness.claim import ACCEPTED_SHARE, MAX_RUNS, derive_claim, is_settled
from harness.sample import Correctness, Sample

MAX_REFUTED = 1e-4
"""Limit, for every shape of noise, on the chance that one run of a validator refutes the claim."""
MIN_RATIO = 0.97
"""Least ratio of the claim to the median speed on a healthy GPU."""

LENGTH = 65_536
UNDISTURBED = 1e8
"""Tokens/s of a run with a relative time of 1; the figures do not depend on it."""

MIN_RUNS = 3
"""Fewest runs of a claim in a trial; a miner takes at least 5 (`harness.measuring.plan`)."""
TRIALS = 4000
"""Claims of each shape."""
DRAWS = 1_000_000

_CHECK = Correctness(
    passed=True,
    checks=(),
    device="cuda",
    dtype="bfloat16",
    longest=LENGTH,
    seconds=0,
    seed="",
    source_digest="",
)
_RUN = Sample(
    length=LENGTH,
    tokens_per_sec=UNDISTURBED,
    vram_mb=0,
    elapsed_seconds=1,
    runs=10,
    first_call_seconds=0,
    import_seconds=0,
    cache="shared",
    source_file="",
    layer_file="",
    source_digest="",
    correctness=_CHECK,
    started_at=datetime.fromtimestamp(0, timezone.utc),
)


def measurements(runs: Runs, trial: int) -> list[Sample]:
    """Return the runs of one trial as samples of the harness."""
    second = 10 * LENGTH / UNDISTURBED  # ten calls
    return [
        _RUN.model_copy(
            update={
                "tokens_per_sec": UNDISTURBED / elapsed,
                "elapsed_seconds": second * elapsed,
                "host_seconds": second * host,
            }
        )
        for elapsed, host in zip(runs.elapsed[trial], runs.host[trial], strict=True)
    ]


def claim(samples: list[Sample]) -> tuple[float, int]:
    """Return the claim of the first samples that settle it, and their number."""
    count = next(
        n for n in range(MIN_RUNS, MAX_RUNS + 1) if n == MAX_RUNS or is_settled(samples[:n])
    )
    return derive_claim({LENGTH: samples[:count]}, LENGTH).tokens_per_sec, count


def simulate(shape: Shape, trials: int, generator: Generator, draws: int = DRAWS) -> Entry:
    runs = shape.draw(generator, trials, MAX_RUNS)
    results = [claim(measurements(runs, trial)) for trial in range(trials)]
    claims = np.array([speed for speed, _ in results]) / UNDISTURBED
    later = np.sort(1 / shape.later(generator, draws))
    below = np.searchsorted(later, ACCEPTED_SHARE * claims) / draws
    ratios = claims / np.median(later)
    figures = {
        "refuted": float(below.mean()),  # chance that one run of a validator refutes it
        "ratio": float(np.median(ratios)),  # claim / median of later runs, median of the trials
        "ratio_low": float(np.quantile(ratios, 0.05)),
        "runs": float(np.mean([count for _, count in results])),
    }
    of = {"shape": shape.name, "healthy": shape.healthy}
    return Entry(table="shapes", of=of, figures=figures)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    generator = default_rng(20_260_101)
    settings = {"trials": TRIALS}
    run = start("claim_simulation", "", args.commit, device=None, settings=settings)
    return run.growing(simulate(shape, TRIALS, generator) for shape in SHAPES)


def limits(run: Run) -> list[Criterion]:
    entries = run.table("shapes")
    refuted = [
        Criterion(f"{e.of['shape']}: refuted", e.figures["refuted"], MAX_REFUTED) for e in entries
    ]
    return refuted + [
        Criterion(f"{e.of['shape']}: claim / median", e.figures["ratio"], MIN_RATIO, True)
        for e in entries
        if e.of["healthy"]
    ]
