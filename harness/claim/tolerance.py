"""Lower bounds on the speed of one more sample, from the samples so far.

The logarithms of the speeds are assumed to be normally distributed. One more sample of the same
distribution stays above exp(m - t * sqrt(1 + 1/n) * s) with probability 1 - share. Here m and s are
the mean and the standard deviation of the n logarithms, and t is Student's quantile of 1 - share
with n - 1 degrees of freedom. This is the one-sided tolerance bound of expected content 1 - share
(I. Guttman, Statistical Tolerance Regions, 1970).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean, stdev

NOISE_FLOOR = 0.006
"""Least relative standard deviation: few samples may agree by chance. Pairs of samples of a million
tokens on an undisturbed H200 had 0.2 to 1.1%."""


def lower_bound(speeds: Sequence[float], share: float) -> float:
    """Return the speed below which a further sample lies with probability `share`.

    With equal mean and deviation, fewer samples give a lower bound; the bound of a single one is 0.
    Speeds are positive, of fresh processes at one length on one machine; `share` is below 0.5.
    """
    runs = len(speeds)
    if runs == 1:
        return 0.0
    logarithms = [math.log(speed) for speed in speeds]
    deviation = max(NOISE_FLOOR, stdev(logarithms))
    quantile = student_quantile(1 - share, runs - 1)
    return math.exp(fmean(logarithms) - quantile * math.sqrt(1 + 1 / runs) * deviation)


@cache
def student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's distribution for a probability above 0.5."""
    low, high = 0.0, 1.0
    while _student_cumulative(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        if _student_cumulative(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return high


def _student_cumulative(t: float, freedom: int) -> float:
    """Return P(T <= t) for t >= 0 (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    even = freedom % 2 == 0
    term = 1.0 if even else math.cos(angle)
    total = 0.0
    for k in range(1 if even else 2, freedom, 2):
        total += term
        term *= square * k / (k + 1)
    if even:
        return 0.5 + 0.5 * sine * total
    return 0.5 + (angle + sine * total) / math.pi
