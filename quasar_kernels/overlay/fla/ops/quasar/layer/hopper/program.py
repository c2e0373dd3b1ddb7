"""The layer's fused products on Hopper GPUs: their program, its selection, and swizzled weights.

projection.py and gated_output.py launch the program's other two kernels. These need wgmma, clusters
and bulk copies, which only compute capability 9.0 has. Where the program cannot be used, the layer
uses other stages (layer/forward.py).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fla.ops.quasar import torch_private
from fla.ops.quasar.cuda.nvrtc import HOPPER
from fla.ops.quasar.cuda.program import (
    DTYPES,
    FLOAT,
    INT,
    INT64,
    POINTER,
    CudaProgram,
    LoadedProgram,
    Variant,
    addresses,
    fields,
    serializer,
)

MATRICES, VECTORS = 6, 5
"""Most matrices and vectors of one launch of pack_weights.cu."""


class SwizzledMatrix(ctypes.Structure):
    """`quasar::layer::SwizzledMatrix` of pack_weights.cu."""

    _fields_ = [
        *fields(POINTER, "from scale weight_tiles"),
        *fields(INT, "type scale_type rows inputs row_group input_group"),
        *fields(FLOAT, "factor"),
        *fields(INT, "fp16"),
    ]


class ConvertedVector(ctypes.Structure):
    """`quasar::layer::ConvertedVector` of pack_weights.cu."""

    _fields_ = [
        *fields(POINTER, "from to"),
        *fields(INT, "type count inner stride"),
        *fields(FLOAT, "factor"),
        *fields(INT, "softplus"),
    ]


class SwizzleArguments(ctypes.Structure):
    """`quasar::layer::SwizzleArguments` of pack_weights.cu."""

    _fields_ = [("matrices", SwizzledMatrix * MATRICES), ("vectors", ConvertedVector * VECTORS)]


class ProjectionArguments(ctypes.Structure):
    """`quasar::layer::ProjectionArguments` of projection.cu."""

    _fields_ = [
        *fields(POINTER, "x taps weight_tiles qkv narrow"),
        *fields(INT64, "T"),
        *fields(INT, "steps lag"),
    ]


class OutputArguments(ctypes.Structure):
    """`quasar::layer::OutputArguments` of gated_rows.cuh."""

    _fields_ = [
        *fields(POINTER, "o narrow gate_weights out_weights bias y"),
        *fields(INT64, "T narrow_stride"),
        *fields(INT, "tiles row_tiles steps"),
        *fields(FLOAT, "eps"),
    ]


CSRC = Path(__file__).with_name("csrc")
"""The folder of the kernels' sources."""
PACK_WEIGHTS = CSRC / "pack_weights.cu"
"""The kernel of `swizzle_weights`; every program that uses swizzled weights includes this file."""
PROGRAM = CudaProgram(
    "hopper_products",
    [PACK_WEIGHTS, CSRC / "projection.cu", CSRC / "gated_output.cu"],
    {
        "pack_weights_{}": SwizzleArguments,
        "projection_{}": ProjectionArguments,
        "gated_output_{}": OutputArguments,
    },
    "the layer's fused products are not used: %s",
)


@functools.cache
def _has_hopper(device: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) == HOPPER


def is_hopper(x: torch.Tensor) -> bool:
    """Return whether x is on a GPU of compute capability 9.0."""
    return x.is_cuda and _has_hopper(x.device.index)


def hopper_program(x: torch.Tensor, dtype: torch.dtype) -> LoadedProgram | None:
    """Return the kernels for products in `dtype` on x's device, or None if they are not used.

    Only Hopper GPUs use them. If they cannot be compiled, one line is logged with the cause and the
    remedy.
    """
    if dtype not in DTYPES or not is_hopper(x):
        return None
    return PROGRAM.find_loaded(Variant(x.device.index, dtype))


_SOURCE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PIECE = 8  # elements that a thread converts

_serialize_matrix, _serialize_vector = serializer(SwizzledMatrix), serializer(ConvertedVector)


class WeightLayout(NamedTuple):
    """A matrix and its layout as weight tiles; csrc/pack_weights.cu describes the result."""

    weight: torch.Tensor  # [outputs, inputs], multiples of 64, contiguous, fp32, bf16 or fp16
    row_group: int = 8  # outputs are permuted in groups of this size: 8 (no permutation), 16 or 32
    input_group: int = 8  # the same for inputs
    factor: float = 1.0  # multiplies every element
    scale: torch.Tensor | None = None  # [64], a factor by input % 64
    fp16: bool = False  # whether the tiles are fp16, independent of `dtype`


class Vector(NamedTuple):
    """A smaller parameter to convert to fp32, times `factor`."""

    source: torch.Tensor  # contiguous, fp32, bf16 or fp16
    to: torch.Tensor  # fp32; element i is written to index i % inner * stride + i // inner
    factor: float = 1.0
    inner: int = 1
    stride: int = 0
    softplus: bool = False  # log(1 + exp(x)) instead of x


def swizzle_weights(
    program: LoadedProgram,
    layouts: Sequence[WeightLayout],
    dtype: torch.dtype,
    vectors: Sequence[Vector] = (),
) -> list[torch.Tensor]:
    """Convert up to 6 matrices and 5 vectors in one launch on the current stream.

    Args:
        program: the kernels for the weights' device, which is the current one, and `dtype`.
        layouts: the matrices.
        dtype: bf16 or fp16; conversion to fp16 saturates.
        vectors: the smaller parameters.

    Returns:
        The weight tiles of each matrix, flat, in `dtype` or in fp16; they are contiguous.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    sizes = [p.weight.numel() for p in layouts]
    memory = layouts[0].weight.new_empty(sum(sizes), dtype=dtype)
    launch_swizzle(program, serialize_swizzle(layouts, memory, vectors), max(sizes), memory)
    return [
        tiles.view(torch.float16) if layout.fp16 else tiles
        for layout, tiles in zip(layouts, memory.split(sizes), strict=True)
    ]


def serialize_swizzle(
    layouts: Sequence[WeightLayout], memory: torch.Tensor, vectors: Sequence[Vector]
) -> bytes:
    """Return the kernel's arguments; `memory` receives the weight tiles of all matrices."""
    arguments, to = b"", memory.data_ptr()
    for weight, row_group, input_group, factor, scale, fp16 in layouts:
        source, scale_source = addresses(weight, scale)
        arguments += _serialize_matrix(
            *(source, scale_source, to),
            _SOURCE_TYPES[weight.dtype],
            0 if scale is None else _SOURCE_TYPES[scale.dtype],
            *weight.shape,
            row_group,
            input_group,
            factor,
            fp16,
        )
        to += weight.numel() * memory.itemsize
    arguments += bytes(ctypes.sizeof(SwizzledMatrix) * (MATRICES - len(layouts)))
    for source, target, factor, inner, stride, softplus in vectors:
        arguments += _serialize_vector(
            *addresses(source, target),
            _SOURCE_TYPES[source.dtype],
            source.numel(),
            inner,
            stride,
            factor,
            softplus,
        )
    return arguments + bytes(ctypes.sizeof(ConvertedVector) * (VECTORS - len(vectors)))


def launch_swizzle(
    program: LoadedProgram, arguments: bytes, largest: int, memory: torch.Tensor
) -> None:
    """Launch the kernel with the arguments of `serialize_swizzle`.

    Args:
        program: as in `swizzle_weights`.
        arguments: the serialized arguments.
        largest: elements of the largest matrix.
        memory: as in `serialize_swizzle`; its device is the current one.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    kernel = program.kernels["pack_weights"]
    blocks = -(-largest // (_PIECE * kernel.threads))
    stream = torch_private.raw_stream(memory.device.index)
    kernel.launch((blocks, MATRICES + VECTORS), (ctypes.c_char_p * 1)(arguments), stream)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
