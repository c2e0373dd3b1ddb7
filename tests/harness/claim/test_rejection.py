"""Which runs count."""

from __future__ import annotations

from typing import Any

import pytest

from harness.claim.rejection import accepted, rejection
from harness.report import Measurement
from tests.harness.samples import gate_result, measurement, telemetry


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gate": None}, "not checked"),
        ({"gate": gate_result(passed=False)}, "red"),
        ({"gate": gate_result(digest="e" * 64)}, "other code"),
        ({"telemetry": telemetry({"memory_used_mb": 20_000.0}, {})}, "other processes"),
        (
            {"telemetry": telemetry({"thermal_throttle_ns": 0}, {"thermal_throttle_ns": 10**9})},
            "throttled",
        ),
        (
            {
                "telemetry": telemetry(
                    {"thermal_throttle_ns": 3 * 10**9}, {"thermal_throttle_ns": 4 * 10**9}
                )
            },
            "throttled for heat for 1.000 s",  # of a counter that began before the run
        ),
        ({"telemetry": telemetry({"ecc_uncorrected": 1}, {"ecc_uncorrected": 2})}, "memory errors"),
        ({"telemetry": telemetry({"processes": 1}, {"processes": 2})}, "other processes (1)"),
        ({"telemetry": telemetry({}, {"slowdowns": ("power cap", "power brake")})}, "power brake"),
        ({"telemetry": telemetry({}, {}, {"slowdowns": ("thermal slowdown",)})}, "thermal"),
    ],
)
def test_row_24_a_disturbed_or_unchecked_run_does_not_count(
    changes: dict[str, Any], reason: str
) -> None:
    run = measurement(**changes)
    assert reason in (rejection(run) or "")
    assert accepted([run, measurement()]) == [measurement()]


@pytest.mark.parametrize(
    "run",
    [
        measurement(telemetry=telemetry({}, {})),
        measurement(
            telemetry=telemetry(
                {"memory_used_mb": 4.0, "thermal_throttle_ns": 7, "ecc_uncorrected": 3},
                {"memory_used_mb": 9e4, "thermal_throttle_ns": 7, "ecc_uncorrected": 3},
                {"slowdowns": ("power cap",), "processes": 1},
            )
        ),
    ],
)
def test_an_undisturbed_run_counts(run: Measurement) -> None:
    assert rejection(run) is None
