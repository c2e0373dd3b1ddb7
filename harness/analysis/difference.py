"""The difference of two speeds that are measured in blocks, with a control.

A block times three fresh processes: A, B, and A a second time as the control, in random order. If A
and B are equally fast, each of the three is therefore equally likely to be the fastest of a block,
even if the machine drifts. The test uses only these ranks and assumes no distribution of the noise
(a randomisation test in complete blocks, R. A. Fisher, The Design of Experiments, 1935).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

ERROR_RATE = 0.01
"""Largest share of comparisons of equally fast trees that report a difference. The control lowers
the actual share further."""

MIN_BLOCKS = 5
"""With fewer blocks no result is significant: B first in all of four has probability 2 / 3**4."""


class Block(NamedTuple):
    """Speeds of three consecutive processes, in tokens/s."""

    a: float
    b: float
    control: float
    """The speed of A's second process."""


def take_block(
    time_a: Callable[[], float], time_b: Callable[[], float], order: random.Random
) -> Block:
    """Time A, B and A again, in an order that `order` draws; the functions return speeds."""
    timers = {"a": time_a, "b": time_b, "control": time_a}
    return Block(**{name: timers[name]() for name in order.sample(sorted(timers), len(timers))})


@dataclass(frozen=True)
class Difference:
    """The speed of B relative to A."""

    ratio: float  # the median of B's speed over A's
    low: float  # begin and end of the ratio's interval of at least 99% confidence
    high: float
    control: float  # the median of A's second speed over its first, the difference of equal code
    a: float  # the medians of the speeds, in the unit of the blocks
    b: float

    @property
    def faster(self) -> bool:
        """Whether B is faster than A: the whole interval is above the control's deviation."""
        return self.low > max(self.control, 1 / self.control)

    @property
    def slower(self) -> bool:
        """Whether B is slower than A, in the same sense."""
        return self.high < min(self.control, 1 / self.control)

    def __str__(self) -> str:
        verdict = "no difference beyond the noise"
        if self.faster or self.slower:
            verdict = f"B is {'faster' if self.faster else 'slower'}"
        return (
            f"{verdict}: {self.ratio - 1:+.2%} (99% interval {self.low - 1:+.2%} to "
            f"{self.high - 1:+.2%}; A against itself {self.control - 1:+.2%})"
        )


def difference(blocks: Sequence[Block]) -> Difference:
    """Return B's speed over A's from at least MIN_BLOCKS blocks of positive speeds.

    Each block gives two ratios, of B to A and of B to the control. If r is the true ratio, 0, 1 or
    2 of them exceed r with equal probability. The interval contains every r for which the sum over
    all blocks is not extreme; the extreme sums together have the probability ERROR_RATE.
    """
    ratios = sorted([x.b / x.a for x in blocks] + [x.b / x.control for x in blocks])
    outside = _ratios_outside(len(blocks))
    return Difference(
        ratio=math.sqrt(ratios[len(blocks) - 1] * ratios[len(blocks)]),
        low=ratios[outside],
        high=ratios[-1 - outside],
        control=math.exp(statistics.median(math.log(x.control / x.a) for x in blocks)),
        a=statistics.median(speed for x in blocks for speed in (x.a, x.control)),
        b=statistics.median(x.b for x in blocks),
    )


def _ratios_outside(blocks: int) -> int:
    """Return how many of the smallest ratios, and of the largest ones, are outside the interval.

    It is the largest k for which at most k ratios lie on one side with probability ERROR_RATE / 2.
    """
    ways = [1]  # number of ways in which the blocks' counts of 0, 1 or 2 give each sum
    for _ in range(blocks):
        ways = [sum(ways[max(0, total - 2) : total + 1]) for total in range(len(ways) + 2)]
    limit = ERROR_RATE / 2 * 3**blocks
    return sum(1 for unlikely in accumulate(ways) if unlikely <= limit) - 1
