"""Accepted and rejected samples."""

from __future__ import annotations

import pytest

from harness.hardware.machine import Telemetry
from harness.hardware.roofline import hardware_bound
from harness.sample import Sample, accepted, rejection
from tests.harness.hardware.test_roofline import H200
from tests.harness.samples import make_correctness, make_sample, telemetry


def heated(seconds: float) -> Telemetry:
    """Return the telemetry of a GPU that was throttled for heat for so long."""
    return telemetry({"thermal_throttle_ns": 0}, {"thermal_throttle_ns": round(seconds * 1e9)})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"correctness": None}, "not checked"),
        ({"correctness": make_correctness(passed=False)}, "check failed"),
        ({"correctness": make_correctness(digest="e" * 64)}, "other code"),
        ({"telemetry": telemetry({"memory_used_mb": 1024.5}, {})}, "other processes"),
        (
            {
                "telemetry": telemetry(
                    {"thermal_throttle_ns": 3 * 10**9}, {"thermal_throttle_ns": 4 * 10**9}
                )
            },
            "throttled for heat for 1.000 s",  # the counter was not 0 before the run
        ),
        ({"telemetry": heated(0.05), "elapsed_seconds": 4.0}, "throttled for heat for 0.050 s"),
        ({"telemetry": telemetry({"ecc_uncorrected": 1}, {"ecc_uncorrected": 2})}, "memory errors"),
        ({"telemetry": telemetry({"processes": 1}, {"processes": 2})}, "other processes (1)"),
        ({"telemetry": telemetry({}, {"slowdowns": ("power cap", "power brake")})}, "power brake"),
        ({"telemetry": telemetry({}, {}, {"slowdowns": ("thermal slowdown",)})}, "thermal"),
    ],
)
def test_row_24_a_disturbed_or_unchecked_run_does_not_count(changes, reason):
    run = make_sample(**changes)
    assert reason in (rejection(run) or "")
    assert accepted([run, make_sample()]) == [make_sample()]


@pytest.mark.parametrize(
    "run",
    [
        make_sample(
            telemetry=telemetry(
                {"memory_used_mb": 4.0, "thermal_throttle_ns": 7, "ecc_uncorrected": 3},
                {"memory_used_mb": 9e4, "thermal_throttle_ns": 7, "ecc_uncorrected": 3},
                {"slowdowns": ("power cap",), "processes": 1},
            )
        ),
        # exactly at the limits
        make_sample(telemetry=telemetry({"memory_used_mb": 1024.0}, {})),
        make_sample(telemetry=heated(0.04), elapsed_seconds=4.0),
        # counters that were read only once, or were reset
        make_sample(telemetry=telemetry({"thermal_throttle_ns": 0}, {})),
        make_sample(telemetry=telemetry({}, {"thermal_throttle_ns": 10**9})),
        make_sample(telemetry=telemetry({"ecc_uncorrected": 1}, {})),
        make_sample(telemetry=telemetry({}, {"ecc_uncorrected": 1})),
        make_sample(telemetry=telemetry({"ecc_uncorrected": 900}, {"ecc_uncorrected": 0})),
    ],
)
def test_an_undisturbed_run_counts(run: Sample) -> None:
    assert rejection(run) is None


def test_a_run_above_the_hardware_bound_does_not_count() -> None:
    bound = hardware_bound(H200)
    assert bound is not None
    run = make_sample(1_000_000, bound * 1.01, environment=H200)
    assert "exceed the hardware bound" in (rejection(run) or "")
    assert rejection(run.model_copy(update={"tokens_per_sec": bound})) is None
