"""The claim of a submission: a pure function of accepted measurements.

A validator confirms a claim if its one run reaches ACCEPTED_SHARE of it. The claim is the lowest of
these speeds, from the accepted runs of fresh processes at the target, less the headroom:

- `slowest`: the slowest run;
- `expected`: the expected slowest of EXPECTED_OF runs (one run in EXPECTED_OF + 1 is slower), so
  that a claim from few runs is not higher than one from many;
- `noise`: the speed below which a further run lies with probability REFUTED, divided by
  ACCEPTED_SHARE, but at least WORST_SHARE of the slowest run;
- `host`: the speed if the host needs HOST_SLOWDOWN times as long, divided by ACCEPTED_SHARE: the
  host may be busier than during all of these runs;
- `hardware`: the bound of this GPU's memory and arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median, stdev

from harness.hardware.roofline import hardware_bound
from harness.sample import Sample, accepted, rejection
from harness.workload import WORKLOAD

ACCEPTED_SHARE = 0.9
"""Share of a claim that a validator must measure; otherwise the score is 0."""

MAX_RUNS = 16
"""Most runs of one length: further ones would hardly change the claim."""

EXPECTED_OF = 10
"""`expected` is the expected speed of the slowest of this many samples."""

REFUTED = 4e-5
"""Chance, under normal noise, that a further run refutes a claim limited by `noise`. The documents
promise 1e-4; less than half of it leaves room for sampling that stops early and other noise."""

WORST_SHARE = 0.3
"""Least value of `noise` as a share of the slowest run. With normal noise of a deviation of up to
30%, more than on any measured machine, fewer than 1 in 10,000 further runs refute this claim."""

HOST_SLOWDOWN = 1.6
"""Slowdown of the host that a claim allows for. Of two processes at 65,536 tokens, the one on a
busy host took 1.52 times as long."""

VALIDATOR_SHARE = 0.5
"""Share of a validator's time limit that a process on this machine may use."""

NOISE_FLOOR = 0.006
"""Least relative standard deviation: few samples may agree by chance. Pairs of samples of a million
tokens on an undisturbed H200 had 0.2 to 1.1%."""


class NoClaim(Exception):
    """These measurements allow no claim; the message gives the reason."""


@dataclass(frozen=True)
class Claim:
    """The claimed speed of a submission, and its basis."""

    target_sequence_length: int
    tokens_per_sec: float  # at the target
    vram_mb: float  # MiB: the largest peak at the target
    # `tokens_per_sec` and `vram_mb` by measured length: the claim at the target, at other lengths
    # the slowest accepted run less `headroom`
    benchmarks: dict[str, dict[str, float]]
    headroom: float
    runs: int  # number of accepted runs at the target; `median` is their speed in tokens/s
    median: float
    limits: dict[str, float]  # the limits by name, before the headroom; the claim is the lowest
    rejected: tuple[str, ...] = ()  # a sentence for each rejected run of any length

    @property
    def limited_by(self) -> str:
        return min(self.limits, key=lambda name: self.limits[name])

    @property
    def slack(self) -> float:
        """Share by which a validator's run may be slower than the miner's median."""
        return 1 - ACCEPTED_SHARE * self.tokens_per_sec / self.median

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_sec:,.0f} tokens/s at {self.target_sequence_length:,} tokens, "
            f"{self.tokens_per_sec / self.median:.3f} of the median of {self.runs} runs, limited "
            f"by {self.limited_by}; a validator may be {self.slack:.1%} slower"
        )


def limits_of(runs: Sequence[Sample]) -> dict[str, float]:
    """Return the speeds, by name, that a claim from accepted runs of one length must not exceed."""
    speeds = [run.tokens_per_sec for run in runs]
    limits = {
        "slowest": min(speeds),
        "expected": lower_bound(speeds, 1 / (EXPECTED_OF + 1)),
        "noise": max(lower_bound(speeds, REFUTED) / ACCEPTED_SHARE, WORST_SHARE * min(speeds)),
    }
    hosts = [run.host_seconds for run in runs if run.host_seconds is not None]
    if hosts:
        tokens = WORKLOAD.batch_size * WORKLOAD.timed_calls * runs[0].length
        seconds = max(tokens / min(speeds), HOST_SLOWDOWN * max(hosts))
        limits["host"] = tokens / seconds / ACCEPTED_SHARE
    bound = hardware_bound(runs[0].environment)
    if bound is not None:
        limits["hardware"] = bound
    return limits


def is_settled(runs: Sequence[Sample]) -> bool:
    """Return whether a length has enough accepted runs for its claim.

    MAX_RUNS are enough, and so are two or more if `noise` is not their lowest limit.
    """
    counted = accepted(runs)
    if not 1 < len(counted) < MAX_RUNS:  # one run shows no noise at all
        return len(counted) >= MAX_RUNS
    limits = limits_of(counted)
    return limits.pop("noise") >= min(limits.values())


def derive_claim(runs: Mapping[int, Sequence[Sample]], target: int, headroom: float = 0.0) -> Claim:
    """Return the claim for `target` tokens from samples by length.

    With the same slowest run, mean and deviation, fewer runs give a lower claim. A length without
    an accepted run (see `rejection`) is not claimed. `headroom` is in [0, 1).

    Raises:
        NoClaim: the target has no accepted run, one of the target's accepted runs took more than
            half of a validator's time limit, there are too few runs to know the noise, or the runs
            are of different code or machines.
    """
    _require_one_origin(runs)
    counted = {length: samples for length in sorted(runs) if (samples := accepted(runs[length]))}
    if target not in counted:
        reasons = sorted({reason for m in runs.get(target, ()) if (reason := rejection(m))})
        why = "; ".join(reasons) or "it was not measured"
        raise NoClaim(f"no accepted run at the target of {target} tokens: {why}")
    _refuse_slow_starts(counted[target])
    limits = limits_of(counted[target])
    if min(limits.values()) <= 0:
        many = len(counted[target])
        few = f"accepted runs at {target} tokens: {many}, too few to know the noise"
        raise NoClaim(f"{few}; take more")
    benchmarks = {
        str(length): {
            "tokens_per_sec": min(m.tokens_per_sec for m in samples) * (1 - headroom),
            "vram_mb": max(m.vram_mb for m in samples),
        }
        for length, samples in counted.items()
    }
    benchmarks[str(target)]["tokens_per_sec"] = min(limits.values()) * (1 - headroom)
    return Claim(
        target_sequence_length=target,
        **benchmarks[str(target)],
        benchmarks=benchmarks,
        headroom=headroom,
        runs=len(counted[target]),
        median=median(m.tokens_per_sec for m in counted[target]),
        limits=limits,
        rejected=tuple(
            f"run {number} at {length} tokens ({run.tokens_per_sec:,.0f} tokens/s): {reason}"
            for length in sorted(runs)
            for number, run in enumerate(runs[length], 1)
            if (reason := rejection(run))
        ),
    )


def _refuse_slow_starts(runs: Sequence[Sample]) -> None:
    most = VALIDATOR_SHARE * WORKLOAD.timeout_seconds
    slowest = max(run.process_seconds or 0.0 for run in runs)
    if slowest > most:
        raise NoClaim(
            f"import, compilation and calls at {runs[0].length} tokens took {slowest:.0f} s; a "
            f"validator gives {WORKLOAD.timeout_seconds:.0f} s, of which {most:.0f} may be used"
        )


def _require_one_origin(runs: Mapping[int, Sequence[Sample]]) -> None:
    samples = [sample for same_length in runs.values() for sample in same_length]
    if len({sample.source_digest for sample in samples}) > 1:
        raise NoClaim("the runs measured different versions of the code")
    machines = [sample.environment for sample in samples if sample.environment is not None]
    if any(machine != machines[0] for machine in machines):
        raise NoClaim("the runs come from different machines or software")


def lower_bound(speeds: Sequence[float], share: float) -> float:
    """Return the speed below which a further sample lies with probability `share`.

    The logarithms of the speeds are assumed to be normally distributed. A further sample is above
    exp(m - t * sqrt(1 + 1/n) * s) with probability 1 - share. Here m and s are the mean and the
    standard deviation of the n logarithms, and t is Student's quantile of 1 - share with n - 1
    degrees of freedom. This is the one-sided tolerance bound of expected content 1 - share
    (I. Guttman, Statistical Tolerance Regions, 1970).

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
