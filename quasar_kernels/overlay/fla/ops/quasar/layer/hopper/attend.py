"""The layer on Hopper in three steps: projection, operator, gated output; the outer two fused.

It serves long sequences of the layer's usual size; `attend_fused` says which.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from fla.ops.quasar.chunk import Recorded, recorded_forward
from fla.ops.quasar.cuda.program import LoadedProgram
from fla.ops.quasar.layer.hopper.gated_output import gated_output, output_packings, pack_weights
from fla.ops.quasar.layer.hopper.program import PROGRAM, hopper_program
from fla.ops.quasar.layer.hopper.projection import (
    HEAD_DIM,
    HIDDEN,
    TAPS,
    WIDTH,
    halved_taps,
    project,
    projection_packings,
)
from fla.ops.quasar.layer.weights import Weights
from fla.ops.quasar.switches import Backend

MANY_TOKENS = 1 << 15
"""From so many tokens on this is the faster way (measured on an H200)."""

_SHAPES = (  # of `Weights`
    *[(WIDTH, HIDDEN)] * 3, (HEAD_DIM, HIDDEN), (WIDTH, HEAD_DIM), (WIDTH,),
    *[(WIDTH, 1, TAPS)] * 3, None, None, None, (WIDTH // HEAD_DIM,), (HEAD_DIM,), (HIDDEN, WIDTH),
)  # fmt: skip
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _takes(x: torch.Tensor, weights: Weights) -> bool:
    if torch.is_grad_enabled() or not x.is_cuda or x.dtype != torch.float32:
        return False
    if x.shape[0] != 1 or x.shape[1] < MANY_TOKENS:
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


class Attended(NamedTuple):
    """The layer's output, and what its backward pass needs; None for what was not asked for."""

    y: torch.Tensor | None  # [B, T, hidden]
    rows: torch.Tensor | None = None  # [R, hidden], x in the products' dtype
    products: torch.Tensor | None = None  # [R, 3 H S + S], x W: q, k, v, and the narrow gate
    narrow: torch.Tensor | None = None  # [R, S], the last of them in the products' dtype
    operator: Recorded | None = None


def attend_fused(
    x: torch.Tensor,
    weights: Weights,
    dtype: torch.dtype,
    eps: float,
    backend: Backend,
    *,
    keep: bool = False,
    output: bool = True,
) -> Attended | None:
    """Return the layer's output `[1, T, 512]` in `dtype`, or None where this is not the way.

    It is for one sequence from its start, of at least `MANY_TOKENS` tokens, in fp32 with products
    in bf16 or fp16, nothing recorded, on a GPU of compute capability 9.0. When a launch fails, one
    line is logged, and None is the answer from then on.

    Args:
        x: `[B, T, hidden]`.
        weights: the layer's.
        dtype: of the products.
        eps: of the norm.
        backend: QUASAR_BACKEND's value.
        keep: whether to return `narrow` and `operator`; `rows` and `products` are never there.
        output: whether to compute y.
    """
    program = hopper_program(x, dtype, backend) if _takes(x, weights) else None
    if program is None:
        return None
    return PROGRAM.attempt(backend, program, _attend, x, weights, dtype, eps, backend, keep, output)


def _attend(
    x: torch.Tensor, weights: Weights, dtype: torch.dtype, eps: float, backend: Backend, keep: bool,
    output: bool, *, program: LoadedProgram,
) -> Attended:  # fmt: skip
    with torch.autocast(x.device.type, enabled=False):
        packings = (
            *projection_packings(weights.q, weights.k, weights.v, weights.narrow),
            *output_packings(weights.wide, weights.norm, weights.out),
        )
        images = pack_weights(program, packings, dtype)
        qkv, narrow = project(program, x[0], images[0], halved_taps(weights.taps()), dtype)
        q, k, v = qkv.view(1, x.shape[1], 3, -1, HEAD_DIM).unbind(2)
        beta = F.softplus(weights.beta_log.float())
        operator = recorded_forward(q, k, v, beta, backend=backend)
        kept = Attended(None, narrow=narrow, operator=operator) if keep else Attended(None)
        o = operator.o[0]
        del q, k, v, qkv, operator  # gigabytes for a million tokens, where they are not kept
        if not output:
            return kept
        y = gated_output(program, o, narrow, images[4], weights.wide_bias, images[5], eps)
    return kept._replace(y=y.unsqueeze(0))


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
