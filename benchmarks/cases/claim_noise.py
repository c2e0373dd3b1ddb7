"""Noise models: each `Shape` draws durations of runs as multiples of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Seconds = NDArray[np.float64]

HOST_BUSY = 1.517
"""Duration of a run on a busy host, as a multiple of an undisturbed run's: of two processes at
65,536 tokens."""


class Runs(NamedTuple):
    """Relative durations `[trials, runs]` of the timed calls, and of the host's work."""

    elapsed: Seconds
    host: Seconds


class Shape(NamedTuple):
    """One kind of noise.

    Attributes:
        healthy: an undisturbed GPU has this noise, so the claim must stay near the median.
        draw: returns runs `[trials, runs]` in the order of their measurement.
        later: returns so many runs of a validator.
    """

    name: str
    healthy: bool
    draw: Callable[[Generator, int, int], Runs]
    later: Callable[[Generator, int], Seconds]


def _alike(
    name: str, factors: Callable[[Generator, tuple[int, int]], Seconds], *, healthy: bool = False
) -> Shape:
    """Return a shape of independent runs that wait only for the GPU."""

    def draw(generator: Generator, trials: int, runs: int) -> Runs:
        elapsed = factors(generator, (trials, runs))
        return Runs(elapsed, 0.2 * elapsed)

    return Shape(name, healthy, draw, lambda generator, count: factors(generator, (count, 1))[:, 0])


def _gaussian(deviation: float, *, healthy: bool = False) -> Shape:
    return _alike(
        f"Gaussian, deviation {deviation:.1%}",
        lambda generator, size: np.exp(generator.normal(0, deviation, size)),
        healthy=healthy,
    )


def _power_limit(range_: float) -> Shape:
    """Uniform in a range: the power limit lowers the clock at a random moment of each run."""
    return _alike(
        f"power limit, anywhere within {range_:.1%}",
        lambda generator, size: 1 / (1 + generator.uniform(-range_ / 2, range_ / 2, size)),
    )


def _heavy(scale: float, *, one_sided: bool) -> Shape:
    def factors(generator: Generator, size: tuple[int, int]) -> Seconds:
        tail = scale * generator.standard_t(3, size)
        return 1 + np.abs(tail) if one_sided else np.exp(tail)

    side = "slow side only" if one_sided else "both sides"
    return _alike(f"heavy tail, Student's t of 3, scale {scale:.1%}, {side}", factors)


def _two_clocks(share: float, depth: float) -> Shape:
    def factors(generator: Generator, size: tuple[int, int]) -> Seconds:
        slow = generator.random(size) < share
        return np.exp(generator.normal(0, 0.005, size)) / np.where(slow, 1 - depth, 1.0)

    return _alike(f"bimodal, GPU {depth:.0%} slower in {share:.0%} of runs", factors)


def _busy_host(share: float) -> Shape:
    """Calls that wait for the host, which is busy in a share of the processes."""

    def both(generator: Generator, size: tuple[int, int]) -> Runs:
        host = np.where(generator.random(size) < share, HOST_BUSY, 1.0)
        gpu = 0.87
        return Runs(np.maximum(gpu, host) * np.exp(generator.normal(0, 0.005, size)), host)

    return Shape(
        f"bimodal, host {HOST_BUSY - 1:.0%} slower in {share:.0%} of runs",
        False,
        lambda generator, trials, runs: both(generator, (trials, runs)),
        lambda generator, count: both(generator, (count, 1)).elapsed[:, 0],
    )


def _drift(step: float, further: int) -> Shape:
    """Each run is slower than the previous one; the validator measures `further` runs later."""

    def draw(generator: Generator, trials: int, runs: int) -> Runs:
        noise = np.exp(generator.normal(0, 0.005, (trials, runs)))
        elapsed = noise * np.exp(step * np.arange(runs))
        return Runs(elapsed, 0.2 * elapsed)

    def later(generator: Generator, count: int) -> Seconds:
        return np.exp(generator.normal(step * (10 + further), 0.005, count))

    return Shape(f"drifting, {step:.1%} slower each run, {further} more", False, draw, later)


def _boost(gain: float, decay: float) -> Shape:
    """The first runs are faster on a cold GPU; the validator's GPU is warm."""

    def draw(generator: Generator, trials: int, runs: int) -> Runs:
        noise = np.exp(generator.normal(0, 0.005, (trials, runs)))
        elapsed = noise / (1 + gain * np.exp(-np.arange(runs) / decay))
        return Runs(elapsed, 0.2 * elapsed)

    return Shape(
        f"boost, the first run {gain:.0%} fast, no heat soak",
        False,
        draw,
        lambda generator, count: np.exp(generator.normal(0, 0.005, count)),
    )


SHAPES = (
    _gaussian(0.004, healthy=True),
    _gaussian(0.008, healthy=True),
    *(_gaussian(deviation) for deviation in (0.015, 0.03, 0.05, 0.1)),
    _power_limit(0.09),
    *(_busy_host(share) for share in (0.05, 0.2, 0.5)),
    *(_two_clocks(share, 0.08) for share in (0.1, 0.5)),
    _drift(0.003, 10),
    _drift(0.007, 3),
    _boost(0.05, 3),
    _boost(0.2, 3),
    _heavy(0.004, one_sided=False),
    _heavy(0.004, one_sided=True),
)
"""On an H200, undisturbed pairs of runs of 262,144 tokens and more had a deviation of 0.8%, that of
the second shape. In three reports, 20 processes of a million tokens reached the GPU's power limit,
and their times ranged over 6 to 10%."""
