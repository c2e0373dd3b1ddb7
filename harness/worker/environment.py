"""The machine and the software as the process that measures sees them."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

from harness.report import Environment
from harness.worker.telemetry import snapshot


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def describe(device: torch.device) -> Environment:
    """Return what a reader needs to repeat a measurement on `device`."""
    gpu = torch.cuda.get_device_properties(0) if device.type == "cuda" else None
    state = snapshot() if gpu is not None else None
    return Environment(
        device="cpu" if gpu is None else "cuda",
        platform=platform.platform(),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        cuda=torch.version.cuda,
        gpu=None if gpu is None else gpu.name,
        gpu_memory_mb=None if gpu is None else gpu.total_memory / 2**20,
        compute_capability=None if gpu is None else f"{gpu.major}.{gpu.minor}",
        driver=None if state is None else state.driver,
        cpu_count=os.cpu_count() or 1,
    )
