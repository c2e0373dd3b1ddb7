"""The layer's stages in fused kernels: one before the operator, one after it.

They compute whole sequences without a cached state and without autograd, with products in bf16 or
fp16. The first kernel reads one sequence in fp32: a 16-bit input is converted to fp32, and several
sequences are passed as one (first_tokens.py). If a launch fails, one line is logged, and the
kernels are not used again in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fla.ops.quasar.cuda.program import CudaProgram, LoadedProgram
from fla.ops.quasar.layer.call import Activations, Call, Stages, Weights
from fla.ops.quasar.layer.first_tokens import replace_first_tokens
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
"""Least tokens of a sequence, on average, with which these kernels are faster (on an H200)."""

_SHAPES = (  # the shapes of `Weights`, in its order
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
    """The values of QUASAR_BACKEND with which the kernels are used."""
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
        if call.backend not in self.backends or not takes(call, x, weights):
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
        layouts = (
            *self.projection_layouts(weights.q, weights.k, weights.v, weights.narrow),
            *self.output_layouts(weights.wide, weights.norm, weights.out),
        )
        B, T, _ = x.shape
        rows = x.view(B * T, HIDDEN).float()
        taps, bias = taps_buffer(rows), rows.new_empty(WIDTH)
        beta = rows.new_empty(WIDTH // HEAD_DIM)
        vectors = (
            *taps_layout((weights.q_taps, weights.k_taps, weights.v_taps), taps),
            Vector(weights.wide_bias, bias),
            Vector(weights.beta_log, beta, softplus=True),
        )
        weight_tiles = swizzle_weights(program, layouts, call.dtype, vectors)
        qkv, narrow = self.project(program, rows, weight_tiles[0], taps, call.dtype)
        count, bounds = sequences_of(call, x), call.cu_seqlens
        if count > 1:
            bounds = None if bounds is None else bounds.to(x.device)
            replace_first_tokens(rows, weights, bounds, count, qkv)
        q, k, v = qkv.view(B, T, 3, -1, HEAD_DIM).unbind(2)
        scan = ScanInputs(q, k, v, StepSizes(beta, False), cu_seqlens=call.cu_seqlens)
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


def takes(call: Call, x: torch.Tensor, weights: Weights) -> bool:
    """Return whether the kernels support a call and are faster than the other stages."""
    if torch.is_grad_enabled() or not x.is_cuda or x.dtype not in _DTYPES:
        return False
    if not x.is_contiguous() or x.data_ptr() % 16:
        return False
    if x.shape[0] * x.shape[1] < FEWEST_TOKENS * max(1, sequences_of(call, x)):
        return False
    return all(
        w is None
        if shape is None
        else w is not None and w.shape == shape and _is_plain(w, x.device)
        for w, shape in zip(weights, _SHAPES, strict=True)
    )


def sequences_of(call: Call, x: torch.Tensor) -> int:
    """Return the number of sequences of a call."""
    return x.shape[0] if call.cu_seqlens is None else len(call.cu_seqlens) - 1


def _is_plain(weight: torch.Tensor, device: torch.device) -> bool:
    return weight.is_contiguous() and weight.dtype in _DTYPES and weight.device == device


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
