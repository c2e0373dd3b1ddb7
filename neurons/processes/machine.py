"""What GPUs this machine has, found without importing torch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU; memory in MiB."""

    name: str
    memory_mb: float
    driver: str


def gpus() -> list[Gpu]:
    """Return the GPUs that NVML reports; none where there is no driver."""
    nvml: Any = importlib.import_module("pynvml")  # it ships no types
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        driver = str(nvml.nvmlSystemGetDriverVersion())
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return [
            Gpu(
                str(nvml.nvmlDeviceGetName(handle)),
                nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**20,
                driver,
            )
            for handle in handles
        ]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def resolve_device(device: str) -> Literal["cuda", "cpu"]:
    """Return `device` with `auto` decided by what is there."""
    if device == "auto":
        # A driver that NVML cannot talk to is a fault to be told, not a machine without a GPU.
        return "cuda" if gpus() or any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"
    return "cuda" if device == "cuda" else "cpu"
