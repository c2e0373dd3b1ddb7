"""What is read from NVML, with a stand-in for the driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.worker.telemetry import snapshot


class NVMLError(Exception):
    pass


class Driver:
    """An NVML with two GPUs, whose answers carry the number of the GPU asked."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_PERF_POLICY_THERMAL, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 1, 0
    nvmlClocksThrottleReasonSwPowerCap = 0x4
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise NVMLError("not found")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return {"GPU-b": 1}[uuid]

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return 400_000 + gpu

    nvmlMemory_v2 = "v2"

    def nvmlDeviceGetMemoryInfo(self, gpu: int, version: str | None = None) -> Any:
        reserved = 0 if version == "v2" else 600  # the first version counts the driver's own
        return SimpleNamespace(used=(gpu + 1 + reserved) * 2**20)

    def nvmlDeviceGetViolationStatus(self, gpu: int, policy: int) -> Any:
        return SimpleNamespace(violationTime=5)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:
        return 0x44

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.1"

    def nvmlDeviceGetClockInfo(self, gpu: int, kind: int) -> int:
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:
        return 50 + gpu

    def nvmlDeviceGetTotalEccErrors(self, gpu: int, kind: int, counter: int) -> int:
        raise NVMLError("not supported")


@pytest.mark.parametrize(("visible", "gpu"), [(None, 0), ("1,0", 1), ("GPU-b", 1)])
def test_the_gpu_that_cuda_sees_is_read(visible: str | None, gpu: int) -> None:
    driver = Driver()
    state = snapshot(driver, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert state is not None
    assert state.temperature_c == 50 + gpu
    assert state.memory_used_mb == gpu + 1
    assert state.power_w == pytest.approx(400, abs=0.01)
    assert (state.sm_clock_mhz, state.memory_clock_mhz) == (1980, 3201)
    assert state.slowdowns == ("power cap", "hardware thermal slowdown")
    assert (state.thermal_throttle_ns, state.driver) == (5, "580.1")
    assert state.ecc_uncorrected is None, "this GPU does not report it"
    assert driver.open == 0


@pytest.mark.parametrize("visible", ["7", "", "none"])
def test_no_such_gpu_is_no_error(visible: str) -> None:
    driver = Driver()
    assert snapshot(driver, {"CUDA_VISIBLE_DEVICES": visible}) is None
    assert driver.open == 0


def test_row_23_no_driver_is_no_error() -> None:
    driver = Driver()

    def absent() -> None:
        raise NVMLError("driver not loaded")

    driver.nvmlInit = absent  # type: ignore[method-assign]
    assert snapshot(driver, {}) is None
