"""Diagnosis of the CUDA kernels on this machine: compilation for a capability, and test calls.

Call `compile_for` and `find_paths` in a separate process: they import torch, and the process that
reads their results must not.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict

TOLERANCE = 1e-2
"""Relative RMS error above which a result is wrong: twice the error of bf16 tensor cores."""

_TOKENS = 128
_D, _H, _S = 512, 8, 64  # hidden_size, num_heads and head_dim that a validator times
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Build(_Frozen):
    """One attempt to compile a program for a capability and dtype.

    `program` is `operator`, `operator 128` (for heads of 128), `gradients`, `gradients 128`,
    `layer` or `wide layer`.
    """

    program: str
    dtype: str
    seconds: float
    machine_code: bool = False  # false: PTX for an older GPU, which the driver translates
    error: str = ""
    remedy: str = ""  # of the error, if a remedy is known


class Builds(_Frozen):
    """The kernels of one capability."""

    builds: tuple[Build, ...]


class PathTaken(_Frozen):
    """Which implementation ran a call of the operator or the layer on a device, and why.

    `call` is `operator` (`chunk_quasar`), `operator 128` (the same for heads of 128) or `layer`
    (on Hopper only, with its fused kernels). `capability` is (major, minor), None for the CPU.
    `rms` is the relative RMS error of the result. `error` is empty unless the call raised an
    exception.
    """

    call: str = "operator"
    device: str
    name: str
    capability: tuple[int, int] | None
    dtype: str
    backend: str = ""
    reason: str = ""
    rms: float | None = None
    error: str = ""
    remedy: str = ""  # of the error or the reason, if a remedy is known


class PathsTaken(_Frozen):
    """The compiler and the paths; `nvrtc` is empty if `nvrtc_error` is set."""

    nvrtc: str = ""
    nvrtc_error: str = ""
    nvrtc_remedy: str = ""
    paths: tuple[PathTaken, ...]


def compile_for(major: int, minor: int) -> Builds:
    """Compile the kernels for a capability with NVRTC, as at their first use; needs no GPU.

    The result contains the compiler's errors; other exceptions are raised.
    """
    from quasar_kernels.mount import mount

    mount()
    from fla.ops.quasar.cuda.nvrtc import HOPPER
    from fla.ops.quasar.cuda.scan import scan_backward, scan_forward
    from fla.ops.quasar.layer import hopper, wide

    capability = (major, minor)
    of_128 = scan_forward.options_for(128)
    programs: dict[str, Callable[[str], list[bytes]]] = {
        "operator": partial(scan_forward.PROGRAM.compile, capability),
        "operator 128": partial(scan_forward.PROGRAM.compile, capability, options=of_128),
        "gradients": partial(scan_backward.PROGRAM.compile, capability),
    }
    if capability == HOPPER:
        programs["gradients 128"] = partial(
            scan_backward.PROGRAM.compile, capability, options=of_128
        )
        programs["layer"] = partial(hopper.PROGRAM.compile, capability)
        programs["wide layer"] = partial(wide.PROGRAM.compile, capability)
    builds = (_build(name, dtype, run) for name, run in programs.items() for dtype in _DTYPES)
    return Builds(builds=tuple(builds))


def _build(program: str, dtype: str, run: Callable[[str], list[bytes]]) -> Build:
    from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError

    started = time.monotonic()
    try:
        parts, error, remedy = run(dtype), "", ""
    except CudaUnavailableError as failure:
        parts, error, remedy = [], failure.problem, failure.remedy
    return Build(
        program=program,
        dtype=dtype,
        seconds=time.monotonic() - started,
        machine_code=bool(parts) and all(part.startswith(b"\x7fELF") for part in parts),
        error=error,
        remedy=remedy,
    )


def find_paths(device: str) -> PathsTaken:
    """Run short calls on every GPU if `device` is `cuda`, otherwise on the CPU.

    Raises:
        RuntimeError, AssertionError: torch cannot use CUDA; its message has the cause.
    """
    import torch

    from quasar_kernels.mount import mount

    if device == "cuda":
        # unlike is_available(), it raises an exception with the cause
        torch.cuda.init()  # type: ignore[no-untyped-call]
    mount()
    from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError, load_library

    nvrtc = error = remedy = ""
    try:
        library = load_library()
    except CudaUnavailableError as failure:
        error, remedy = failure.problem, failure.remedy
    else:
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        nvrtc = f"{major.value}.{minor.value} at {library._name}"
    paths = tuple(_paths(device))
    return PathsTaken(nvrtc=nvrtc, nvrtc_error=error, nvrtc_remedy=remedy, paths=paths)


def _paths(device: str) -> Iterator[PathTaken]:
    import torch
    from fla.ops.quasar.cuda.nvrtc import HOPPER

    for dtype in _DTYPES:
        if device != "cuda":
            yield _path(torch.device("cpu"), "CPU", None, dtype)
            continue
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            here = (torch.device("cuda", index), gpu.name, (gpu.major, gpu.minor), dtype)
            yield _path(*here)
            yield _path(*here, width=128)
            if here[2] == HOPPER:
                yield _layer_path(*here)


def _path(
    device: Any, name: str, capability: tuple[int, int] | None, dtype: str, width: int = 64
) -> PathTaken:
    import torch
    from fla.ops.quasar import chunk_quasar
    from fla.ops.quasar.backend import choose_backend

    from quasar_kernels.reference import quasar_recurrence, relative_rms

    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        (0.3 * torch.randn(1, _TOKENS, 2, width, generator=generator)).to(
            getattr(torch, _DTYPES[dtype])
        )
        for _ in range(3)
    )
    beta = torch.ones(2)
    result: dict[str, Any] = {}
    try:
        inputs = [x.to(device) for x in (q, k, v, beta)]
        choice = choose_backend(*inputs[:3])
        result |= {"backend": choice.backend, "reason": choice.reason, "remedy": choice.remedy}
        o, _ = chunk_quasar(*inputs)
        expected, _ = quasar_recurrence(q, k, v, beta)
        result["rms"] = relative_rms(o.cpu(), expected)
    except Exception as problem:  # compilers and drivers raise any type; the error is the result
        result |= _error_fields(problem)
    call = "operator" if width == 64 else f"operator {width}"
    return PathTaken(
        call=call, device=str(device), name=name, capability=capability, dtype=dtype, **result
    )


def _error_fields(error: Exception) -> dict[str, str]:
    problem, remedy = getattr(error, "problem", error), getattr(error, "remedy", "")
    return {"error": f"{type(error).__name__}: {problem}", "remedy": remedy}


def _layer_path(device: Any, name: str, capability: tuple[int, int], dtype: str) -> PathTaken:
    import torch
    from fla.layers.quasar import QuasarAttention
    from fla.ops.quasar.cuda.program import Variant
    from fla.ops.quasar.layer import paths
    from fla.ops.quasar.layer.hopper import PROGRAM

    from quasar_kernels.reference import quasar_layer, relative_rms

    torch.manual_seed(0)
    layer = QuasarAttention(hidden_size=_D, num_heads=_H, head_dim=_S)
    x = torch.randn(1, _TOKENS, _D)
    paths.MIN_TOKENS = 1  # otherwise the fused kernels would not run for so few tokens
    result: dict[str, Any] = {}
    try:
        kind = getattr(torch, _DTYPES[dtype])
        with torch.no_grad(), torch.cuda.device(device), torch.autocast("cuda", kind):
            expected = quasar_layer(layer.state_dict(), x, num_heads=_H, head_dim=_S)
            PROGRAM.load(Variant(device.index, kind))  # raises the cause if it fails
            y, _, _ = layer.to(device)(x.to(device))
        result |= {"backend": "cuda", "reason": "the layer's fused kernels run"}
        result["rms"] = relative_rms(y.cpu(), expected)
    except Exception as problem:  # see _path
        result |= _error_fields(problem)
    return PathTaken(
        call="layer", device=str(device), name=name, capability=capability, dtype=dtype, **result
    )
