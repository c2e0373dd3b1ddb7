"""The machine and the software as the measuring process sees them."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from harness.hardware.machine import Environment, EqualGpus
from harness.worker.failures import WorkerError
from harness.worker.machine.telemetry import facts, snapshot

PACKAGES = ("einops", "fla-core", "numpy", "nvidia-ml-py", "transformers")
"""Packages, other than torch and Triton, that a fork imports."""

VARIABLES = (
    *("CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "QUASAR_NVRTC"),
)
"""Variables that a worker inherits and that change how kernels run."""


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def usable_memory(host_bytes: int, root: Path = Path("/")) -> int:
    """Return the bytes that this process may use: the host's, or fewer by a cgroup's limit."""
    least, own = host_bytes, root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            # a container may not see these folders; the top one then has its limit
            with suppress(OSError, ValueError):  # ValueError: `max`
                name = "memory.limit_in_bytes" if controllers else "memory.max"
                least = min(least, int((place / name).read_text()))
            if place == top:
                break
    return least


def device_of(name: str) -> torch.device:
    """Return the device of `cuda`, `cpu` or `auto`; raise a WorkerError for a missing one."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise WorkerError("no CUDA device is visible to torch; use --device cpu", "crash")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def describe(device: torch.device) -> Environment:
    """Return the facts that a reader needs to repeat a measurement on `device`."""
    gpu = torch.cuda.get_device_properties(0) if device.type == "cuda" else None
    state = snapshot() if gpu is not None else None
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpus = Path("/proc/cpuinfo")
    info = cpus.read_text() if cpus.exists() else ""
    model = re.search(r"^model name\s*:(.*)$", info, re.MULTILINE)
    versions = {name: version for name in PACKAGES if (version := _version(name)) is not None}
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
        cpu=model[1].strip() if model else None,
        usable_cpus=len(os.sched_getaffinity(0)),
        memory_mb=usable_memory(host_bytes) / 2**20,
        packages=versions,
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        multiprocessors=None if gpu is None else gpu.multi_processor_count,
        l2_bytes=None if gpu is None else gpu.L2_cache_size,
        **({} if gpu is None else facts()),
    )


def equal_gpus() -> EqualGpus:
    """Return the visible GPUs of the first one's model."""
    gpus = [*map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))]
    return EqualGpus(uuids=tuple(f"GPU-{gpu.uuid}" for gpu in gpus if gpu.name == gpus[0].name))
