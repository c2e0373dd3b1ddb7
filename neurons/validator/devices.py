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

    The second value is CUDA_VISIBLE_DEVICES for a process that sees only these files: the GPU is
    then the first one. Where NVML does not name the GPU's file, the files are those of every GPU.
    """
    name = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    shared = [DEV / file for file in _SHARED if (DEV / file).exists()]
    own = DEV / f"nvidia{_minor_number(name)}"
    if not own.exists():
        return [*sorted(DEV.glob("nvidia[0-9]*")), *shared], name
    return [own, *shared], "0" if name.isdecimal() else name


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
