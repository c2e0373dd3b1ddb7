"""The weights of the fused products: swizzled weight tiles, and smaller parameters in fp32.

One launch of hopper/csrc/pack_weights.cu converts all weights of a call. Every program with fused
products contains this kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fla.ops.quasar import torch_private
from fla.ops.quasar.cuda.program import (
    FLOAT,
    INT,
    POINTER,
    LoadedProgram,
    addresses,
    fields,
    serializer,
)

HIDDEN, WIDTH, HEAD_DIM, TAPS = 512, 512, 64, 4
"""The fused products' sizes: inputs, channels of q, of k and of v, of the narrow gate, and taps."""
PACK_WEIGHTS = Path(__file__).parent / "hopper" / "csrc" / "pack_weights.cu"
"""The kernel's source."""
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
        program: the kernels for the memory's device and dtype; conversion to fp16 saturates.
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


def taps_layout(weights: tuple[torch.Tensor, ...], taps: torch.Tensor) -> list[Vector]:
    """Return the conversion of q's, k's and v's convolution weights, `[512, 1, 4]`, to `taps`.

    Taps are half of the weights, because silu(x) = h + h tanh(h) with h = x / 2.
    """
    return [
        Vector(weight, to, factor=0.5, inner=TAPS, stride=3 * WIDTH)
        for weight, to in zip(weights, taps.view(TAPS, 3, WIDTH).unbind(1), strict=True)
    ]


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
