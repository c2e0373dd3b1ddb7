"""The layer's parameters as swizzled weight tiles for its Hopper kernels, in one launch.

csrc/pack_weights.cu is the kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fla.ops.quasar.cuda.program import LoadedProgram, addresses, serializer
from fla.ops.quasar.layer.hopper.program import MATRICES, VECTORS, SwizzledMatrix, ConvertedVector

_SOURCE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PIECE = 8  # elements that a thread converts

_serialize_matrix, _serialize_vector = serializer(SwizzledMatrix), serializer(ConvertedVector)


class WeightLayout(NamedTuple):
    """A matrix and its layout as weight tiles; csrc/pack_weights.cu describes the result."""

    weight: torch.Tensor  # [outputs, inputs], multiples of 64, contiguous, fp32, bf16 or fp16
    row_group: int = 8  # outputs are permuted in groups of so many: 8 (not at all), 16 or 32
    input_group: int = 8  # the same of inputs
    factor: float = 1.0  # of every element
    scale: torch.Tensor | None = None  # [64], a factor by input % 64
    fp16: bool = False  # the tiles' dtype, whatever the others have


class Vector(NamedTuple):
    """A smaller parameter to convert to fp32, times `factor`."""

    source: torch.Tensor  # contiguous, fp32, bf16 or fp16
    to: torch.Tensor  # fp32; element i goes to place i % inner * stride + i // inner from its start
    factor: float = 1.0
    inner: int = 1
    stride: int = 0
    softplus: bool = False  # log(1 + exp(x)) in place of x


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
        dtype: bf16 or fp16, which saturates.
        vectors: the smaller parameters.

    Returns:
        The weight tiles of each matrix, flat, in `dtype` or in fp16; they are contiguous.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    first = layouts[0].weight
    sizes = [p.weight.numel() for p in layouts]
    weight_tiles = first.new_empty(sum(sizes), dtype=dtype).split(sizes)
    arguments = b""
    for (weight, row_group, input_group, factor, scale, fp16), to in zip(
        layouts, weight_tiles, strict=True
    ):
        arguments += _serialize_matrix(
            *addresses(weight, scale, to),
            _SOURCE_TYPES[weight.dtype],
            0 if scale is None else _SOURCE_TYPES[scale.dtype],
            *weight.shape,
            row_group,
            input_group,
            factor,
            fp16,
        )
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
    arguments += bytes(ctypes.sizeof(ConvertedVector) * (VECTORS - len(vectors)))
    kernel = program.kernels["pack_weights"]
    blocks = -(-max(sizes) // (_PIECE * kernel.threads))
    stream = torch._C._cuda_getCurrentRawStream(first.device.index)
    kernel.launch((blocks, MATRICES + VECTORS), (ctypes.c_char_p * 1)(arguments), stream)
    return [
        tiles.view(torch.float16) if layout.fp16 else tiles
        for layout, tiles in zip(layouts, weight_tiles, strict=True)
    ]


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
