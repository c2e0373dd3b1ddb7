"""Causes of failed compilations that an operator can remove, recognised by the failures' messages.

The miner's `doctor` and benchmarks.resources.compile use it. The overlay is published alone and
cannot import it, so its nvrtc.py has a separate short list.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Explanation(NamedTuple):
    """The cause of a failure, as a clause, and its remedy, as sentences."""

    cause: str
    remedy: str


DRIVER_OLD = Explanation(
    "the GPU's driver is older than the CUDA that the code was built with",
    "Update the driver (`nvidia-smi` shows the newest CUDA version that it supports), or install "
    "a torch build for that CUDA.",
)
DRIVER_MIXED = Explanation(
    "parts of two driver versions are loaded",
    "Reboot after an update of the driver; in a container take its cuda-compat library off "
    "LD_LIBRARY_PATH.",
)
DRIVER_MISSING = Explanation(
    "there is no working driver, or no GPU is visible",
    "Check `nvidia-smi` and CUDA_VISIBLE_DEVICES; in a container start it with --gpus all.",
)
CPU_TORCH = Explanation(
    "this torch is a build without CUDA", "Remove .venv and run scripts/install.sh."
)
OTHER_GPUS = Explanation(
    "torch's CUDA does not support this GPU", "Install a torch build that supports the GPU."
)
NO_NVRTC = Explanation(
    "the wheel nvidia-cuda-nvrtc is missing or incomplete",
    "Install it for torch's CUDA version (torch's CUDA builds require it), or set QUASAR_NVRTC to "
    "the library's path.",
)
GPU_FULL = Explanation(
    "the GPU's memory is full", "End the other processes that `nvidia-smi` lists."
)
MEMORY = Explanation(
    "the compiler ran out of memory",
    "Free memory, or raise the limit of the container or of `ulimit -v`.",
)

# A text may match several patterns. The first match counts, so specific patterns come first.
_KNOWN = (
    (r"cuda out of memory|cuda_error_out_of_memory", GPU_FULL),
    (r"out of memory|memory allocation failure|std::bad_alloc|cannot allocate memory", MEMORY),
    (r"\bkilled\b|(?:status|code) (?:137|-9)\b", MEMORY),
    (r"driver version is insufficient|driver on your system is too old", DRIVER_OLD),
    (r"unsupported toolchain|unsupported_ptx_version|\berror(?: code)?:? 35\b", DRIVER_OLD),
    (r"\berror:? 803\b|system_driver_mismatch|unsupported display driver", DRIVER_MIXED),
    (r"found no nvidia driver|libcuda\.so\.1|no cuda-capable device|no cuda gpus", DRIVER_MISSING),
    (r"not compiled with cuda enabled", CPU_TORCH),
    (r"no kernel image is available|no_binary_for_gpu", OTHER_GPUS),
    (r"invalid value for --gpu-architecture|unsupported gpu architecture", OTHER_GPUS),
    (r"nvrtc, cuda's run-time compiler, was not found|libnvrtc\S*\.so", NO_NVRTC),
)


def explain(text: str) -> Explanation | None:
    """Return the known cause of a failure, or None if its text matches no known one.

    Args:
        text: an error message, or the whole output of a compiler.
    """
    low = text.lower()
    return next((known for pattern, known in _KNOWN if re.search(pattern, low)), None)
