"""The layer's output in one kernel on Hopper, csrc/gated_output.cu.

gate_and_norm.py and a library product compute the same in two kernels, with the gated norm in
device memory between them.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from fla.ops.quasar import torch_private
from fla.ops.quasar.cuda.program import LoadedProgram, addresses, serializer
from fla.ops.quasar.layer.hopper.program import OutputArguments, WeightLayout

HEADS, HEAD_DIM = 8, 64
"""The layer's heads and their width that the kernel is written for."""
WEIGHT_TILE_ROWS = 128
"""Outputs are a multiple of this many channels."""
TILE = 64
"""Tokens of a consumer warpgroup's tile."""

_CONSUMERS = 2  # warpgroups of a block, each with its own tokens
_NORM = 2  # a tile's gate and norms take as long as its products with this many weight tiles

_serialize = serializer(OutputArguments)


def output_layouts(
    gate_weight: torch.Tensor, norm_weight: torch.Tensor, out_weight: torch.Tensor
) -> tuple[WeightLayout, WeightLayout]:
    """Return the layouts of `gated_output`'s weights: the gate's, then the output's.

    Args:
        gate_weight: `[8 * 64, 64]`.
        norm_weight: `[64]`.
        out_weight: `[outputs, 8 * 64]`, outputs a multiple of 128.
    """
    # sigmoid(x) = (1 + tanh(x / 2)) / 2
    return (
        WeightLayout(gate_weight, factor=0.5),
        WeightLayout(out_weight, row_group=32, factor=0.5, scale=norm_weight, fp16=True),
    )


@functools.lru_cache(1024)
def _grid(tiles: int, weight_tiles: int, multiprocessors: int) -> tuple[int, int, int]:
    """Return the blocks of a row of the grid, its rows, and each consumer's tiles of 64 tokens.

    Each row of the grid normalizes all tokens, and computes its share of the weight tiles of 128
    outputs. The repeated norms cost less than idle multiprocessors or a last round of few tiles.
    """

    def steps(rows: int) -> int:
        return -(-tiles // (_CONSUMERS * 2 * (multiprocessors // rows // 2)))

    fitting = [
        n for n in range(1, weight_tiles + 1) if weight_tiles % n == 0 and multiprocessors // n >= 2
    ]
    rows = min(fitting, key=lambda rows: steps(rows) * (weight_tiles // rows + _NORM))
    # an even number of blocks, because the kernel's clusters are pairs
    return 2 * -(-tiles // (2 * _CONSUMERS * steps(rows))), rows, steps(rows)


def gated_output(
    program: LoadedProgram,
    o: torch.Tensor,
    narrow: torch.Tensor,
    gate_weights: torch.Tensor,
    gate_bias: torch.Tensor,
    out_weights: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Return (rmsnorm(o per head) * weight * sigmoid(narrow gate_weight^T + gate_bias)) W^T.

    It records nothing for autograd and runs on the current stream. o's device must be the current
    device.

    Args:
        program: the kernels for o's device and dtype.
        o: `[R, 8, 64]` contiguous, bf16 or fp16.
        narrow: `[R, 64]` in o's dtype, last stride 1, rows 16-byte aligned.
        gate_weights, out_weights: weight tiles by `swizzle_weights` of `output_layouts`.
        gate_bias: `[8 * 64]` fp32 contiguous.
        eps: added to the mean square.

    Returns:
        `[R, outputs]` contiguous, in o's dtype. The norm and the gate are computed in fp32 and
        rounded once, to fp16, as the product's operand.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    R, outputs = o.shape[0], out_weights.numel() // (HEADS * HEAD_DIM)
    y = o.new_empty(R, outputs)
    if not R:
        return y
    tiles, weight_tiles = -(-R // TILE), outputs // WEIGHT_TILE_ROWS
    blocks, rows, steps = _grid(tiles, weight_tiles, program.multiprocessors)
    arguments = _serialize(
        *addresses(o, narrow, gate_weights, out_weights, gate_bias, y),
        *(R, narrow.stride(0), weight_tiles, weight_tiles // rows, steps, eps),
    )
    stream = torch_private.raw_stream(o.device.index)
    program.kernels["gated_output"].launch((blocks, rows), (ctypes.c_char_p * 1)(arguments), stream)
    return y


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
