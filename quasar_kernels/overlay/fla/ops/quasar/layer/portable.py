"""The layer's fused products on GPUs without Hopper's instructions: their program and launches.

csrc/portable has the kernels, resident_projection.cu and resident_output.cu, and their common code,
resident_tokens.cuh. They need 99 KB of shared memory per block and compute capability 8.0.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from fla.ops.quasar.cuda.program import (
    CAPABILITY,
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

TOKENS = 128
"""Tokens that a block holds at a time."""
CHANNELS = 64
"""Output channels that a group of warps computes in one product."""
GROUP = 32
"""`group` of `projection_layouts` and `output_layouts` in weight_tiles.py."""

_GROUP_THREADS = 128  # of a group of warps
_PRODUCTS = 3 * WIDTH // CHANNELS + 1  # of q, k and v, and of `narrow`
_LOAD = 2  # loading a tile takes as long as this many of its products
_NORM = 2  # a tile's gate and norms take as long as this many of its products
_BEFORE = TAPS - 1  # tokens that the convolution needs before a block's first one


class ProjectionArguments(ctypes.Structure):
    """`quasar::layer::ProjectionArguments` of resident_projection.cu."""

    _fields_ = [
        *fields(POINTER, "x taps weight_tiles qkv narrow carried"),
        *fields(INT64, "T"),
        *fields(INT, "steps"),
    ]


class OutputArguments(ctypes.Structure):
    """`quasar::layer::OutputArguments` of resident_output.cu."""

    _fields_ = [
        *fields(POINTER, "o narrow gate_weights out_weights bias y"),
        *fields(INT64, "T narrow_stride"),
        *fields(INT, "channels steps"),
        *fields(FLOAT, "eps"),
    ]


_CSRC = CSRC / "portable"
PROGRAM = CudaProgram(
    "portable_products",
    [PACK_WEIGHTS, _CSRC / "resident_projection.cu", _CSRC / "resident_output.cu"],
    {
        "pack_weights_{}": PackArguments,
        "resident_projection_{}": ProjectionArguments,
        "resident_output_{}": OutputArguments,
    },
    "the layer's fused products are not used: %s",
)
_serialize_projection = serializer(ProjectionArguments)
_serialize_output = serializer(OutputArguments)


@functools.cache
def _is_capable(device: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= CAPABILITY


def find_program(x: torch.Tensor, dtype: torch.dtype) -> LoadedProgram | None:
    """Return the kernels for products in `dtype` on x's device, or None if they are not used.

    They are not used on GPUs before compute capability 8.0. If they cannot be compiled, they are
    not used either, and one line is logged with the cause and the remedy.
    """
    if not x.is_cuda or dtype not in DTYPES or not _is_capable(x.device.index):
        return None
    return PROGRAM.find_loaded(Variant(x.device.index, dtype))


def _steps(tokens: int, runs: int) -> int:
    # the runs of tokens of two blocks overlap
    return max(1, -(-(-(-(tokens - _BEFORE) // runs) + _BEFORE) // TOKENS))


@functools.lru_cache(1024)
def projection_grid(tokens: int, most: int, groups: int) -> tuple[int, int, int]:
    """Return the blocks per grid row, the grid's rows, and the tiles per block.

    At most `most` blocks run at once. The warps of a block form `groups` groups, which divide its
    products among them. Each row of the grid loads all tokens and computes its share of the
    products. The repeated loads cost less than idle multiprocessors or a last round of few tiles.
    """

    def cost(rows: int) -> int:
        products = -(-_PRODUCTS // (rows * groups))
        return _steps(tokens, most // rows) * (products + _LOAD)

    rows = min(range(1, min(_PRODUCTS, most) + 1), key=cost)
    steps = _steps(tokens, most // rows)
    return -(-max(tokens - _BEFORE, 1) // (TOKENS * steps - _BEFORE)), rows, steps


@functools.lru_cache(1024)
def output_grid(tokens: int, products: int, most: int, groups: int) -> tuple[int, int, int]:
    """Return the blocks per grid row, the grid's rows, and the tiles per block.

    `most` and `groups` are as in `projection_grid`. Each row of the grid normalizes all tokens and
    computes its share of the products of 64 outputs.
    """
    tiles = -(-tokens // TOKENS)

    def steps(rows: int) -> int:
        return -(-tiles // (most // rows))

    def cost(rows: int) -> int:
        return steps(rows) * (-(-products // (rows * groups)) + _NORM)

    rows = min(range(1, min(products, most) + 1), key=cost)
    return -(-tiles // steps(rows)), rows, steps(rows)


def launch_projection(
    program: LoadedProgram,
    x: torch.Tensor,
    weight_tiles: torch.Tensor,
    taps: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same as `hopper.launch_projection`, from weight tiles with this module's GROUP.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    T = x.shape[0]
    qkv = x.new_empty(T, 3 * WIDTH, dtype=dtype)
    narrow = x.new_empty(T, HEAD_DIM, dtype=dtype)
    if T:
        blocks, rows, steps = projection_grid(T, *_slots(program, "resident_projection"))
        carried = x.new_empty(blocks * _BEFORE * 3 * WIDTH, dtype=dtype) if steps > 1 else None
        tensors = addresses(x, taps, weight_tiles, qkv, narrow, carried)
        arguments = _serialize_projection(*tensors, T, steps)
        program.kernels["resident_projection"].launch((blocks, rows), arguments)
    return qkv, narrow


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
    """Compute the same as `hopper.launch_output`, from weight tiles with this module's GROUP.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    R, outputs = o.shape[0], out_weights.numel() // HIDDEN
    y = o.new_empty((R, outputs) if shape is None else shape)
    if R:
        blocks, rows, steps = output_grid(
            R, outputs // CHANNELS, *_slots(program, "resident_output")
        )
        tensors = addresses(o, narrow, gate_weights, out_weights, gate_bias, y)
        arguments = _serialize_output(
            *tensors, R, narrow.stride(0), outputs // CHANNELS, steps, eps
        )
        program.kernels["resident_output"].launch((blocks, rows), arguments)
    return y


def _slots(program: LoadedProgram, name: str) -> tuple[int, int]:
    """Return how many blocks of a kernel run at once, and a block's groups of warps."""
    kernel = program.kernels[name]
    return program.multiprocessors * kernel.blocks, kernel.threads // _GROUP_THREADS


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
    """Compute everything before the operator, as `hopper.project`.

    Raises:
        CudaUnavailableError: the driver refused a launch.
    """
    rows = x.view(-1, HIDDEN).float()
    packed = pack(program, layouts, weights, rows, call.dtype)
    qkv, narrow = launch_projection(program, rows, packed.projections, packed.taps, call.dtype)
    if (count := call.sequences(x)) > 1:
        replace_first_tokens(rows, weights, call.cu_seqlens, count, qkv)
    return Projected(qkv, packed.beta, narrow, (packed.gate, packed.bias, packed.out))


def output(
    program: LoadedProgram, call: Call, o: torch.Tensor, p: Projected, shape: tuple[int, ...]
) -> torch.Tensor:
    """Compute y, as `hopper.output`.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    gate, bias, out = p.output_weights
    return launch_output(program, o, p.narrow, gate, bias, out, call.eps, shape)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
