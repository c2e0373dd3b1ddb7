"""The layer's stages in fused kernels: one before the operator, one after it.

They compute whole sequences without a cached state and without autograd, with products in bf16 or
fp16. The first kernel reads one sequence in fp32: a 16-bit input is converted to fp32, and several
sequences are passed as one (first_tokens.py). If a launch fails, one line is logged, and the
kernels are not used again in this process.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fla.ops.quasar.cuda.program import CudaProgram, LoadedProgram, addresses
from fla.ops.quasar.layer.call import Activations, Call, Stages, Weights
from fla.ops.quasar.layer.first_tokens import replace_first_tokens
from fla.ops.quasar.layer.weight_tiles import (
    HEAD_DIM,
    HIDDEN,
    TAPS,
    WIDTH,
    Vector,
    WeightLayout,
    launch_swizzle,
    serialize_swizzle,
    taps_layout,
)
from fla.ops.quasar.scan import ScanInputs, StepSizes
from fla.ops.quasar.switches import Backend

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
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_dtype, _shape = operator.attrgetter("dtype"), operator.attrgetter("shape")

_serialized: dict[tuple[object, ...], bytes] = {}
"""Arguments of the launches that convert the weights, by kernels, addresses and dtypes: to
serialize them again would take a sixth of a call's time on the host."""
_MOST_SERIALIZED = 256


class FusedKernels(NamedTuple):
    """The two kernels around the operator, for one kind of GPU."""

    program: CudaProgram
    backends: tuple[Backend, ...]
    """The values of QUASAR_BACKEND with which the kernels are used."""
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
        if call.backend not in self.backends or not takes(call, x, weights):
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
        count, bounds = sequences_of(call, x), call.cu_seqlens
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
    if x.shape[0] * x.shape[1] < FEWEST_TOKENS * max(1, sequences_of(call, x)):
        return False
    present = [w for w in weights if w is not None]
    return (
        tuple(map(_shape, present)) == _SHAPES
        and _DTYPES.issuperset(map(_dtype, present))
        and all(map(torch.Tensor.is_contiguous, present))
        and set(map(torch.Tensor.get_device, present)) == {x.get_device()}
    )


def sequences_of(call: Call, x: torch.Tensor) -> int:
    """Return the number of sequences of a call."""
    return x.shape[0] if call.cu_seqlens is None else len(call.cu_seqlens) - 1


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
