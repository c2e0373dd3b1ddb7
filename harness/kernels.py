"""How the CUDA kernels fare on this machine: compiled for one capability, and run as they are used.

What is said here is what the worker answers; torch is imported inside the functions, since the
process that reads the answers never does.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

TOLERANCE = 1e-2
"""Relative RMS error above which a result is wrong: twice what bf16 tensor cores are left with."""

_TOKENS = 128
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


class Build(BaseModel):
    """One attempt to compile the kernels for a capability and dtype."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    seconds: float
    machine_code: bool = False  # else PTX for an older GPU, which the driver translates
    error: str = ""


class Builds(BaseModel):
    """The kernels of one capability."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    builds: tuple[Build, ...]


class PathTaken(BaseModel):
    """Which implementation takes a call of `chunk_quasar` on a device, and why.

    `capability` is (major, minor), None for the CPU. `rms` is the relative error of its result;
    `error` is not empty where the call raised.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    name: str
    capability: tuple[int, int] | None
    dtype: str
    backend: str = ""
    reason: str = ""
    rms: float | None = None
    error: str = ""


class PathsTaken(BaseModel):
    """The compiler and the paths; `nvrtc` is empty where `nvrtc_error` says why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nvrtc: str = ""
    nvrtc_error: str = ""
    paths: tuple[PathTaken, ...]


def compile_for(capability: tuple[int, int]) -> Builds:
    """Compile the kernels by NVRTC as at first use; needs no GPU. Unknown errors are raised."""
    from quasar_kernels.mount import mount

    mount()
    from fla.ops.quasar.cuda_scan import compile_program
    from fla.ops.quasar.nvrtc import CudaUnavailableError

    builds = []
    for dtype in _DTYPES:
        started = time.monotonic()
        try:
            code, error = compile_program(capability, dtype, ()), ""
        except CudaUnavailableError as problem:
            code, error = b"", str(problem)
        builds.append(
            Build(
                dtype=dtype,
                seconds=time.monotonic() - started,
                machine_code=code.startswith(b"\x7fELF"),
                error=error,
            )
        )
    return Builds(builds=tuple(builds))


def find_paths(device: str) -> PathsTaken:
    """Run a short call on every GPU where `device` is `cuda`, else on the CPU.

    Raises:
        RuntimeError, AssertionError: torch cannot use CUDA; its words tell why.
    """
    import torch

    from quasar_kernels.mount import mount

    if device == "cuda":
        # unlike is_available() it says what is wrong
        torch.cuda.init()  # type: ignore[no-untyped-call]
    mount()
    from fla.ops.quasar.nvrtc import CudaUnavailableError, load_library

    nvrtc = error = ""
    try:
        library = load_library()
    except CudaUnavailableError as problem:
        error = str(problem)
    else:
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        nvrtc = f"{major.value}.{minor.value} at {library._name}"
    return PathsTaken(nvrtc=nvrtc, nvrtc_error=error, paths=tuple(_paths(device)))


def _paths(device: str) -> Iterator[PathTaken]:
    import torch

    for dtype in _DTYPES:
        if device != "cuda":
            yield _path(torch.device("cpu"), "CPU", None, dtype)
            continue
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            yield _path(torch.device("cuda", index), gpu.name, (gpu.major, gpu.minor), dtype)


def _path(device: Any, name: str, capability: tuple[int, int] | None, dtype: str) -> PathTaken:
    import torch
    from fla.ops.quasar import chunk_quasar
    from fla.ops.quasar.backend import choose_backend

    from quasar_kernels.reference import quasar_recurrence, relative_rms

    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        (0.3 * torch.randn(1, _TOKENS, 2, 64, generator=generator)).to(
            getattr(torch, _DTYPES[dtype])
        )
        for _ in range(3)
    )
    beta = torch.ones(2)
    found: dict[str, Any] = {}
    try:
        inputs = [x.to(device) for x in (q, k, v, beta)]
        choice = choose_backend(*inputs[:3])
        found |= {"backend": choice.backend, "reason": choice.reason}
        o, _ = chunk_quasar(*inputs)
        expected, _ = quasar_recurrence(q, k, v, beta)
        found["rms"] = relative_rms(o.cpu(), expected)
    except Exception as problem:  # compilers and drivers raise what they like; it is the finding
        found["error"] = f"{type(problem).__name__}: {problem}"
    return PathTaken(device=str(device), name=name, capability=capability, dtype=dtype, **found)
