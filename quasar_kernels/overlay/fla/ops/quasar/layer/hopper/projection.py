"""The layer's projections, convolution and SiLU in one kernel on Hopper, csrc/projection.cu.

Separate kernels read and write the projections three times: eight gigabytes for a million tokens.
wide_projection.py has a kernel for other widths.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from fla.ops.quasar import torch_private
from fla.ops.quasar.cuda.program import LoadedProgram, addresses, serializer
from fla.ops.quasar.layer.hopper.program import ProjectionArguments, Vector, WeightLayout

HIDDEN, WIDTH, HEAD_DIM, TAPS = 512, 512, 64, 4
"""The kernel's sizes: inputs, channels of q, of k and of v, of the narrow gate, and taps."""

_BEFORE = TAPS - 1  # rows by which runs overlap: those that the convolution needs before a run
_CONSUMERS = 2  # consumer warpgroups of a block, which alternate between the tiles of its run
_TILE = 64  # tokens of a tile
_PRODUCTS = 13  # one for each 128 channels of q, k and v, and one for the narrow gate
_LOAD = 3  # loading a tile takes as long as this many of its products

_serialize = serializer(ProjectionArguments)


def projection_layouts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, narrow: torch.Tensor
) -> tuple[WeightLayout, ...]:
    """Return the layouts of `project`'s weights, in order.

    Args:
        q, k, v: `[512, 512]`.
        narrow: `[64, 512]`.
    """
    wide = (WeightLayout(weight, input_group=16) for weight in (q, k, v))
    return (*wide, WeightLayout(narrow, row_group=32, input_group=16))


def taps_buffer(weight: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor for `project`'s taps of q, k and v, `[4, 1536]` in fp32."""
    return weight.new_empty(TAPS, 3 * WIDTH, dtype=torch.float32)


def taps_layout(weights: tuple[torch.Tensor, ...], taps: torch.Tensor) -> list[Vector]:
    """Return the conversion of q's, k's and v's convolution weights, `[512, 1, 4]`, to `taps`.

    Taps are half of the weights, because silu(x) = h + h tanh(h) with h = x / 2.
    """
    return [
        Vector(weight, to, factor=0.5, inner=TAPS, stride=3 * WIDTH)
        for weight, to in zip(weights, taps.view(TAPS, 3, WIDTH).unbind(1), strict=True)
    ]


def _steps(tokens: int, runs: int) -> int:
    return max(1, -(-(-(-(tokens - _BEFORE) // runs) + _BEFORE) // (_CONSUMERS * _TILE)))


@functools.lru_cache(1024)
def _grid(tokens: int, multiprocessors: int) -> tuple[int, int, int, int]:
    """Return blocks of a grid row, grid rows, tiles of each consumer, and the consumers' lag.

    Each grid row loads all tokens and computes its share of the products. The repeated loads take
    less time than idle multiprocessors or a last round of few tiles. The lag is the number of
    products by which a block's second consumer starts later: half of a tile's products, so that the
    consumers load at different times.
    """

    def blocks(rows: int) -> int:
        return multiprocessors // rows // 2 * 2  # clusters are pairs of blocks

    def cost(rows: int) -> int:
        return _steps(tokens, blocks(rows)) * (-(-_PRODUCTS // rows) + _LOAD)

    rows = min((rows for rows in range(1, _PRODUCTS + 1) if blocks(rows)), key=cost)
    steps = _steps(tokens, blocks(rows))
    runs = -(-max(tokens - _BEFORE, 1) // (_CONSUMERS * _TILE * steps - _BEFORE))
    lag = _PRODUCTS // rows // 2 if steps > 1 else 0
    return 2 * -(-runs // 2), rows, steps, lag


def project(
    program: LoadedProgram,
    x: torch.Tensor,
    weight_tiles: torch.Tensor,
    taps: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return silu(causal convolution(x W^T)) for q, k and v, and x W^T for the narrow gate.

    It records nothing for autograd and runs on the current stream. x's device must be the current
    device.

    Args:
        program: the kernels for x's device and `dtype`.
        x: `[T, 512]` fp32 contiguous, 16-byte aligned; T tokens of one sequence, from its start.
        weight_tiles: the tiles of q, from `swizzle_weights(projection_layouts(...), dtype)`; the
            others follow in memory.
        taps: `[4, 1536]` fp32, by `taps_layout`.
        dtype: bf16 or fp16; x is rounded to it. For both, products and taps are rounded
            to fp16 and saturate at 65504, and the convolution's sums are fp16.

    Returns:
        q, k and v concatenated, `[T, 1536]`, and the narrow gate, `[T, 64]`, both in `dtype`. SiLU
        is computed in fp32.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    T = x.shape[0]
    qkv = x.new_empty(T, 3 * WIDTH, dtype=dtype)
    narrow = x.new_empty(T, HEAD_DIM, dtype=dtype)
    if T:
        blocks, rows, steps, lag = _grid(T, program.multiprocessors)
        arguments = _serialize(*addresses(x, taps, weight_tiles, qkv, narrow), T, steps, lag)
        stream = torch_private.raw_stream(x.device.index)
        program.kernels["projection"].launch(
            (blocks, rows), (ctypes.c_char_p * 1)(arguments), stream
        )
    return qkv, narrow


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
