"""The layer's stages on Hopper: one kernel before the operator, one after it.

They take one sequence from its start, of at least `FEWEST_TOKENS` tokens, in fp32 with products in
bf16 or fp16, nothing recorded, on a GPU of compute capability 9.0. When a launch fails, one line is
logged, and they take no call from then on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fla.ops.quasar.cuda.program import LoadedProgram
from fla.ops.quasar.layer.call import Activations, Call, Stages, Weights
from fla.ops.quasar.layer.hopper.gated_output import gated_output, output_layouts
from fla.ops.quasar.layer.hopper.program import (
    PROGRAM,
    Vector,
    WeightLayout,
    hopper_program,
    swizzle_weights,
)
from fla.ops.quasar.layer.hopper.projection import (
    HEAD_DIM,
    HIDDEN,
    TAPS,
    WIDTH,
    project,
    projection_layouts,
    taps_buffer,
    taps_layout,
)
from fla.ops.quasar.scan import ScanInputs, StepSizes

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


def takes(x: torch.Tensor, weights: Weights) -> bool:
    """Return whether the fused kernels are written for x and the weights."""
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


def find_program(call: Call, x: torch.Tensor, weights: Weights) -> LoadedProgram | None:
    """Return the kernels for a call, or None if they do not support it."""
    if call.cu_seqlens is not None or not takes(x, weights):
        return None
    return hopper_program(x, call.dtype, call.backend)


def _project(
    call: Call, x: torch.Tensor, weights: Weights, keep: bool, output: bool
) -> Activations | None:
    # `rows` and `products` never exist as a whole
    program = find_program(call, x, weights)
    if program is None:
        return None
    return PROGRAM.attempt(call.backend, program, _launch_projection, x, weights, call.dtype)


def _launch_projection(
    x: torch.Tensor, weights: Weights, dtype: torch.dtype, *, program: LoadedProgram
) -> Activations:
    layouts = (
        *projection_layouts(weights.q, weights.k, weights.v, weights.narrow),
        *output_layouts(weights.wide, weights.norm, weights.out),
    )
    return project_with(program, layouts, project, x, weights, dtype)


def project_with(
    program: LoadedProgram,
    layouts: tuple[WeightLayout, ...],
    kernel: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    x: torch.Tensor,
    weights: Weights,
    dtype: torch.dtype,
) -> Activations:
    """Return everything before the operator, by `kernel`, which has the arguments of `project`.

    `layouts` are those of q, k, v, the gate's narrow and wide half and the output, in order.
    """
    taps, bias = taps_buffer(x), x.new_empty(WIDTH)
    beta = x.new_empty(WIDTH // HEAD_DIM)
    vectors = (
        *taps_layout((weights.q_taps, weights.k_taps, weights.v_taps), taps),
        Vector(weights.wide_bias, bias),
        Vector(weights.beta_log, beta, softplus=True),
    )
    weight_tiles = swizzle_weights(program, layouts, dtype, vectors)
    qkv, narrow = kernel(program, x[0], weight_tiles[0], taps, dtype)
    q, k, v = qkv.view(1, x.shape[1], 3, -1, HEAD_DIM).unbind(2)
    scan = ScanInputs(q, k, v, StepSizes(beta, False))
    return Activations(scan, narrow, (weight_tiles[4], bias, weight_tiles[5]))


def _output(call: Call, tensors: Activations) -> torch.Tensor | None:
    program = hopper_program(tensors.o, tensors.o.dtype, call.backend)
    if program is None:
        return None
    return PROGRAM.attempt(call.backend, program, _launch_output, tensors, call.eps)


def _launch_output(tensors: Activations, eps: float, *, program: LoadedProgram) -> torch.Tensor:
    return gated_output(program, tensors.o, tensors.narrow, *tensors.output_weights, eps)


HOPPER = Stages(_project, _output)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
