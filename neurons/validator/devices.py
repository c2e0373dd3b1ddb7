"""The device files of the GPU that forks may use: one, whatever else the machine has.

A speed is that of one GPU. With the others in sight, a fork could distribute a call over all.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

DEV = Path("/dev")
_SHARED = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-caps")


def find_gpu(environ: Mapping[str, str]) -> tuple[list[Path], str]:
    """Return the device files of the first GPU that CUDA shows, and those that all GPUs share.

    The second value is CUDA_VISIBLE_DEVICES for a process that sees only these files: a UUID, since
    NVML counts GPUs without a file as well. Where NVML does not name the GPU's file, the files are
    those of every GPU.
    """
    name = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    shared = [DEV / file for file in _SHARED if (DEV / file).exists()]
    number, uuid = _identify(name)
    own = DEV / f"nvidia{number}"
    if not own.exists():
        return [*sorted(DEV.glob("nvidia[0-9]*")), *shared], name
    return [own, *shared], uuid


def _identify(name: str) -> tuple[int | None, str]:
    """Return N of the GPU's /dev/nvidiaN and its UUID; None and the name if NVML knows neither."""
    nvml: Any = importlib.import_module("pynvml")  # it ships no types
    with suppress(nvml.NVMLError, ValueError):
        nvml.nvmlInit()
        try:
            if name.startswith("MIG-"):
                part = nvml.nvmlDeviceGetHandleByUUID(name)
                handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
                return int(nvml.nvmlDeviceGetMinorNumber(handle)), name
            if name.startswith("GPU-"):
                handle = nvml.nvmlDeviceGetHandleByUUID(name)
            else:
                handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
            return int(nvml.nvmlDeviceGetMinorNumber(handle)), str(nvml.nvmlDeviceGetUUID(handle))
        finally:
            nvml.nvmlShutdown()
    return None, name
