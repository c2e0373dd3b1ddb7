"""The claim: never above the slowest accepted run, never without one."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.claim import NoClaim, derive_claim
from harness.report import Measurement
from tests.harness.samples import gate_result, measurement

speeds = st.floats(min_value=1e-3, max_value=1e9)
runs_of_one = st.lists(speeds, min_size=1, max_size=6)
headrooms = st.floats(min_value=0, max_value=0.5)


def filed(length: int, values: list[float]) -> dict[int, list[Measurement]]:
    return {length: [measurement(length, speed) for speed in values]}


def test_the_claim_is_the_slowest_run_less_the_headroom() -> None:
    runs = {
        **filed(512, [900.0, 1000.0]),
        100_000: [
            measurement(100_000, 5000.0, vram_mb=300.0),
            measurement(100_000, 4000.0, vram_mb=200.0),
        ],
    }
    claim = derive_claim(runs, 100_000, headroom=0.1)
    assert claim.tokens_per_sec == pytest.approx(3600)
    assert claim.vram_mb == 300
    assert claim.benchmarks == {
        "512": {"tokens_per_sec": pytest.approx(810), "vram_mb": 10},
        "100000": {"tokens_per_sec": pytest.approx(3600), "vram_mb": 300},
    }


@given(values=runs_of_one, headroom=headrooms)
def test_row_25_no_claim_exceeds_any_run(values: list[float], headroom: float) -> None:
    claim = derive_claim(filed(512, values), 512, headroom)
    assert all(claim.tokens_per_sec <= value for value in values)


@given(values=runs_of_one, more=speeds, headroom=headrooms)
def test_one_more_run_can_only_lower_the_claim(
    values: list[float], more: float, headroom: float
) -> None:
    before = derive_claim(filed(512, values), 512, headroom)
    after = derive_claim(filed(512, [*values, more]), 512, headroom)
    assert after.tokens_per_sec <= before.tokens_per_sec


@given(values=runs_of_one, index=st.integers(min_value=0), factor=st.floats(0.01, 1))
def test_row_25_a_slower_run_in_place_of_another_never_raises_the_claim(
    values: list[float], index: int, factor: float
) -> None:
    worse = list(values)
    worse[index % len(worse)] *= factor
    before = derive_claim(filed(512, values), 512)
    assert derive_claim(filed(512, worse), 512).tokens_per_sec <= before.tokens_per_sec


@given(values=runs_of_one, extra=st.lists(speeds, max_size=3))
def test_a_run_that_does_not_count_changes_nothing(values: list[float], extra: list[float]) -> None:
    runs = filed(512, values)
    runs[512] += [measurement(512, speed, gate=None) for speed in extra]
    assert derive_claim(runs, 512) == derive_claim(filed(512, values), 512)


@given(values=runs_of_one, order=st.randoms())
def test_the_order_of_the_runs_does_not_matter(values: list[float], order: object) -> None:
    shuffled = list(values)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert derive_claim(filed(512, shuffled), 512) == derive_claim(filed(512, values), 512)


def test_a_length_without_an_accepted_run_is_never_claimed() -> None:
    red = measurement(1024, gate=gate_result(passed=False))
    claim = derive_claim({512: [measurement()], 1024: [red], 2048: []}, 512)
    assert set(claim.benchmarks) == {"512"}
    for target, why in ((1024, "red"), (2048, "not measured"), (4096, "not measured")):
        with pytest.raises(NoClaim, match=f"{target} tokens: .*{why}"):
            derive_claim({512: [measurement()], 1024: [red], 2048: []}, target)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *product(["tokens_per_sec", "elapsed_seconds"], [float("nan"), float("inf"), 0.0, -3.0]),
        *product(["vram_mb"], [float("nan"), -1.0]),
    ],
)
def test_row_25_impossible_figures_are_named(name: str, value: float) -> None:
    with pytest.raises(NoClaim, match=f"{name} at 512 tokens is {value}"):
        derive_claim({512: [measurement(), measurement(512, **{name: value})]}, 512)


def test_a_run_of_another_length_is_refused() -> None:
    with pytest.raises(NoClaim, match="1024 tokens was filed under 512"):
        derive_claim({512: [measurement(1024)]}, 512)


def test_runs_of_two_versions_of_the_code_are_refused() -> None:
    other = measurement(source_digest="e" * 64)
    with pytest.raises(NoClaim, match="different versions"):
        derive_claim({512: [measurement(), other]}, 512)


@pytest.mark.parametrize("headroom", [-0.01, 1.0, float("nan")])
def test_an_impossible_headroom_is_refused(headroom: float) -> None:
    with pytest.raises(ValueError, match="headroom"):
        derive_claim({512: [measurement()]}, 512, headroom)
