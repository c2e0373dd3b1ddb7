"""The layer's stages in fused kernels: one before the operator, one after it, and their weights.

They compute whole sequences without a cached state and without autograd, with products in bf16 or
fp16. The first kernel reads one sequence in fp32: a 16-bit input is converted to fp32, and several
sequences are passed as one (first_tokens.py). If a launch fails, one line is logged, and this
process does not use the kernels again for that device and dtype.

Another kernel, hopper/csrc/pack_weights.cu, converts all weights of a call in one launch: matrices
to swizzled weight tiles, smaller parameters to fp32. Every program of `FusedKernels` contains it.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fla.ops.quasar import torch_private
from fla.ops.quasar.cuda.program import (
    FLOAT,
    INT,
    POINTER,
    CudaProgram,
    LoadedProgram,
    addresses,
    fields,
    serializer,
)
from fla.ops.quasar.layer.call import Activations, Call, Stages, Weights
from fla.ops.quasar.layer.first_tokens import replace_first_tokens
from fla.ops.quasar.scan import ScanInputs, StepSizes

HIDDEN, WIDTH, HEAD_DIM, TAPS = 512, 512, 64, 4
"""The sizes of a supported layer: inputs; channels of q, of k and of v; channels of a head and of
the gate's narrow half; taps."""
PACK_WEIGHTS = Path(__file__).parent / "hopper" / "csrc" / "pack_weights.cu"
"""The source of the kernel that converts the weights."""
MATRICES, VECTORS = 6, 5
"""Most matrices and vectors of one launch of pack_weights.cu."""
FEWEST_TOKENS = 1 << 9
"""Least tokens of a sequence, on average, with which these kernels are faster (on an H200)."""

_HEADS = WIDTH // HEAD_DIM
_SHAPES = (  # of the weights that a supported layer has, in the order of `Weights`
    *[(WIDTH, HIDDEN)] * 3,
    (HEAD_DIM, HIDDEN),
    (WIDTH, HEAD_DIM),
    (WIDTH,),
    *[(WIDTH, 1, TAPS)] * 3,
    (_HEADS,),
    (HEAD_DIM,),
    (HIDDEN, WIDTH),
)
_TILES = [(3 * WIDTH + HEAD_DIM) * HIDDEN, WIDTH * HEAD_DIM, HIDDEN * WIDTH]
"""Elements of the weight tiles: of the projections, the gate and the output."""
_VECTORS = [TAPS * 3 * WIDTH, WIDTH, _HEADS]
"""Elements of the taps, the gate's bias and beta."""
_SOURCE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DTYPES = set(_SOURCE_TYPES)
_PIECE = 8  # elements that a thread converts
_dtype, _shape = operator.attrgetter("dtype"), operator.attrgetter("shape")

_serialized: dict[tuple[object, ...], bytes] = {}
"""Arguments of the launches that convert the weights, by kernels, addresses and dtypes: to
serialize them again would take a sixth of a call's time on the host."""
_MOST_SERIALIZED = 256


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


_serialize_matrix, _serialize_vector = serializer(SwizzledMatrix), serializer(ConvertedVector)


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


class FusedKernels(NamedTuple):
    """The kernels before and after the operator, for one kind of GPU."""

    program: CudaProgram
    find: Callable[[torch.Tensor, torch.dtype], LoadedProgram | None]
    """Returns the program for x's device and the products' dtype, or None if it is not used."""
    projection_layouts: Callable[..., tuple[WeightLayout, ...]]
    project: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    output_layouts: Callable[..., tuple[WeightLayout, WeightLayout]]
    gated_output: Callable[..., torch.Tensor]
    is_preferred: Callable[[Stages, torch.Tensor, torch.dtype], bool] | None = None
    """Whether QUASAR_BACKEND=auto uses the kernels for x and the products' dtype; None: always."""

    def stages(self) -> Stages:
        """Return both stages of the layer's pipeline."""
        return Stages(self._run_projection, self._run_output)

    def find_program(self, call: Call, x: torch.Tensor, weights: Weights) -> LoadedProgram | None:
        """Return the program for a call, or None if the kernels do not support it."""
        if call.backend not in ("auto", "cuda") or not takes(call, x, weights):
            return None
        if call.backend == "auto" and self.is_preferred is not None:
            if not self.is_preferred(self.stages(), x, call.dtype):
                return None
        return self.find(x, call.dtype)

    def _run_projection(
        self, call: Call, x: torch.Tensor, weights: Weights, keep: bool, output: bool
    ) -> Activations | None:
        # `keep` has no effect: these kernels do not write the products before the convolution
        program = self.find_program(call, x, weights)
        if program is None:
            return None
        attempt = self.program.attempt
        return attempt(call.backend, program, self._launch_projection, call, x, weights)

    def _launch_projection(
        self, call: Call, x: torch.Tensor, weights: Weights, *, program: LoadedProgram
    ) -> Activations:
        B, T, _ = x.shape
        rows = x.view(B * T, HIDDEN).float()
        tiles = rows.new_empty(sum(_TILES), dtype=call.dtype)
        vectors = rows.new_empty(sum(_VECTORS))
        taps, bias, beta = vectors.split_with_sizes(_VECTORS)
        projections, gate, out = tiles.split_with_sizes(_TILES)
        arguments = self._weight_arguments(weights, tiles, taps, bias, beta)
        launch_swizzle(program, arguments, out.numel(), tiles)
        qkv, narrow = self.project(program, rows, projections, taps, call.dtype)
        count, bounds = call.sequences(x), call.cu_seqlens
        if count > 1:
            bounds = None if bounds is None else bounds.to(x.device)
            replace_first_tokens(rows, weights, bounds, count, qkv)
        q, k, v = qkv.view(B, T, 3, -1, HEAD_DIM).unbind(2)
        scan = ScanInputs(q, k, v, StepSizes(beta, False), cu_seqlens=call.cu_seqlens)
        return Activations(scan, narrow, (gate, bias, out))

    def _weight_arguments(
        self,
        weights: Weights,
        tiles: torch.Tensor,
        taps: torch.Tensor,
        bias: torch.Tensor,
        beta: torch.Tensor,
    ) -> bytes:
        """Return the arguments of the launch that fills these tensors from the weights."""
        present = [w for w in weights if w is not None]
        key = (
            *(self.program.name, tiles.dtype),
            *addresses(tiles, taps, *present),
            *map(_dtype, present),
        )
        arguments = _serialized.get(key)
        if arguments is None:
            layouts = (
                *self.projection_layouts(weights.q, weights.k, weights.v, weights.narrow),
                *self.output_layouts(weights.wide, weights.norm, weights.out),
            )
            convolutions: Any = weights.taps()  # `takes` has checked that the layer has them
            vectors = (
                *taps_layout(convolutions, taps),
                Vector(weights.wide_bias, bias),
                Vector(weights.beta_log, beta, softplus=True),
            )
            if len(_serialized) >= _MOST_SERIALIZED:
                _serialized.clear()
            arguments = _serialized[key] = serialize_swizzle(layouts, tiles, vectors)
        return arguments

    def _run_output(self, call: Call, tensors: Activations) -> torch.Tensor | None:
        program = self.find(tensors.o, tensors.o.dtype)
        if program is None:
            return None
        return self.program.attempt(call.backend, program, self._launch_output, tensors, call.eps)

    def _launch_output(
        self, tensors: Activations, eps: float, *, program: LoadedProgram
    ) -> torch.Tensor:
        return self.gated_output(program, tensors.o, tensors.narrow, *tensors.output_weights, eps)


def takes(call: Call, x: torch.Tensor, weights: Weights) -> bool:
    """Return whether the kernels support a call and are faster than the other stages."""
    if torch.is_grad_enabled() or not x.is_cuda or x.dtype not in _DTYPES:
        return False
    if not x.is_contiguous() or x.data_ptr() % 16:
        return False
    if x.shape[0] * x.shape[1] < FEWEST_TOKENS * max(1, call.sequences(x)):
        return False
    present = [w for w in weights if w is not None]
    return (
        tuple(map(_shape, present)) == _SHAPES
        and _DTYPES.issuperset(map(_dtype, present))
        and all(map(torch.Tensor.is_contiguous, present))
        and set(map(torch.Tensor.get_device, present)) == {x.get_device()}
    )


def serialize_swizzle(
    layouts: Sequence[WeightLayout], memory: torch.Tensor, vectors: Sequence[Vector]
) -> bytes:
    """Return pack_weights.cu's arguments; `memory` receives the weight tiles of all matrices."""
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
    """Launch pack_weights.cu.

    Args:
        program: the kernels for the memory's device and dtype; conversion to fp16 saturates.
        arguments: from `serialize_swizzle`.
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
