"""The claim: never above the slowest accepted run, lower for fewer runs, never without one."""

from __future__ import annotations

import math
import random
from statistics import fmean, stdev
from typing import Any

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.claim import (
    MAX_RUNS,
    NOISE_FLOOR,
    NoClaim,
    derive_claim,
    is_settled,
    lower_bound,
    student_quantile,
)
from harness.sample import Sample
from tests.harness.hardware.test_roofline import H200
from tests.harness.samples import make_correctness, make_sample

speeds = st.floats(min_value=500, max_value=2000)
speed_lists = st.lists(speeds, min_size=3, max_size=8)
headrooms = st.floats(min_value=0, max_value=0.5)
STEADY = [1000.0, 1001.0, 1002.0, 1003.0, 1004.0]


def by_length(length: int, values: list[float], **changes: Any) -> dict[int, list[Sample]]:
    return {length: [make_sample(length, speed, **changes) for speed in values]}


def claimed(values: list[float], headroom: float = 0.0, **changes: Any) -> float:
    return derive_claim(by_length(512, values, **changes), 512, headroom).tokens_per_sec


def test_steady_speeds_are_claimed_at_the_expected_slowest_of_ten() -> None:
    # mean of the logarithms, less Student's 10/11 quantile for 4 degrees of freedom, by the floor
    mean = math.exp(fmean(map(math.log, STEADY)))
    assert claimed(STEADY) == pytest.approx(
        mean * math.exp(-1.61404 * math.sqrt(1.2) * NOISE_FLOOR)
    )
    claim = derive_claim(by_length(512, STEADY), 512)
    assert claim.limited_by == "expected"
    assert claim.tokens_per_sec > 0.97 * claim.median
    assert claim.slack == pytest.approx(1 - 0.9 * claim.tokens_per_sec / 1002)
    assert "0.989 of the median of 5 runs, limited by expected" in str(claim)
    assert "a validator may be 1" in str(claim)


def test_noise_lowers_the_claim() -> None:
    noisy = [920.0, 960.0, 1000.0, 1040.0, 1080.0]
    logs = [math.log(value) for value in noisy]
    # Student's quantile of 1 - 4e-5 for 4 degrees of freedom is 16.4478
    bound = math.exp(fmean(logs) - 16.4478 * math.sqrt(1.2) * stdev(logs))
    claim = derive_claim(by_length(512, noisy), 512, 0.0)
    assert claim.limited_by == "noise"
    assert claim.tokens_per_sec == pytest.approx(bound / 0.9, rel=1e-4)
    wild = [300.0, 700.0, 1500.0, 400.0, 1100.0]
    assert claimed(wild) == pytest.approx(0.3 * 300)


def test_other_lengths_are_reported_with_their_slowest_run() -> None:
    runs = {**by_length(512, [900.0, 1000.0]), **by_length(100_000, STEADY, vram_mb=300.0)}
    claim = derive_claim(runs, 100_000, headroom=0.1)
    assert claim.benchmarks["512"] == {"tokens_per_sec": pytest.approx(810), "vram_mb": 10}
    assert claim.benchmarks["100000"] == {"tokens_per_sec": claim.tokens_per_sec, "vram_mb": 300}


@given(values=speed_lists, headroom=headrooms)
def test_row_25_no_claim_exceeds_any_run(values: list[float], headroom: float) -> None:
    assert all(claimed(values, headroom) <= value for value in values)


@given(values=speed_lists, times=st.integers(2, 3))
def test_fewer_runs_with_the_same_speeds_give_a_lower_claim(values, times):
    assert claimed(values) <= claimed(values * times) * (1 + 1e-12)


@given(values=speed_lists, slower=st.floats(0.001, 1))
def test_row_25_a_run_slower_than_all_others_never_raises_the_claim(values, slower):
    more = [*values, min(values) * slower]
    assert claimed(more) <= min(values) * slower


@given(values=speed_lists, extra=st.lists(speeds, max_size=3))
def test_a_rejected_run_changes_no_figure(values, extra):
    runs = by_length(512, values)
    runs[512] += [make_sample(512, speed, correctness=None) for speed in extra]
    claim = derive_claim(runs, 512)
    assert claim.tokens_per_sec == derive_claim(by_length(512, values), 512).tokens_per_sec
    assert [reason.rpartition(": ")[2] for reason in claim.rejected] == [
        "its correctness was not checked" for _ in extra
    ]


def test_a_claim_limited_by_the_host_allows_for_a_busy_host() -> None:
    # 10 calls of 512 tokens at 1024 tokens/s take 5 s; the host is done after 4.5
    calm = derive_claim(by_length(512, [1024.0] * 5, host_seconds=0.5), 512, 0.0)
    assert calm.limits["host"] > min(calm.limits.values())
    claim = derive_claim(by_length(512, [1024.0] * 5, host_seconds=4.5), 512, 0.0)
    assert claim.limited_by == "host"
    # exactly what a validator measures whose host needs 1.6 times as long
    assert 0.9 * claim.tokens_per_sec == pytest.approx(5120 / (4.5 * 1.6))
    # if no call waits for the host, the GPU's time counts
    idle = derive_claim(by_length(512, [1000.0] * 5, host_seconds=0.1), 512, 0.0)
    assert idle.limits["host"] == pytest.approx(1000 / 0.9)


def test_a_speed_above_the_hardware_bound_is_not_claimed() -> None:
    fast = by_length(1_000_000, [9e8] * 5, environment=H200)
    with pytest.raises(NoClaim, match="the hardware bound of this GPU, 441,"):
        derive_claim(fast, 1_000_000)
    claim = derive_claim(by_length(1_000_000, [1.8e8] * 5, environment=H200), 1_000_000)
    assert 4e8 < claim.limits["hardware"] < 5e8


def test_there_is_no_claim_if_a_process_takes_most_of_a_validators_time() -> None:
    derive_claim(by_length(512, STEADY, process_seconds=150.0), 512)
    with pytest.raises(NoClaim, match="took 151 s; a validator gives 300 s"):
        derive_claim(by_length(512, STEADY, process_seconds=151.0), 512)


def test_a_length_without_an_accepted_run_is_never_claimed() -> None:
    red = make_sample(1024, correctness=make_correctness(passed=False))
    runs = {**by_length(512, STEADY), 1024: [red], 2048: []}
    claim = derive_claim(runs, 512)
    assert set(claim.benchmarks) == {"512"}
    assert claim.rejected == (
        "run 1 at 1024 tokens (1,000 tokens/s): its correctness check failed",
    )
    for target, why in ((1024, "check failed"), (2048, "not measured"), (4096, "not measured")):
        with pytest.raises(NoClaim, match=f"{target} tokens: .*{why}"):
            derive_claim(runs, target)


def runs_of_two(**changes: Any) -> dict[int, list[Sample]]:
    """Return runs of which the last one has other code or another machine."""
    runs = by_length(512, STEADY, environment=H200)
    runs[512].append(make_sample(512, **{"environment": H200, **changes}))
    return runs


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        (by_length(512, [1000.0]), "1, too few to know the noise"),
        (runs_of_two(source_digest="e" * 64), "different versions"),
        (runs_of_two(environment=H200.model_copy(update={"ecc": True})), "different machines"),
    ],
)
def test_one_run_and_runs_of_different_origin_allow_no_claim(runs, reason):
    with pytest.raises(NoClaim, match=reason):
        derive_claim(runs, 512)


def test_sampling_ends_when_the_noise_is_known_or_at_the_cap() -> None:
    def settled(values: list[float]) -> bool:
        return is_settled(by_length(512, values)[512])

    assert [settled(STEADY[:n]) for n in range(6)] == [False] * 5 + [True]
    wide = [1000.0, 1100.0] * MAX_RUNS
    assert [settled(wide[:n]) for n in (5, 15, 16, 17)] == [False, False, True, True]
    assert not is_settled([make_sample(correctness=None)] * 20)


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
