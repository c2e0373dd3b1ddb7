"""The state of a GPU read from NVML, where the driver and nvidia-ml-py are there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from harness.report import Snapshot

_SLOWDOWNS = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "thermal slowdown",
    "HwThermalSlowdown": "hardware thermal slowdown",
    "HwPowerBrakeSlowdown": "power brake",
}


def _load() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _handle(nvml: Any, environ: Mapping[str, str]) -> Any:
    """Return the first GPU that CUDA shows to this process."""
    first = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first))


def _slowdowns(nvml: Any, mask: int) -> tuple[str, ...]:
    return tuple(
        label
        for name, label in _SLOWDOWNS.items()
        if mask & getattr(nvml, f"nvmlClocksThrottleReason{name}", 0)
    )


def snapshot(nvml: Any = None, environ: Mapping[str, str] = os.environ) -> Snapshot | None:
    """Read the GPU's clocks, heat, power, memory and errors now.

    Returns None without a GPU, driver or nvidia-ml-py; single figures that this GPU does not
    report are None. `nvml` is the pynvml module or a stand-in.
    """
    nvml = nvml or _load()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None

    def read(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except (nvml.NVMLError, AttributeError):
            return None

    try:
        gpu = _handle(nvml, environ)
        power = read(lambda: nvml.nvmlDeviceGetPowerUsage(gpu))
        # The second version leaves out what the driver keeps for itself.
        memory = read(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2))
        violation = read(
            lambda: nvml.nvmlDeviceGetViolationStatus(gpu, nvml.NVML_PERF_POLICY_THERMAL)
        )
        mask = read(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
        driver = read(nvml.nvmlSystemGetDriverVersion)
        return Snapshot(
            sm_clock_mhz=read(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=read(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
            temperature_c=read(
                lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
            ),
            power_w=None if power is None else power / 1000,
            slowdowns=() if mask is None else _slowdowns(nvml, mask),
            thermal_throttle_ns=None if violation is None else violation.violationTime,
            ecc_uncorrected=read(
                lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
            memory_used_mb=None if memory is None else memory.used / 2**20,
            driver=driver.decode() if isinstance(driver, bytes) else driver,
        )
    except (nvml.NVMLError, ValueError):
        return None
    finally:
        read(nvml.nvmlShutdown)
