"""The GPUs that forks may use, and their device files.

A claim is the speed of one GPU. A fork therefore sees only one GPU, so that it cannot distribute a
call over several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.hardware.nvml import opened

DEV = Path("/dev")
_SHARED = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-caps")
_SLICE = "MIG-"


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG slice of one."""

    name: str  # its entry in CUDA_VISIBLE_DEVICES; if that is unset, its number in nvidia-smi
    # CUDA_VISIBLE_DEVICES for a process that sees only `files`: the UUID if NVML knows the GPU,
    # because NVML's numbers also count GPUs that the process does not see
    visible: str
    files: tuple[Path, ...]  # its device files, and those that all GPUs share
    model: str = ""  # its name in the driver; "" if NVML does not know the GPU


def find_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that CUDA shows, at least one.

    Like CUDA's, the list ends at a name that is unknown or repeated. A MIG slice is not combined
    with other GPUs, because CUDA uses one slice in a process, and slices of a GPU share its device
    file and power limit. If NVML does not identify the first GPU, the result is this GPU with the
    files of all GPUs.
    """
    shared = tuple(DEV / file for file in _SHARED if (DEV / file).exists())
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    gpus: list[Gpu] = []
    for gpu in _identified(names, shared):
        if not gpu.files[0].exists() or any(gpu.visible == other.visible for other in gpus):
            break
        if gpus and _SLICE in gpus[0].name + gpu.name:
            break
        gpus.append(gpu)
    name = names[0] if names else "0"
    every = (*sorted(DEV.glob("nvidia[0-9]*")), *shared)
    return gpus or [Gpu(name, name, every)]


def _identified(names: list[str] | None, shared: tuple[Path, ...]) -> Iterator[Gpu]:
    """Yield the named GPUs, or all, until NVML does not know one."""
    with suppress(ValueError), opened() as nvml:
        if nvml is None:
            return
        for name in names or map(str, range(nvml.nvmlDeviceGetCount())):
            handle, uuid = _handle(nvml, name)
            file = DEV / f"nvidia{nvml.nvmlDeviceGetMinorNumber(handle)}"
            yield Gpu(name, uuid, (file, *shared), str(nvml.nvmlDeviceGetName(handle)))


def _handle(nvml: Any, name: str) -> tuple[Any, str]:
    """Return NVML's handle of a GPU, or of a MIG slice's GPU, and the UUID of the GPU or slice."""
    if name.startswith(_SLICE):
        part = nvml.nvmlDeviceGetHandleByUUID(name)
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part), name
    if name.startswith("GPU-"):
        handle = nvml.nvmlDeviceGetHandleByUUID(name)
    else:
        handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
    return handle, str(nvml.nvmlDeviceGetUUID(handle))
