"""The options and the environment of workers."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from harness.measuring.process import Confinement
from harness.workload import WORKLOAD

PROJECT = Path(__file__).resolve().parents[2]

_INHERITED = frozenset(
    {
        "HOME",
        "LANG",
        "LC_ALL",
        "LD_LIBRARY_PATH",
        "OMP_NUM_THREADS",
        "PATH",
        "PYTORCH_ALLOC_CONF",
        "PYTHONNOUSERSITE",
        "PYTHONUSERBASE",
        "PYTORCH_CUDA_ALLOC_CONF",
        "QUASAR_NVRTC",
        "TMPDIR",
        "TRITON_CACHE_DIR",
        "XDG_CACHE_HOME",
    }
)
_INHERITED_PREFIXES = ("CUDA_", "NVIDIA_")
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASS")


@dataclass(frozen=True)
class Options:
    """Device, timeout, stop and confinement of workers."""

    device: str = "auto"  # `cuda`, `cpu` (which hides the GPUs) or `auto`, as the validator chooses
    timeout: float = WORKLOAD.timeout_seconds  # seconds for each process, everything included
    stop: threading.Event | None = None
    _: KW_ONLY
    gpu: str | None = None  # of CUDA_VISIBLE_DEVICES; None keeps this process's value
    own: bool = True  # whether the code is one's own; limits of the check are stricter otherwise
    # isolates the process; None runs it with this user's rights
    confinement: Confinement | None = None


def child_environment(
    environ: Mapping[str, str],
    *,
    device: str,
    gpu: str | None = None,
    cache: Path | None = None,
) -> dict[str, str]:
    """Return the environment of a worker: an allow-list, so that no secret reaches kernel code.

    Args:
        gpu: the value of CUDA_VISIBLE_DEVICES; None keeps it.
        cache: an empty folder for every cache of compiled kernels; None keeps the shared ones.
    """
    env = {
        name: value
        for name, value in environ.items()
        if name in _INHERITED
        or (name.startswith(_INHERITED_PREFIXES) and not any(w in name for w in _SECRET_WORDS))
    }
    path = filter(os.path.isabs, environ.get("PYTHONPATH", "").split(os.pathsep))
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(PROJECT), *path]))
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # a measured worktree must stay as it was committed
    env["PYTHONUNBUFFERED"] = "1"  # a killed worker's last output is kept
    # As in the validator's script.
    env["TRITON_PRINT_AUTOTUNING"] = env["TRITON_PRINT_DEBUG"] = "1"
    if device == "cpu":
        gpu = ""
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    if cache is not None:
        env["TRITON_CACHE_DIR"] = str(cache / "triton")
        env["CUDA_CACHE_PATH"] = str(cache / "cuda")
        env["XDG_CACHE_HOME"] = str(cache / "xdg")
    return env
