"""Which runs count, and how far they spread."""

from __future__ import annotations

from typing import Any

import pytest

from harness.report import Measurement
from harness.stats import accepted, rejection, spread
from tests.harness.samples import gate_result, measurement, telemetry


def test_spread_is_relative_to_the_slowest() -> None:
    assert spread([100.0, 125.0, 110.0]) == pytest.approx(0.25)
    assert spread([42.0]) == 0


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [1.0, float("nan")], [-1.0]])
def test_spread_refuses_what_is_no_speed(values: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        spread(values)


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
            )
        ),
    ],
)
def test_an_undisturbed_run_counts(run: Measurement) -> None:
    assert rejection(run) is None
