"""The GPU's state, from a fake NVML."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness.hardware.machine import Snapshot
from harness.worker.machine.telemetry import WATCHED, Watch, facts, quiet_snapshot, snapshot
from tests.processes import HANG, wait_for


class NVMLError(Exception):
    pass


FIGURES: dict[str, Callable[[int], object]] = {
    "DeviceGetPowerUsage": lambda gpu: 400_000 + gpu,
    "DeviceGetTemperature": lambda gpu: 50 + gpu,
    "DeviceGetViolationStatus": lambda _: SimpleNamespace(violationTime=5),
    "DeviceGetCurrentClocksThrottleReasons": lambda _: 0x44,
    "DeviceGetUUID": lambda gpu: f"GPU-{gpu}".encode(),
    "DeviceGetVbiosVersion": lambda _: "96.00",
    "DeviceGetPowerManagementLimit": lambda _: 700_000,
    "DeviceGetEccMode": lambda _: [1, 1],
}
"""Functions of NVML by name; some figures contain the GPU's number."""


class Driver:
    """A fake NVML with two GPUs."""

    NVMLError, nvmlMemory_v2 = NVMLError, "v2"
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_PERF_POLICY_THERMAL, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 1, 0
    nvmlClocksThrottleReasonSwPowerCap = 0x4
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    pids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.open = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.removeprefix("nvml") not in FIGURES:
            raise AttributeError(name)
        return lambda gpu, *_: FIGURES[name.removeprefix("nvml")](gpu)

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

    def nvmlDeviceGetMemoryInfo(self, gpu: int, version: str | None = None) -> Any:
        reserved = 0 if version == "v2" else 600  # version 1 includes the driver's memory
        return SimpleNamespace(used=(gpu + 1 + reserved) * 2**20)

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.1"

    def nvmlDeviceGetClockInfo(self, gpu: int, kind: int) -> int:
        return {1: 1980, 2: 3201}[kind]

    nvmlDeviceGetMaxClockInfo = nvmlDeviceGetClockInfo

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> Any:
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetTotalEccErrors(self, gpu: int, kind: int, counter: int) -> int:
        raise NVMLError("not supported")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    return driver


@pytest.mark.parametrize(("visible", "gpu"), [(None, 0), ("1,0", 1), ("GPU-b", 1)])
def test_the_first_visible_gpu_is_read(visible: str | None, gpu: int, driver: Driver) -> None:
    state = snapshot({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert state is not None
    assert state.temperature_c == 50 + gpu
    assert state.memory_used_mb == gpu + 1
    assert state.power_w == pytest.approx(400, abs=0.01)
    assert (state.sm_clock_mhz, state.memory_clock_mhz) == (1980, 3201)
    assert state.slowdowns == ("power cap", "hardware thermal slowdown")
    assert (state.thermal_throttle_ns, state.driver) == (5, "580.1")
    assert state.ecc_uncorrected is None  # this GPU does not report it
    assert driver.open == 0


@pytest.mark.parametrize("visible", ["7", "", "none"])
def test_an_absent_gpu_has_no_state_and_no_facts(visible: str, driver: Driver) -> None:
    assert snapshot({"CUDA_VISIBLE_DEVICES": visible}) is None
    assert facts({"CUDA_VISIBLE_DEVICES": visible}) == {}
    assert driver.open == 0


def test_row_23_no_driver_is_no_error(driver: Driver) -> None:
    def absent() -> None:
        raise NVMLError("driver not loaded")

    driver.nvmlInit = absent  # type: ignore[method-assign]
    assert snapshot({}) is None


@pytest.mark.parametrize(("pids", "others"), [((), 0), ((os.getpid(),), 0), ((1, os.getpid()), 1)])
def test_other_processes_on_the_gpu_are_counted(pids, others, driver):
    driver.pids = pids
    assert (state := snapshot({})) is not None
    assert state.processes == others


@pytest.mark.parametrize("use", [{"memory_used_mb": 9e4}, {"processes": 1}])
def test_a_quiet_snapshot_waits_for_other_processes(use: Any) -> None:
    busy, quiet = Snapshot(**use), Snapshot(memory_used_mb=4.0, processes=0)
    states = iter([busy, busy, quiet])
    assert quiet_snapshot(HANG, lambda: next(states)) == quiet
    assert quiet_snapshot(0.2, lambda: busy) == busy  # after the longest wait
    assert quiet_snapshot(HANG, lambda: None) is None  # without a GPU


def test_the_constant_facts_of_a_gpu_are_read(driver: Driver) -> None:
    assert facts({"CUDA_VISIBLE_DEVICES": "1"}) == {
        "gpu_uuid": "GPU-1",
        "vbios": "96.00",
        "power_limit_w": 700.0,
        "ecc": True,
        "sm_clock_max_mhz": 1980,
        "memory_clock_max_mhz": 3201,
        "memory_bus_bits": None,
    }
    assert driver.open == 0


def test_a_watch_returns_the_states_between_two_times() -> None:
    states: list[Snapshot] = []

    def read() -> Snapshot:
        states.append(Snapshot(temperature_c=len(states)))
        return states[-1]

    def after(count: int) -> float:
        """Return the time after `count` further reads."""
        before = len(states)
        wait_for(lambda: len(states) >= before + count)
        return time.monotonic()

    with Watch(read, every=0.001) as watch:
        start = after(5)
        stop = after(2 * WATCHED)
        after(5)
    temperatures = [state.temperature_c or 0 for state in watch.between(start, stop)]
    assert 0 < len(temperatures) <= WATCHED
    assert temperatures == sorted(temperatures)
    assert temperatures[0] > 0  # none from before `start`
    with Watch(None) as nothing:
        pass
    assert nothing.between(0, time.monotonic()) == ()
