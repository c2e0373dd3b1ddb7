"""The layer on Hopper: two fused kernels, one before the operator and one after it.

csrc/hopper/projection.cu computes the projections, the convolution and SiLU. Separate kernels would
write, read and rewrite the products: nine gigabytes for a million tokens. gated_output.cu computes
the gated norm and the output's product. Both kernels use clusters, bulk copies and wgmma, which
only compute capability 9.0 has. Where they cannot run, paths.py chooses other kernels.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from fla.ops.quasar.cuda import nvrtc
from fla.ops.quasar.cuda.program import (
    DTYPES,
    FLOAT,
    INT,
    INT64,
    POINTER,
    CudaProgram,
    LoadedProgram,
    Variant,
    fields,
    serializer,
)
from fla.ops.quasar.layer.call import Call, Projected, Weights
from fla.ops.quasar.layer.first_tokens import replace_first_tokens
from fla.ops.quasar.layer.weight_tiles import (
    CSRC,
    HEAD_DIM,
    HIDDEN,
    PACK_WEIGHTS,
    TAPS,
    WIDTH,
    PackArguments,
    fused_layouts,
    pack,
)

TILE = 64
"""Tokens of a consumer warpgroup's tile."""
WEIGHT_TILE_ROWS = 128
"""Channels of a weight tile; the output's channels are a multiple of it."""
GROUP = 8
"""`group` of `projection_layouts` and `output_layouts` in weight_tiles.py."""

_address = torch.Tensor.data_ptr
_BEFORE = TAPS - 1  # tokens that the convolution needs before a block's, so blocks overlap
_CONSUMERS = 2  # consumer warpgroups of a block; in the projection each takes every other tile
_PRODUCTS = 13  # one for each 128 channels of q, k and v, and one for `narrow`
_LOAD = 3  # loading a tile takes as long as this many of its products
_NORM = 2  # a tile's gate and norms take as long as its products with this many weight tiles


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


PROGRAM = CudaProgram(
    "hopper_products",
    [PACK_WEIGHTS, CSRC / "hopper" / "projection.cu", CSRC / "hopper" / "gated_output.cu"],
    {
        "pack_weights_{}": PackArguments,
        "projection_{}": ProjectionArguments,
        "gated_output_{}": OutputArguments,
    },
    "the layer's fused products are not used: %s",
)


@functools.cache
def _has_hopper(device: int) -> bool:
    if torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) == nvrtc.HOPPER


def is_hopper(x: torch.Tensor) -> bool:
    """Return whether x is on a GPU of compute capability 9.0."""
    return x.is_cuda and _has_hopper(x.device.index)


def find_program(x: torch.Tensor, dtype: torch.dtype) -> LoadedProgram | None:
    """Return the kernels for products in `dtype` on x's device, or None if they are not used.

    Only Hopper GPUs use them. If they cannot be compiled, one line is logged with the cause and the
    remedy.
    """
    if dtype not in DTYPES or not x.is_cuda or not _has_hopper(x.device.index):
        return None
    return PROGRAM.find_loaded(Variant(x.device.index, dtype))


_serialize_projection = serializer(ProjectionArguments)
_serialize_output = serializer(OutputArguments)


def _steps(tokens: int, runs: int) -> int:
    return max(1, -(-(-(-(tokens - _BEFORE) // runs) + _BEFORE) // (_CONSUMERS * TILE)))


@functools.lru_cache(1024)
def projection_grid(tokens: int, multiprocessors: int) -> tuple[int, int, int, int]:
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
    runs = -(-max(tokens - _BEFORE, 1) // (_CONSUMERS * TILE * steps - _BEFORE))
    lag = _PRODUCTS // rows // 2 if steps > 1 else 0
    return 2 * -(-runs // 2), rows, steps, lag


def launch_projection(
    program: LoadedProgram,
    x: torch.Tensor,
    weight_tiles: torch.Tensor,
    taps: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return silu(causal convolution(x W^T)) for q, k and v, and x W^T for the gate.

    It records nothing for autograd and runs on the current stream. x's device must be the current
    device.

    Args:
        program: the kernels for x's device and `dtype`.
        x: `[T, 512]` fp32 contiguous, 16-byte aligned; T tokens of one sequence, from its start.
        weight_tiles: the tiles of q by `projection_layouts`, in `dtype`; those of k, v and
            `gate_down` follow in memory.
        taps: `[4, 1536]` fp32, by `taps_layout`.
        dtype: bf16 or fp16; x is rounded to it. For both, products and taps are rounded
            to fp16 and saturate at 65504, and the convolution's sums are fp16.

    Returns:
        q, k and v concatenated, `[T, 1536]`, and `narrow`, `[T, 64]`, both in
        `dtype`. SiLU is computed in fp32.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    T = x.shape[0]
    qkv = x.new_empty(T, 3 * WIDTH, dtype=dtype)
    narrow = x.new_empty(T, HEAD_DIM, dtype=dtype)
    if T:
        blocks, rows, steps, lag = projection_grid(T, program.multiprocessors)
        arguments = _serialize_projection(
            *map(_address, (x, taps, weight_tiles, qkv, narrow)), T, steps, lag
        )
        program.kernels["projection"].launch((blocks, rows), arguments)
    return qkv, narrow


@functools.lru_cache(1024)
def output_grid(tiles: int, weight_tiles: int, multiprocessors: int) -> tuple[int, int, int]:
    """Return the blocks per grid row, the grid's rows, and each consumer's tiles of 64 tokens.

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


def launch_output(
    program: LoadedProgram,
    o: torch.Tensor,
    narrow: torch.Tensor,
    gate_weights: torch.Tensor,
    gate_bias: torch.Tensor,
    out_weights: torch.Tensor,
    eps: float,
    shape: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Return (rmsnorm(o) * norm_weight * sigmoid(narrow gate_weight^T + gate_bias)) out_weight^T.

    It records nothing for autograd and runs on the current stream. o's device must be the current
    device.

    Args:
        program: the kernels for o's device and dtype.
        o: `[R, 8, 64]` contiguous, bf16 or fp16.
        narrow: `[R, 64]` in o's dtype, last stride 1, rows 16-byte aligned.
        gate_weights, out_weights: weight tiles by `output_layouts`; they contain norm_weight.
        gate_bias: `[8 * 64]` fp32 contiguous.
        eps: added to the mean square.
        shape: the result's shape; None is `[R, outputs]`.

    Returns:
        `[R, outputs]` contiguous, in o's dtype. The norm and the gate are computed in fp32 and
        rounded once, to fp16, as the product's operand.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    R, outputs = o.shape[0], out_weights.numel() // WIDTH
    y = o.new_empty((R, outputs) if shape is None else shape)
    if not R:
        return y
    tiles, weight_tiles = -(-R // TILE), outputs // WEIGHT_TILE_ROWS
    blocks, rows, steps = output_grid(tiles, weight_tiles, program.multiprocessors)
    arguments = _serialize_output(
        *map(_address, (o, narrow, gate_weights, out_weights, gate_bias, y)),
        *(R, narrow.stride(0), weight_tiles, weight_tiles // rows, steps, eps),
    )
    program.kernels["gated_output"].launch((blocks, rows), arguments)
    return y


layouts = functools.partial(fused_layouts, GROUP)
"""Returns the layouts of all weights, for `pack`."""


def project(
    program: LoadedProgram,
    call: Call,
    x: torch.Tensor,
    weights: Weights,
    save: bool,
    save_products: bool,
) -> Projected:
    """Compute everything before the operator; arguments as those of `library.project`.

    `save` and `save_products` have no effect: the kernel does not write the products.

    Raises:
        CudaUnavailableError: the driver refused a launch.
    """
    rows = x.view(-1, HIDDEN).float()
    packed = pack(program, layouts, weights, rows, call.dtype)
    qkv, narrow = launch_projection(program, rows, packed.projections, packed.taps, call.dtype)
    if x.shape[0] > 1 or call.cu_seqlens is not None:
        replace_first_tokens(rows, weights, call.cu_seqlens, call.sequences(x), qkv)
    return Projected(qkv, packed.beta, narrow, (packed.gate, packed.bias, packed.out))


def output(
    program: LoadedProgram, call: Call, o: torch.Tensor, p: Projected, shape: tuple[int, ...]
) -> torch.Tensor:
    """Compute y of this shape from o `[R, H, S]` and the results of `project`.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    gate, bias, out = p.output_weights
    return launch_output(program, o, p.narrow, gate, bias, out, call.eps, shape)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
