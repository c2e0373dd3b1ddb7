"""This machine's GPUs, found without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.hardware.nvml import opened


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU; memory in MiB, None for a GPU that shares the host's memory."""

    name: str
    memory_mb: float | None
    driver: str


def gpus() -> list[Gpu]:
    """Return the GPUs that NVML reports, without those that failed; empty without a driver."""
    found: list[Gpu] = []
    with opened() as nvml:
        if nvml is None:
            return []
        driver = str(nvml.nvmlSystemGetDriverVersion())
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                name, memory_mb = str(nvml.nvmlDeviceGetName(handle)), None
                with suppress(nvml.NVMLError):
                    memory_mb = nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**20
                found.append(Gpu(name, memory_mb, driver))
    return found


def gpu_states() -> list[dict[str, float]]:
    """Return each GPU's memory in MiB, degrees Celsius, watts and busy percent, if reported."""
    states: list[dict[str, float]] = []
    with opened() as nvml:
        if nvml is None:
            return []
        readings: dict[str, Callable[[Any], float]] = {
            "memory_used_mib": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**20,
            "temperature_celsius": lambda gpu: nvml.nvmlDeviceGetTemperature(
                gpu, nvml.NVML_TEMPERATURE_GPU
            ),
            "power_watts": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "busy_percent": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        }
        for index in range(nvml.nvmlDeviceGetCount()):
            states.append({})
            for name, read in readings.items():
                with suppress(nvml.NVMLError):
                    states[-1][name] = float(read(nvml.nvmlDeviceGetHandleByIndex(index)))
    return states


def resolve_device(device: str) -> Literal["cuda", "cpu"]:
    """Return `device`; `auto` becomes `cuda` if the machine has a GPU, else `cpu`."""
    if device == "auto":
        # A GPU that NVML cannot reach must be reported as faulty, not as absent.
        return "cuda" if gpus() or any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"
    return "cuda" if device == "cuda" else "cpu"
