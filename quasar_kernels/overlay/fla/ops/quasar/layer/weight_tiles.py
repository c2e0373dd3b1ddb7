"""The host side of csrc/pack_weights.cu, which converts all weights of a call in one launch.

It writes matrices as swizzled weight tiles and smaller parameters as fp32, for the fused kernels of
hopper.py and portable.py. Those kernels compute whole sequences without a cached state, for layers
of one size. Autograd cannot record them, but `LayerFunction` calls them.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from itertools import compress, repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fla.ops.quasar.cuda.program import (
    FLOAT,
    INT,
    POINTER,
    LoadedProgram,
    addresses,
    fields,
    serializer,
)
from fla.ops.quasar.layer.call import Weights

HIDDEN, WIDTH, HEAD_DIM, TAPS = 512, 512, 64, 4
"""The sizes of a supported layer: inputs; channels of q, of k and of v; channels of a head and of
`gate_down`; taps."""
HEADS = WIDTH // HEAD_DIM
CSRC = Path(__file__).with_name("csrc")
"""The folder of the layer's CUDA sources."""
PACK_WEIGHTS = CSRC / "pack_weights.cu"
"""The source of the kernel that converts the weights."""
MATRICES, VECTORS = 6, 5
"""Maximum number of matrices and of vectors of one launch of pack_weights.cu."""
SOURCE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes of weights, and their numbers in pack_weights.cu."""

_TILES = [(3 * WIDTH + HEAD_DIM) * HIDDEN, WIDTH * HEAD_DIM, HIDDEN * WIDTH]
"""Elements of the weight tiles: of the projections, the gate and the output."""
_VECTORS = [TAPS * 3 * WIDTH, WIDTH, HEADS]
"""Elements of the taps, the gate's bias and beta."""
_PIECE = 8  # elements that a thread converts
_dtype = operator.attrgetter("dtype")

_serialized: dict[tuple[object, ...], bytes] = {}
"""Arguments of the launches that convert the weights, by layouts, addresses and dtypes. Serializing
them at each call would take a sixth of its time on the host."""
_MAX_SERIALIZED = 256


class PackedMatrix(ctypes.Structure):
    """`quasar::layer::PackedMatrix` of pack_weights.cu."""

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


class PackArguments(ctypes.Structure):
    """`quasar::layer::PackArguments` of pack_weights.cu."""

    _fields_ = [("matrices", PackedMatrix * MATRICES), ("vectors", ConvertedVector * VECTORS)]


_serialize_matrix, _serialize_vector = serializer(PackedMatrix), serializer(ConvertedVector)


class WeightLayout(NamedTuple):
    """A matrix and its layout as weight tiles; csrc/pack_weights.cu describes the result."""

    weight: torch.Tensor  # [outputs, inputs], multiples of 64, contiguous, fp32, bf16 or fp16
    row_group: int = 8  # outputs are permuted in groups of this size: 8 (no permutation), 16 or 32
    input_group: int = 8  # the same for inputs
    factor: float = 1.0  # multiplies every element
    scale: torch.Tensor | None = None  # [64], a factor by input % 64
    fp16: bool = False  # whether the tiles are fp16 instead of the program's dtype


class Vector(NamedTuple):
    """A smaller parameter to convert to fp32, times `factor`."""

    source: torch.Tensor  # contiguous, fp32, bf16 or fp16
    to: torch.Tensor  # fp32; element i is written to index i % inner * stride + i // inner
    factor: float = 1.0
    inner: int = 1
    stride: int = 0
    softplus: bool = False  # log(1 + exp(x)) instead of x


class PackedWeights(NamedTuple):
    """A layer's converted weights; the first three are weight tiles, the others fp32."""

    projections: torch.Tensor  # of q, k, v and `gate_down`
    gate: torch.Tensor
    out: torch.Tensor
    taps: torch.Tensor  # [4 * 3 * 512]
    bias: torch.Tensor  # [512], the gate's
    beta: torch.Tensor  # [8], softplus(beta_log)


def present(weights: Weights) -> list[torch.Tensor]:
    """Return the weights that a layer has, without a loop in Python."""
    return [*compress(weights, map(operator.is_not, weights, repeat(None)))]


def pack(
    program: LoadedProgram,
    layouts_of: Callable[[Weights], Sequence[WeightLayout]],
    weights: Weights,
    rows: torch.Tensor,
    dtype: torch.dtype,
) -> PackedWeights:
    """Convert a layer's weights by one launch on the current stream.

    Args:
        program: contains pack_weights.cu for the device of `rows` and `dtype`.
        layouts_of: returns the layouts of the projections, `gate_up` and the output.
        weights: of the sizes above, contiguous, on the device of `rows`.
        rows: an fp32 tensor on the current device.
        dtype: of the weight tiles.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    tiles = rows.new_empty(sum(_TILES), dtype=dtype)
    vectors = rows.new_empty(sum(_VECTORS))
    taps, bias, beta = vectors.split_with_sizes(_VECTORS)
    projections, gate, out = tiles.split_with_sizes(_TILES)
    existing = present(weights)
    pointers = map(torch.Tensor.data_ptr, (tiles, vectors, *existing))
    key = (layouts_of, dtype, *pointers, *map(_dtype, existing))
    arguments = _serialized.get(key)
    if arguments is None:
        convolutions: Any = weights.taps()  # a supported layer has them
        small = (
            *taps_layout(convolutions, taps),
            Vector(weights.gate_bias, bias),
            Vector(weights.beta_log, beta, softplus=True),
        )
        if len(_serialized) >= _MAX_SERIALIZED:
            _serialized.clear()
        arguments = _serialized[key] = serialize(layouts_of(weights), tiles, small)
    launch_pack(program, arguments, out.numel())
    return PackedWeights(projections, gate, out, taps, bias, beta)


def serialize(
    layouts: Sequence[WeightLayout], memory: torch.Tensor, vectors: Sequence[Vector]
) -> bytes:
    """Return pack_weights.cu's arguments; `memory` receives the weight tiles of all matrices."""
    arguments, to = b"", memory.data_ptr()
    for weight, row_group, input_group, factor, scale, fp16 in layouts:
        source, scale_source = addresses(weight, scale)
        arguments += _serialize_matrix(
            *(source, scale_source, to),
            SOURCE_TYPES[weight.dtype],
            0 if scale is None else SOURCE_TYPES[scale.dtype],
            *weight.shape,
            row_group,
            input_group,
            factor,
            fp16,
        )
        to += weight.numel() * memory.itemsize
    arguments += bytes(ctypes.sizeof(PackedMatrix) * (MATRICES - len(layouts)))
    for source, target, factor, inner, stride, softplus in vectors:
        arguments += _serialize_vector(
            *addresses(source, target),
            SOURCE_TYPES[source.dtype],
            source.numel(),
            inner,
            stride,
            factor,
            softplus,
        )
    return arguments + bytes(ctypes.sizeof(ConvertedVector) * (VECTORS - len(vectors)))


def launch_pack(program: LoadedProgram, arguments: bytes, largest: int) -> None:
    """Launch pack_weights.cu on the program's device, the current one.

    Args:
        program: the kernels for the memory's device and dtype; conversion to fp16 saturates.
        arguments: from `serialize`.
        largest: elements of the largest matrix.

    Raises:
        CudaUnavailableError: the driver refused the launch.
    """
    kernel = program.kernels["pack_weights"]
    blocks = -(-largest // (_PIECE * kernel.threads))
    kernel.launch((blocks, MATRICES + VECTORS), arguments)


def projection_layouts(
    group: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate_down: torch.Tensor
) -> tuple[WeightLayout, ...]:
    """Return the layouts of the weights that `launch_projection` reads, in order.

    Args:
        group: rows of q, k and v are permuted in groups of this size.
        q, k, v: `[512, 512]`.
        gate_down: `[64, 512]`.
    """
    large = (WeightLayout(weight, group, 16) for weight in (q, k, v))
    return (*large, WeightLayout(gate_down, 32, 16))


def output_layouts(
    group: int, gate_weight: torch.Tensor, norm_weight: torch.Tensor, out_weight: torch.Tensor
) -> tuple[WeightLayout, WeightLayout]:
    """Return the layouts of the weights that `launch_output` reads: the gate's, then the output's.

    Args:
        group: inputs of both weights and rows of the gate's are permuted in groups of this size.
        gate_weight: `[8 * 64, 64]`.
        norm_weight: `[64]`.
        out_weight: `[outputs, 8 * 64]`, outputs a multiple of 128.
    """
    # sigmoid(x) = (1 + tanh(x / 2)) / 2
    return (
        WeightLayout(gate_weight, group, group, factor=0.5),
        WeightLayout(out_weight, 32, group, factor=0.5, scale=norm_weight, fp16=True),
    )


def fused_layouts(group: int, weights: Weights) -> tuple[WeightLayout, ...]:
    """Return the layouts of all weights for both stages; `group` is that of these functions."""
    last = weights.gate_up, weights.norm, weights.out
    return *projection_layouts(group, *weights[:4]), *output_layouts(group, *last)


def taps_layout(weights: tuple[torch.Tensor, ...], taps: torch.Tensor) -> list[Vector]:
    """Return the conversion of q's, k's and v's convolution weights, `[512, 1, 4]`, to `taps`.

    Taps are halved, because silu(x) = h + h tanh(h) with h = x / 2.
    """
    return [
        Vector(weight, to, factor=0.5, inner=TAPS, stride=3 * WIDTH)
        for weight, to in zip(weights, taps.view(TAPS, 3, WIDTH).unbind(1), strict=True)
    ]


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
