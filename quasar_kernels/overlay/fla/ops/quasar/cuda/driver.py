"""Load compiled kernels and launch them through the CUDA driver, by ctypes.

A launch costs a few microseconds of host time, because all arguments are one structure.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fla.ops.quasar import torch_private
from fla.ops.quasar.cuda.nvrtc import CudaUnavailableError

PARAMETERS = ctypes.c_char_p * 2
"""The type of a launch's two parameters."""
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_UINT16 = 1  # CU_TENSOR_MAP_DATA_TYPE_UINT16
_SWIZZLE_128 = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_PROMOTED = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaUnavailableError(
            "the CUDA driver (libcuda.so.1) cannot be loaded", "install the GPU's driver"
        ) from error
    pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [pointer, *[unsigned] * 7, *[pointer] * 3]
    return library


def _checked(status: int, what: str) -> None:
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise CudaUnavailableError(f"{what}: {(name.value or b'unknown error').decode()}")


def _enter_context(device: int) -> None:
    # a thread that never used the CUDA runtime has no context; torch uses the primary context
    driver, handle, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    _checked(driver.cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    _checked(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "primary context")
    _checked(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")


class Kernel(NamedTuple):
    """A loaded kernel with its launch configuration."""

    function: int
    threads: int
    shared: int  # bytes of dynamic shared memory
    blocks: int  # occupancy: resident blocks of one multiprocessor
    device: int
    arguments: int  # bytes of the first parameter

    def launch(self, grid: tuple[int, int], parameters: bytes | ctypes.Array[Any]) -> None:
        """Start `grid` blocks on the current stream of the kernel's device, the current device.

        Args:
            grid: the blocks in x and y.
            parameters: the structure that is the kernel's parameter, or an array of several.

        Raises:
            CudaUnavailableError: the driver refused the launch.
        """
        if type(parameters) is bytes:
            parameters = (ctypes.c_char_p * 1)(parameters)
        stream = torch_private.raw_stream(self.device)
        launch, block = _driver().cuLaunchKernel, (self.threads, 1, 1, self.shared, stream)
        status = launch(self.function, *grid, 1, *block, parameters, None)
        if status == _NO_CONTEXT:
            _enter_context(self.device)
            status = launch(self.function, *grid, 1, *block, parameters, None)
        if status:
            _checked(status, "cuLaunchKernel")


def load_kernels(parts: Sequence[bytes], names: Iterable[str], device: int) -> dict[str, Kernel]:
    """Load compiled code on a device for the life of the process, and return its kernels by name.

    For each kernel, its part of the code has an array of three ints: threads, bytes of dynamic
    shared memory, bytes of the first parameter. The array's name is that of the kernel without the
    dtype, followed by `_launch`.

    Raises:
        CudaUnavailableError: the driver rejects the code.
    """
    driver, modules = _driver(), []
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the runtime makes its context current
        _enter_context(device)
        for code in parts:
            modules.append(ctypes.c_void_p())
            _checked(driver.cuModuleLoadData(ctypes.byref(modules[-1]), code), "cuModuleLoadData")
        return {
            name: _kernel(driver, modules[part_with(name, parts)], name, device) for name in names
        }


def part_with(name: str, parts: Sequence[bytes]) -> int:
    """Return the index of the part with a kernel's name in its code; 0 if none has it.

    The driver would return an error for each other part, and compute-sanitizer reports errors.
    """
    whole = re.compile(rb"\b%s\b" % name.encode())
    return next((n for n, code in enumerate(parts) if whole.search(code)), 0)


def _kernel(driver: ctypes.CDLL, module: ctypes.c_void_p, name: str, device: int) -> Kernel:
    function, address, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t()
    _checked(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), name)
    table = name.removesuffix("_bf16").removesuffix("_fp16") + "_launch"
    status = driver.cuModuleGetGlobal_v2(
        ctypes.byref(address), ctypes.byref(size), module, table.encode()
    )
    _checked(status, table)
    launch = (ctypes.c_int * 3)()
    _checked(driver.cuMemcpyDtoH_v2(launch, address, ctypes.c_size_t(12)), table)
    threads, shared, arguments = launch
    _checked(
        driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared), f"{name}, {shared} B"
    )
    blocks = ctypes.c_int()
    occupancy = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(blocks), function, threads, ctypes.c_size_t(shared)
    )
    _checked(occupancy, name)
    if not function.value or blocks.value < 1:
        raise CudaUnavailableError(f"{name} does not fit this GPU", "set QUASAR_BACKEND=triton")
    return Kernel(function.value, threads, shared, blocks.value, device, arguments)


TENSOR_MAP = 128
"""Bytes of a tensor map, CUtensorMap."""


def tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """Return the tensor map (CUtensorMap) of a tensor of 16-bit elements for Hopper's bulk copies.

    Tiles arrive in shared memory as rows of 128 bytes with the 128-byte swizzle. Elements outside
    of the tensor are read as zero and never written.

    Args:
        address: the address of the tensor's first element, a multiple of 16.
        sizes, strides: in elements, the innermost first; the innermost stride, 1, is omitted, and
            the others are multiples of 8.
        box: the sizes of a tile; the innermost is 64.

    Raises:
        CudaUnavailableError: the driver rejects the description.
    """
    storage = ctypes.create_string_buffer(TENSOR_MAP + 64)
    aligned = ctypes.addressof(storage) + -ctypes.addressof(storage) % 64
    rank, arrays = len(sizes), _arrays(sizes, strides, box)
    encode, options = _encoder(), (0, _SWIZZLE_128, _PROMOTED, 0)
    status = encode(aligned, _UINT16, rank, address, *arrays, *options)
    if status == _NO_CONTEXT:
        _enter_context(torch.cuda.current_device())
        status = encode(aligned, _UINT16, rank, address, *arrays, *options)
    _checked(status, f"cuTensorMapEncodeTiled of {sizes}, strides {strides}")
    return ctypes.string_at(aligned, TENSOR_MAP)


@functools.cache
def _encoder() -> Any:
    encode = getattr(_driver(), "cuTensorMapEncodeTiled", None)
    if encode is None:
        raise CudaUnavailableError("the GPU's driver is older than CUDA 12", "update it")
    pointer = ctypes.c_void_p
    encode.argtypes = [pointer, ctypes.c_int, ctypes.c_uint, *[pointer] * 5, *[ctypes.c_int] * 4]
    return encode


@functools.lru_cache(1024)
def _arrays(
    sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> tuple[ctypes.Array[Any], ...]:
    """Return the arrays of a description; the driver only reads them, so equal sizes share them."""
    rank = len(sizes)
    # the stride of a dimension of size 1 is never used and may be any valid value
    outer = zip(sizes[1:], strides, strict=True)
    steps = [2 * stride if size > 1 else 16 for size, stride in outer]
    return (
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*steps),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
    )


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
