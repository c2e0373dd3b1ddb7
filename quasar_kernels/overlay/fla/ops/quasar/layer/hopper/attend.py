"""The layer on Hopper in three steps: projection, operator, gated output; the outer two fused.

`begin_fused` documents the supported calls.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fla.ops.quasar.chunk import Recorded, recorded_forward
from fla.ops.quasar.cuda.program import LoadedProgram
from fla.ops.quasar.layer.hopper.gated_output import gated_output, output_layouts
from fla.ops.quasar.layer.hopper.weight_tiles import Vector, swizzle_weights
from fla.ops.quasar.layer.hopper.program import PROGRAM, hopper_program
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
from fla.ops.quasar.layer.weights import Weights
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


def _takes(x: torch.Tensor, weights: Weights) -> bool:
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


def fused_program(
    x: torch.Tensor, weights: Weights, dtype: torch.dtype, backend: Backend
) -> LoadedProgram | None:
    """Return the kernels of `attend_fused` for a call, or None if it does not support the call."""
    return hopper_program(x, dtype, backend) if _takes(x, weights) else None


class LayerResults(NamedTuple):
    """The layer's output, and its intermediate results; None for those not requested."""

    y: torch.Tensor | None  # [B, T, hidden]
    rows: torch.Tensor | None = None  # [R, hidden], x in the products' dtype
    products: torch.Tensor | None = None  # [R, 3 H S + S], x W: q, k, v, and the narrow gate
    narrow: torch.Tensor | None = None  # [R, S], the last of them in the products' dtype
    operator: Recorded | None = None


class OutputInputs(NamedTuple):
    """The inputs of `finish_fused`."""

    o: torch.Tensor  # [T, 8, 64]
    narrow: torch.Tensor  # [T, 64]
    gate_weights: torch.Tensor
    gate_bias: torch.Tensor
    out_weights: torch.Tensor


def begin_fused(
    x: torch.Tensor, weights: Weights, dtype: torch.dtype, backend: Backend, *, keep: bool = False
) -> tuple[OutputInputs, Recorded | None] | None:
    """Compute all but the layer's output, or return None for an unsupported call.

    It supports one sequence from its start, of at least `FEWEST_TOKENS` tokens, in fp32 with
    products in bf16 or fp16, nothing recorded, on a GPU of compute capability 9.0. When a launch
    fails, it logs one line and returns None from then on.

    Args:
        x: `[B, T, hidden]`.
        weights: the layer's.
        dtype: of the products.
        backend: QUASAR_BACKEND's value.
        keep: whether to return the inputs of the operator's backward pass.
    """
    program = fused_program(x, weights, dtype, backend)
    if program is None:
        return None
    return PROGRAM.attempt(backend, program, _begin_launches, x, weights, dtype, backend, keep)


def _begin_launches(
    x: torch.Tensor,
    weights: Weights,
    dtype: torch.dtype,
    backend: Backend,
    keep: bool,
    *,
    program: LoadedProgram,
) -> tuple[OutputInputs, Recorded | None]:
    with torch.autocast(x.device.type, enabled=False):
        layouts = (
            *projection_layouts(weights.q, weights.k, weights.v, weights.narrow),
            *output_layouts(weights.wide, weights.norm, weights.out),
        )
        taps, bias = taps_buffer(x), x.new_empty(WIDTH)
        beta = x.new_empty(WIDTH // HEAD_DIM)
        vectors = (
            *taps_layout(weights.taps(), taps),
            Vector(weights.wide_bias, bias),
            Vector(weights.beta_log, beta, softplus=True),
        )
        weight_tiles = swizzle_weights(program, layouts, dtype, vectors)
        qkv, narrow = project(program, x[0], weight_tiles[0], taps, dtype)
        q, k, v = qkv.view(1, x.shape[1], 3, -1, HEAD_DIM).unbind(2)
        operator = recorded_forward(q, k, v, beta, backend=backend)
        # the operator's results take gigabytes for a million tokens: drop them if possible
        output_inputs = OutputInputs(operator.o[0], narrow, weight_tiles[4], bias, weight_tiles[5])
        return output_inputs, operator if keep else None


def finish_fused(output_inputs: OutputInputs, eps: float, backend: Backend) -> torch.Tensor | None:
    """Return the layer's output `[1, T, 512]` from `begin_fused`'s result; None as there.

    eps is the norm's.
    """
    o = output_inputs.o
    program = hopper_program(o, o.dtype, backend)
    if program is None:
        return None
    return PROGRAM.attempt(backend, program, _finish_launch, output_inputs, eps)


def _finish_launch(
    output_inputs: OutputInputs, eps: float, *, program: LoadedProgram
) -> torch.Tensor:
    return gated_output(program, *output_inputs, eps).unsqueeze(0)


def attend_fused(
    x: torch.Tensor,
    weights: Weights,
    dtype: torch.dtype,
    eps: float,
    backend: Backend,
    *,
    keep: bool = False,
    output: bool = True,
) -> LayerResults | None:
    """Return the layer's output `[1, T, 512]` in `dtype`, or None where `begin_fused` does.

    Args:
        eps: of the norm.
        keep: whether to return `narrow` and `operator`; `rows` and `products` are never there.
        output: whether to compute y.
    """
    partial = begin_fused(x, weights, dtype, backend, keep=keep)
    if partial is None:
        return None
    output_inputs, operator = partial
    y = finish_fused(output_inputs, eps, backend) if output else None
    if output and y is None:
        return None
    return LayerResults(y, narrow=output_inputs.narrow if keep else None, operator=operator)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
