"""Resource usage of Triton kernels on this GPU: registers, spills, memory, occupancy."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import triton

Footprint = dict[str, dict[str, float]]
"""For each kernel: registers and spilled 4-byte words per thread, bytes of shared memory and warps
per block, and the occupancy as a share of a multiprocessor's warps."""


@contextmanager
def launched() -> Iterator[list[Any]]:
    """Yield a list of the compiled kernels that are launched in the block, each once."""
    kernels: list[Any] = []
    run: Any = triton.JITFunction.run

    def collecting(self: Any, *args: Any, **options: Any) -> Any:
        kernel = run(self, *args, **options)
        if kernel is not None and all(kernel is not other for other in kernels):
            kernels.append(kernel)
        return kernel

    with patch.object(triton.JITFunction, "run", collecting):
        yield kernels


def blocks_at_once(function: int, threads: int, shared: int) -> int:
    """Return how many blocks of a kernel a multiprocessor holds; or a RuntimeError."""
    count = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(count), ctypes.c_void_p(function), threads, ctypes.c_size_t(shared)
    )
    if status:
        raise RuntimeError(f"cuOccupancyMaxActiveBlocksPerMultiprocessor: CUDA error {status}")
    return count.value


def warps_of_gpu() -> int:
    """Return how many warps a multiprocessor of this GPU can hold."""
    properties = torch.cuda.get_device_properties(0)
    return int(properties.max_threads_per_multi_processor // properties.warp_size)


def footprint(kernels: list[Any], most: int) -> Footprint:
    """Return the usage of each of `kernels`; a multiprocessor can hold `most` warps."""
    usage: Footprint = {}
    for kernel in kernels:
        warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
        resident = warps * blocks_at_once(kernel.function, 32 * warps, shared)
        usage[kernel.name] = {
            "registers": kernel.n_regs,
            "spills": kernel.n_spills,
            "shared": shared,
            "warps": warps,
            "occupancy": resident / most,
        }
    return usage
