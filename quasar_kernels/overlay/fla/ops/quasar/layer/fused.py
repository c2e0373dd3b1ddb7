"""The layer's stages in fused kernels: one before the operator, one after it.

They take one sequence from its start, of at least `FEWEST_TOKENS` tokens, in fp32 with products in
bf16 or fp16, nothing recorded. When a launch fails, one line is logged, and the kernels take no
call from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fla.ops.quasar.cuda.program import CudaProgram, LoadedProgram
from fla.ops.quasar.layer.call import Activations, Call, Stages, Weights
from fla.ops.quasar.layer.hopper.program import Vector, WeightLayout, swizzle_weights
from fla.ops.quasar.layer.hopper.projection import (
    HEAD_DIM,
    HIDDEN,
    TAPS,
    WIDTH,
    taps_buffer,
    taps_layout,
)
from fla.ops.quasar.scan import ScanInputs, StepSizes
from fla.ops.quasar.switches import Backend

FEWEST_TOKENS = 1 << 9
"""Fewest tokens for which these kernels are faster (measured on an H200)."""

_SHAPES = (  # of `Weights`
    *[(WIDTH, HIDDEN)] * 3,
    (HEAD_DIM, HIDDEN),
    (WIDTH, HEAD_DIM),
    (WIDTH,),
    *[(WIDTH, 1, TAPS)] * 3,
    None,
    None,
    None,
    (WIDTH // HEAD_DIM,),
    (HEAD_DIM,),
    (HIDDEN, WIDTH),
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FusedKernels(NamedTuple):
    """The two kernels around the operator, for one kind of GPU."""

    program: CudaProgram
    backends: tuple[Backend, ...]
    """The values of QUASAR_BACKEND with which they serve."""
    find: Callable[[torch.Tensor, torch.dtype], LoadedProgram | None]
    """Returns the program for x's device and the products' dtype, or None if it is not used."""
    projection_layouts: Callable[..., tuple[WeightLayout, ...]]
    project: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    output_layouts: Callable[..., tuple[WeightLayout, WeightLayout]]
    gated_output: Callable[..., torch.Tensor]

    def stages(self) -> Stages:
        """Return both stages of the layer's pipeline."""
        return Stages(self._run_projection, self._run_output)

    def find_program(self, call: Call, x: torch.Tensor, weights: Weights) -> LoadedProgram | None:
        """Return the program for a call, or None if the kernels do not support it."""
        if call.backend not in self.backends or call.cu_seqlens is not None:
            return None
        return self.find(x, call.dtype) if takes(x, weights) else None

    def _run_projection(
        self, call: Call, x: torch.Tensor, weights: Weights, keep: bool, output: bool
    ) -> Activations | None:
        # `rows` and `products` never exist as a whole
        program = self.find_program(call, x, weights)
        if program is None:
            return None
        attempt = self.program.attempt
        return attempt(call.backend, program, self._launch_projection, x, weights, call.dtype)

    def _launch_projection(
        self, x: torch.Tensor, weights: Weights, dtype: torch.dtype, *, program: LoadedProgram
    ) -> Activations:
        layouts = (
            *self.projection_layouts(weights.q, weights.k, weights.v, weights.narrow),
            *self.output_layouts(weights.wide, weights.norm, weights.out),
        )
        taps, bias = taps_buffer(x), x.new_empty(WIDTH)
        beta = x.new_empty(WIDTH // HEAD_DIM)
        vectors = (
            *taps_layout((weights.q_taps, weights.k_taps, weights.v_taps), taps),
            Vector(weights.wide_bias, bias),
            Vector(weights.beta_log, beta, softplus=True),
        )
        weight_tiles = swizzle_weights(program, layouts, dtype, vectors)
        qkv, narrow = self.project(program, x[0], weight_tiles[0], taps, dtype)
        q, k, v = qkv.view(1, x.shape[1], 3, -1, HEAD_DIM).unbind(2)
        scan = ScanInputs(q, k, v, StepSizes(beta, False))
        return Activations(scan, narrow, (weight_tiles[4], bias, weight_tiles[5]))

    def _run_output(self, call: Call, tensors: Activations) -> torch.Tensor | None:
        program = self.find(tensors.o, tensors.o.dtype)
        if program is None:
            return None
        return self.program.attempt(call.backend, program, self._launch_output, tensors, call.eps)

    def _launch_output(
        self, tensors: Activations, eps: float, *, program: LoadedProgram
    ) -> torch.Tensor:
        return self.gated_output(program, tensors.o, tensors.narrow, *tensors.output_weights, eps)


def takes(x: torch.Tensor, weights: Weights) -> bool:
    """Return whether the kernels are written for x and the weights."""
    if torch.is_grad_enabled() or not x.is_cuda or x.dtype != torch.float32:
        return False
    if x.shape[0] != 1 or x.shape[1] < FEWEST_TOKENS:
        return False
    if not x.is_contiguous() or x.data_ptr() % 16:
        return False
    return all(
        w is None
        if shape is None
        else w is not None and w.shape == shape and _is_plain(w, x.device)
        for w, shape in zip(weights, _SHAPES, strict=True)
    )


def _is_plain(weight: torch.Tensor, device: torch.device) -> bool:
    return weight.is_contiguous() and weight.dtype in _DTYPES and weight.device == device


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
