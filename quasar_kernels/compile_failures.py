"""Cause and remedy of failures to compile or load CUDA code, recognised by their messages.

It recognises messages of nvcc, cicc, ptxas, NVRTC, the driver, gcc, torch and Triton. The
miner's `doctor` and benchmarks.resources.compile use it. The overlay is published alone and cannot
import it, so its nvrtc.py has a separate short list.
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
GPU_FULL = Explanation(
    "the GPU's memory is full", "End the other processes that `nvidia-smi` lists."
)
MEMORY = Explanation(
    "the compiler ran out of memory",
    "Free memory, or raise the limit of the container or of `ulimit -v`.",
)
OTHER_GPUS = Explanation(
    "the code was built for other GPUs", "Install a torch build that supports this GPU."
)
ARCH_FLAG = Explanation(
    "the architecture flag does not allow an instruction in the code",
    "Compile for the GPU itself: -arch=sm_90a for Hopper (wgmma is not in sm_90), sm_80 or later "
    "for the others.",
)
TOOLKIT_OLD = Explanation(
    "the toolkit does not support this architecture: it is too old, or too new for an old GPU",
    "Install a torch build, or a toolkit, whose CUDA supports the GPU.",
)
TOOLKIT_MIXED = Explanation(
    "ptxas is older than the compiler before it",
    "Take both from one toolkit: correct PATH, CUDA_HOME or TRITON_PTXAS_PATH.",
)
NO_NVRTC = Explanation(
    "the wheel nvidia-cuda-nvrtc is missing or incomplete",
    "Install the one of torch's CUDA version (torch's CUDA builds bring it), or name the library "
    "in QUASAR_NVRTC.",
)
NO_NVCC = Explanation(
    "nvcc, or a part of its toolkit, was not found",
    "Run `scripts/install.sh dev`, which installs it, or put a toolkit's bin folder on PATH.",
)
NO_GCC = Explanation(
    "the host's C or C++ compiler was not found",
    "On Debian and Ubuntu: sudo apt install gcc g++; elsewhere put it on PATH.",
)
GCC_NEW = Explanation(
    "the host's compiler is newer than this toolkit supports",
    "Name an older one: nvcc -ccbin g++-13, or NVCC_CCBIN=g++-13.",
)
NO_PYTHON_H = Explanation(
    "Python's headers are missing", "On Debian and Ubuntu: sudo apt install python3-dev"
)
NO_SOURCE = Explanation(
    "a source file of the kernels is missing",
    "Restore the csrc folders: git checkout -- quasar_kernels/overlay",
)
NO_HEADER = Explanation(
    "a header is missing",
    "Install the toolkit's headers (`scripts/install.sh dev` does), or name their folder by -I.",
)

_OPEN = r"(?:can|could) ?not open (?:source|include) file \"?|fatal error: "
_HOST_COMPILER = r"(?:gcc|g\+\+|cc1plus|cc|c\+\+|clang\+*)(?:-\d+)?"

# A text may match several patterns. The first match counts, so specific patterns come first.
_KNOWN = (
    (r"cuda out of memory|cuda_error_out_of_memory", GPU_FULL),
    (r"out of memory|memory allocation failure|std::bad_alloc|cannot allocate memory", MEMORY),
    (r"loop in catastrophic error processing", MEMORY),  # NVRTC has no memory for the report
    (r"\bkilled\b|(?:status|code) (?:137|-9)\b", MEMORY),
    (r"driver version is insufficient|driver on your system is too old", DRIVER_OLD),
    (r"unsupported toolchain|unsupported_ptx_version|insufficient_driver", DRIVER_OLD),
    (r"\berror(?: code)?:? (?:35|222)\b", DRIVER_OLD),
    (r"\berror:? 803\b|system_driver_mismatch|unsupported display driver", DRIVER_MIXED),
    (
        r"found no nvidia driver|libcuda\.so\.1|no cuda-capable device|no_device|no cuda gpus",
        DRIVER_MISSING,
    ),
    (r"not compiled with cuda enabled", CPU_TORCH),
    (r"no kernel image is available|no_binary_for_gpu", OTHER_GPUS),
    (r"not supported on \.target|requires (?:\.?target )?sm_|sm_90a required", ARCH_FLAG),
    (r"specified by \.target is higher", ARCH_FLAG),
    (r"invalid value for --gpu-architecture|unsupported gpu architecture", TOOLKIT_OLD),
    (r"not defined for option 'gpu-name'|not compile --gpu-architecture", TOOLKIT_OLD),
    (r"unsupported \.version", TOOLKIT_MIXED),
    (r"nvrtc, cuda's run-time compiler, was not found|libnvrtc\S*\.so", NO_NVRTC),
    (r"\b(?:nvcc|cicc|ptxas|fatbinary): (?:command )?not found", NO_NVCC),
    (r"no such file or directory: '\S*nvcc'", NO_NVCC),
    (rf"\b{_HOST_COMPILER}: (?:no such file|(?:command )?not found)", NO_GCC),
    (r"failed to find c compiler|failed to preprocess host compiler", NO_GCC),
    (r"unsupported (?:gnu|clang) version", GCC_NEW),
    (rf"(?:{_OPEN})\S*python\.h\b", NO_PYTHON_H),
    (rf"(?:{_OPEN})\S*\.cuh\b|the cuda sources cannot be read", NO_SOURCE),
    (rf"(?:{_OPEN})\S+\.(?:h|hpp|inl)\b", NO_HEADER),
)


def explain(text: str) -> Explanation | None:
    """Return the known cause of a failure, or None if its text matches no known one.

    Args:
        text: an error message, or the whole output of a compiler.
    """
    low = text.lower()
    return next((known for pattern, known in _KNOWN if re.search(pattern, low)), None)
