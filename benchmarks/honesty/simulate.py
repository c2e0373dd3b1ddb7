"""Simulate how often a validator refutes the claim, and what honesty costs.

    python -m benchmarks.honesty.simulate [--trials 4000] [--out benchmarks/honesty.json]

Every trial takes runs of one shape of noise as the miner does, until they are settled, and derives
the claim by `harness.claim` itself. The chance that one run of a validator misses the claim is then
read off a million draws of that shape, which is exact enough for chances of one in 100,000.
"""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from numpy.random import Generator, default_rng

from benchmarks.honesty.page import DATA
from benchmarks.honesty.results import ClaimSimulation, Simulated, write
from benchmarks.honesty.shapes import SHAPES, Runs, Shape
from benchmarks.results import ROOT
from harness.claim import RUNS_MOST, derive_claim, is_settled
from harness.claim.derive import ACCEPTED_SHARE
from harness.sample import Correctness, Sample
from harness.source import tree_commit

LENGTH = 65_536
UNDISTURBED = 1e8
"""Tokens/s of a run that takes one relative second; the claim does not depend on it."""

LEAST_RUNS = 3
DRAWS = 1_000_000

_CHECK = Correctness(
    passed=True, checks=(), device="cuda", dtype="bfloat16", longest=LENGTH, seconds=0, seed="",
    source_digest="",
)  # fmt: skip
_RUN = Sample(
    length=LENGTH, tokens_per_sec=UNDISTURBED, vram_mb=0, elapsed_seconds=1, runs=10,
    first_call_seconds=0, import_seconds=0, cache="shared", source_file="", layer_file="",
    source_digest="", correctness=_CHECK, started_at=datetime.fromtimestamp(0, timezone.utc),
)  # fmt: skip


def measurements(runs: Runs, trial: int) -> list[Sample]:
    """Return the runs of one trial as the harness would report them."""
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


def claim(taken: list[Sample]) -> tuple[float, int]:
    """Return the claim and the runs that it took, of those that would be taken one by one."""
    count = next(
        n for n in range(LEAST_RUNS, RUNS_MOST + 1) if n == RUNS_MOST or is_settled(taken[:n])
    )
    return derive_claim({LENGTH: taken[:count]}, LENGTH).tokens_per_sec, count


def simulate(shape: Shape, trials: int, generator: Generator, draws: int = DRAWS) -> Simulated:
    """Return how the claim fares under one shape of noise."""
    runs = shape.draw(generator, trials, RUNS_MOST)
    found = [claim(measurements(runs, trial)) for trial in range(trials)]
    claims = np.array([speed for speed, _ in found]) / UNDISTURBED
    later = np.sort(1 / shape.later(generator, draws))
    missed = np.searchsorted(later, ACCEPTED_SHARE * claims) / draws
    ratios = claims / np.median(later)
    return Simulated(
        shape=shape.name,
        healthy=shape.healthy,
        refuted=float(missed.mean()),
        ratio=float(np.median(ratios)),
        ratio_low=float(np.quantile(ratios, 0.05)),
        runs=float(np.mean([count for _, count in found])),
    )


def main() -> None:
    """Simulate every shape and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=4000, help="claims of each shape")
    parser.add_argument("--out", type=Path, default=DATA, help="where the figures are written")
    args = parser.parse_args()
    generator = default_rng(20_260_101)
    shapes = []
    for shape in SHAPES:
        shapes.append(simulate(shape, args.trials, generator))
        print(shapes[-1], flush=True)
    write(
        args.out,
        ClaimSimulation(
            created=datetime.now(timezone.utc).date(),
            commit=tree_commit(ROOT),
            trials=args.trials,
            shapes=tuple(shapes),
        ),
    )


if __name__ == "__main__":
    main()
