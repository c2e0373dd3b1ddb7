"""The state of a GPU, read from NVML if the driver and nvidia-ml-py are installed."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from harness.hardware.machine import Snapshot
from harness.hardware.nvml import opened
from harness.sample import OTHER_MEMORY_MB

QUIET_SECONDS = 3.0
"""Longest wait for other processes to leave the GPU."""

WATCHED = 20
"""Number of states of a GPU that are kept for one run, evenly spread over it."""

_SLOWDOWNS = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "thermal slowdown",
    "HwThermalSlowdown": "hardware thermal slowdown",
    "HwPowerBrakeSlowdown": "power brake",
}


def _handle(nvml: Any, environ: Mapping[str, str]) -> Any:
    """Return the first GPU that CUDA shows to this process."""
    first = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first))


class Watch:
    """Reads the GPU's state periodically, from another process than the timed one.

    Args:
        read: reads the GPU's state; None for a machine without a GPU.
        every: seconds between two reads.
    """

    def __init__(self, read: Callable[[], Snapshot | None] | None, every: float = 0.05) -> None:
        self._read, self._every = read, every
        self._seen: list[tuple[float, Snapshot]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def between(self, start: float, stop: float) -> tuple[Snapshot, ...]:
        """Return the states between two times of the monotonic clock, at most WATCHED."""
        states = [state for at, state in self._seen if start <= at <= stop]
        return tuple(states[:: max(1, -(-len(states) // WATCHED))])

    def _watch(self) -> None:
        while self._read is not None and not self._done.wait(self._every):
            at, state = time.monotonic(), self._read()
            if state is not None:
                self._seen.append((at, state))


def _others(nvml: Any, gpu: Any) -> int:
    """Return how many processes but this one compute on a GPU.

    In a container NVML may list this process under another pid. If this process uses CUDA, one pid
    of the list is therefore not counted.
    """
    pids = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    torch = sys.modules.get("torch")
    mine = os.getpid() in pids or (torch is not None and torch.cuda.is_initialized())
    return max(len(pids) - int(mine), 0)


def snapshot(environ: Mapping[str, str] = os.environ) -> Snapshot | None:
    """Read the GPU's clocks, heat, power, memory, errors and processes now.

    Returns None without a GPU, driver or nvidia-ml-py; single figures that this GPU does not
    report are None.
    """
    with suppress(ValueError), opened() as nvml:
        return None if nvml is None else _state(nvml, _handle(nvml, environ))
    return None


def quiet_snapshot(
    seconds: float = QUIET_SECONDS, read: Callable[[], Snapshot | None] = snapshot
) -> Snapshot | None:
    """Read the GPU's state once no other process uses it, or at the latest after `seconds`.

    A process that was timed just before may still be freeing its memory.
    """
    until = time.monotonic() + seconds
    while state := read():
        used = state.processes or (state.memory_used_mb or 0.0) > OTHER_MEMORY_MB
        if not used or time.monotonic() >= until:
            break
        time.sleep(0.1)
    return state


def facts(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the fields of an `Environment` that NVML reports; they do not depend on the load."""
    with suppress(ValueError), opened() as nvml:
        return {} if nvml is None else _constants(nvml, _handle(nvml, environ))
    return {}


def _read(nvml: Any, function: Callable[[], Any]) -> Any:
    """Return a figure, or None if this GPU does not report it."""
    try:
        return function()
    except (nvml.NVMLError, AttributeError):
        return None


def _constants(nvml: Any, gpu: Any) -> dict[str, Any]:
    read = partial(_read, nvml)
    limit = read(lambda: nvml.nvmlDeviceGetPowerManagementLimit(gpu))
    ecc = read(lambda: nvml.nvmlDeviceGetEccMode(gpu)[0])
    return {
        "gpu_uuid": _text(read(lambda: nvml.nvmlDeviceGetUUID(gpu))),
        "vbios": _text(read(lambda: nvml.nvmlDeviceGetVbiosVersion(gpu))),
        "power_limit_w": None if limit is None else limit / 1000,
        "ecc": None if ecc is None else bool(ecc),
        "sm_clock_max_mhz": read(lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)),
        "memory_clock_max_mhz": read(
            lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM)
        ),
        "memory_bus_bits": read(lambda: nvml.nvmlDeviceGetMemoryBusWidth(gpu)),
    }


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _state(nvml: Any, gpu: Any) -> Snapshot:
    read = partial(_read, nvml)
    power = read(lambda: nvml.nvmlDeviceGetPowerUsage(gpu))
    # The second version leaves out the memory that the driver reserves.
    memory = read(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2))
    violation = read(lambda: nvml.nvmlDeviceGetViolationStatus(gpu, nvml.NVML_PERF_POLICY_THERMAL))
    mask = read(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)) or 0
    bits = {label: f"nvmlClocksThrottleReason{name}" for name, label in _SLOWDOWNS.items()}
    driver = read(nvml.nvmlSystemGetDriverVersion)
    return Snapshot(
        sm_clock_mhz=read(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
        memory_clock_mhz=read(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
        temperature_c=read(lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
        power_w=None if power is None else power / 1000,
        slowdowns=tuple(label for label, bit in bits.items() if mask & getattr(nvml, bit, 0)),
        thermal_throttle_ns=None if violation is None else violation.violationTime,
        ecc_uncorrected=read(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        ),
        memory_used_mb=None if memory is None else memory.used / 2**20,
        processes=read(lambda: _others(nvml, gpu)),
        driver=_text(driver),
    )
