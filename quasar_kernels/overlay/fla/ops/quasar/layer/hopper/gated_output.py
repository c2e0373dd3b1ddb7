"""The layer's output in one kernel on Hopper, and the packing of weights for Hopper's products.

gate_and_norm.py and a library product compute the same in two, with the gated norm written and read
again between them; it serves other sizes, dtypes and GPUs. csrc/gated_output.cu is the kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fla.ops.quasar.cuda.program import LoadedProgram, addresses, packer
from fla.ops.quasar.layer.hopper.program import MATRICES, OutputArguments, PackedMatrix

HEADS, HEAD_DIM = 8, 64
"""The layer's heads and their width that the kernel is written for."""
IMAGE_ROWS = 128
"""Outputs are a multiple of this many channels."""
TILE = 64
"""Tokens that a warpgroup takes at once."""

_SOURCE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PIECE = 8  # elements that a thread packs

_pack_matrix = packer(PackedMatrix)
_pack = packer(OutputArguments)


class Packing(NamedTuple):
    """A matrix to pack for Hopper's products; csrc/pack_weights.cu describes the result."""

    weight: torch.Tensor  # [outputs, inputs], multiples of 64, contiguous, fp32, bf16 or fp16
    row_group: int = 8  # outputs are permuted in groups of so many: 8 (not at all), 16 or 32
    input_group: int = 8  # the same of inputs
    factor: float = 1.0  # of every element
    scale: torch.Tensor | None = None  # [64], a factor by input % 64
    fp16: bool = False  # the images are, whatever the others are


def pack_weights(
    program: LoadedProgram, packings: Sequence[Packing], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Pack up to 8 matrices in one launch on the current stream.

    Args:
        program: the kernels for the weights' device, which is the current one, and `dtype`.
        packings: the matrices.
        dtype: bf16 or fp16, which saturates.

    Returns:
        The images of each matrix, flat, in `dtype` or in fp16; they lie one behind the other.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    first = packings[0].weight
    sizes = [p.weight.numel() for p in packings]
    images = first.new_empty(sum(sizes), dtype=dtype).split(sizes)
    packed = b""
    for (weight, row_group, input_group, factor, scale, fp16), to in zip(
        packings, images, strict=True
    ):
        packed += _pack_matrix(
            *addresses(weight, scale, to), _SOURCE_TYPES[weight.dtype],
            0 if scale is None else _SOURCE_TYPES[scale.dtype],
            *weight.shape, row_group, input_group, factor, fp16,
        )  # fmt: skip
    packed += bytes(ctypes.sizeof(PackedMatrix) * (MATRICES - len(packings)))
    kernel = program.kernels["pack_weights"]
    blocks = -(-max(sizes) // (_PIECE * kernel.threads))
    stream = torch._C._cuda_getCurrentRawStream(first.device.index)
    kernel.launch((blocks, len(packings)), (ctypes.c_char_p * 1)(packed), stream)
    return [
        image.view(torch.float16) if packing.fp16 else image
        for packing, image in zip(packings, images, strict=True)
    ]


def output_packings(
    gate_weight: torch.Tensor, norm_weight: torch.Tensor, out_weight: torch.Tensor
) -> tuple[Packing, Packing]:
    """Return how `gated_output` wants its weights packed: the gate's, then the output's.

    Args:
        gate_weight: `[8 * 64, 64]`.
        norm_weight: `[64]`.
        out_weight: `[outputs, 8 * 64]`, outputs a multiple of 128.
    """
    # sigmoid(x) = (1 + tanh(x / 2)) / 2
    return (
        Packing(gate_weight, factor=0.5),
        Packing(out_weight, row_group=32, factor=0.5, scale=norm_weight, fp16=True),
    )


def gated_output(
    program: LoadedProgram,
    o: torch.Tensor,
    narrow: torch.Tensor,
    gate_images: torch.Tensor,
    gate_bias: torch.Tensor,
    out_images: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Return (rmsnorm(o per head) * weight * sigmoid(narrow gate_weight^T + gate_bias)) W^T.

    It records nothing for autograd, and runs on the current stream of o's device, which is the
    current one.

    Args:
        program: the kernels for o's device and dtype.
        o: `[R, 8, 64]` contiguous, bf16 or fp16.
        narrow: `[R, 64]` in o's dtype, last stride 1, rows 16-byte aligned.
        gate_images, out_images: by `pack_weights` of `output_packings`.
        gate_bias: `[8 * 64]`.
        eps: added to the mean square.

    Returns:
        `[R, outputs]` contiguous, in o's dtype. The norm and the gate are computed in fp32 and
        rounded once, to fp16, as the product's operand.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    R, outputs = o.shape[0], out_images.numel() // (HEADS * HEAD_DIM)
    y = o.new_empty(R, outputs)
    if not R:
        return y
    tiles = -(-R // TILE)
    blocks = min(program.multiprocessors // 2, -(-tiles // 4)) * 2  # of two workers, in pairs
    bias = gate_bias.float()
    packed = _pack(
        *addresses(o, narrow, gate_images, out_images, bias, y), R, narrow.stride(0),
        outputs // IMAGE_ROWS, -(-tiles // (2 * blocks)), eps,
    )  # fmt: skip
    stream = torch._C._cuda_getCurrentRawStream(o.device.index)
    program.kernels["gated_output"].launch((blocks, 1), (ctypes.c_char_p * 1)(packed), stream)
    return y


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
