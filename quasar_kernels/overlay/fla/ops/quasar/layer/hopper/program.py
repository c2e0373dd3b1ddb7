"""The layer's fused products on Hopper GPUs: whether they are used, and their compiled program.

projection.py and gated_output.py launch them. They need wgmma, clusters and bulk copies, which
compute capability 9.0 alone has together; elsewhere, and where they cannot be built, the layer goes
the way that every GPU can.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from fla.ops.quasar.backend import requested_backend
from fla.ops.quasar.cuda.driver import Kernel, load_kernels
from fla.ops.quasar.cuda.nvrtc import HOPPER, compile_files
from fla.ops.quasar.cuda.programs import Programs

_SOURCES = [
    Path(__file__).with_name("csrc") / f"{part}.cu"
    for part in ("pack_weights", "projection", "gated_output")
]
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Program(NamedTuple):
    """The loaded kernels of a device and dtype."""

    pack: Kernel
    project: Kernel
    output: Kernel
    multiprocessors: int


def compile_program(dtype: str, options: tuple[str, ...] = ()) -> bytes:
    """Return the kernels' machine code for capability 9.0 and `bf16` or `fp16`.

    Raises:
        CudaUnavailableError: there is no NVRTC, no source, or it does not compile.
    """
    options = (f"-DQUASAR_ONLY_{dtype.upper()}", *options)
    return compile_files(f"hopper_products-{dtype}", _SOURCES, HOPPER, options)


@functools.cache
def load_program(device: int, dtype: torch.dtype, options: tuple[str, ...] = ()) -> Program:
    """Compile (or read from the cache) and load the kernels for a device of capability 9.0.

    Raises:
        CudaUnavailableError: they cannot be built or loaded there.
    """
    suffix = _DTYPES[dtype]
    names = [f"quasar_{name}_{suffix}" for name in ("pack_weights", "projection", "gated_output")]
    kernels = load_kernels(compile_program(suffix, options), names, device)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return Program(*(kernels[name] for name in names), multiprocessors)


_programs = Programs(lambda key: load_program(*key), "the layer's fused products are not used: %s")


@functools.cache
def _is_hopper(device: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) == HOPPER


def hopper_program(x: torch.Tensor, dtype: torch.dtype) -> Program | None:
    """Return the kernels for products in `dtype` on x's device, or None where they are not used.

    That is so on other GPUs, with QUASAR_BACKEND=triton or torch, and where the kernels cannot be
    built; the first time, one line is logged that names the cause and the remedy.
    """
    if not x.is_cuda or dtype not in _DTYPES or not _is_hopper(x.device.index):
        return None
    if requested_backend() not in ("auto", "cuda"):
        return None
    return _programs.get((x.device.index, dtype))


def abandon(x: torch.Tensor, dtype: torch.dtype, error: Exception) -> None:
    """Use the kernels no more on x's device for `dtype`: a launch has failed."""
    _programs.give_up((x.device.index, dtype), error)
