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


def shown_devices(environ: Mapping[str, str]) -> list[Path]:
    """Return the device files of the first GPU that CUDA shows, and those that all GPUs share.

    Where NVML does not name the GPU's file, these are the files of every GPU.
    """
    number = _minor_number(environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip())
    own = DEV / f"nvidia{number}"
    gpus = [own] if own.exists() else sorted(DEV.glob("nvidia[0-9]*"))
    return [*gpus, *(DEV / name for name in _SHARED if (DEV / name).exists())]


def visible_name(environ: Mapping[str, str]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a process that sees these files: there the GPU is the first.

    UUIDs stay.
    """
    first = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return "0" if first.isdecimal() else first


def _minor_number(name: str) -> int | None:
    """Return N of the GPU's /dev/nvidiaN; None where NVML does not know it."""
    nvml: Any = importlib.import_module("pynvml")  # it ships no types
    with suppress(nvml.NVMLError, ValueError):
        nvml.nvmlInit()
        try:
            return int(nvml.nvmlDeviceGetMinorNumber(_handle(nvml, name)))
        finally:
            nvml.nvmlShutdown()
    return None


def _handle(nvml: Any, name: str) -> Any:
    if not name.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    handle = nvml.nvmlDeviceGetHandleByUUID(name)
    if name.startswith("MIG-"):
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return handle
