"""The hardware bound against published figures of GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from harness.hardware.roofline import (
    bytes_per_token,
    hardware_bound,
    operations_per_token,
    speed_of_light,
)
from tests.harness.samples import environment

H200 = environment(
    device="cuda",
    compute_capability="9.0",
    multiprocessors=132,
    sm_clock_max_mhz=1980,
    memory_clock_max_mhz=3201,
    memory_bus_bits=6144,
)


def changed(**changes: Any) -> Any:
    return H200.model_copy(update=changes)


def test_the_bytes_and_operations_of_a_token() -> None:
    # x of 512 fp32 values in, y of 512 bf16 values out
    assert bytes_per_token() == 512 * 4 + 512 * 2
    # q, k, v, o: 512 x 512; the gate: 512 x 64 and 64 x 512; a state of 64 x 64 for each of 8 heads
    assert operations_per_token() == 2 * (4 * 512**2 + 2 * 512 * 64 + 3 * 8 * 64**2)


def test_the_bound_of_an_h200_follows_from_its_published_rates() -> None:
    # 989 TFLOP/s dense bf16 at the 1830 MHz of the data sheet
    arithmetic = 989.4e12 * 1980 / 1830 / operations_per_token()
    assert hardware_bound(H200) == pytest.approx(arithmetic, rel=2e-3)
    # 4.8 TB/s by the data sheet, 4.9 by its clocks
    memory = hardware_bound(changed(multiprocessors=None))
    assert memory == pytest.approx(4.8e12 / bytes_per_token(), rel=0.03)


@pytest.mark.parametrize(
    "machine", [None, environment(), environment(device="cuda"), changed(device="cpu")]
)
def test_an_unknown_machine_has_no_bound(machine: Any) -> None:
    assert hardware_bound(machine) is None


def test_the_speed_of_light_is_a_share_of_time() -> None:
    # 10 s at the baseline and 2 s at the bound: 4 s save 6 of 8
    assert speed_of_light(1 / 4, bound=1 / 2, baseline=1 / 10) == pytest.approx(6 / 8)
    assert speed_of_light(1 / 2, 1 / 2, 1 / 10) == 1
    assert speed_of_light(1 / 10, 1 / 2, 1 / 10) == 0
