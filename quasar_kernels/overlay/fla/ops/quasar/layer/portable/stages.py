"""The layer's stages by mma.sync: one kernel before the operator, one after it.

They take the calls of Hopper's stages with QUASAR_BACKEND=cuda, on every GPU from compute
capability 8.0 on which Hopper's are not available.
"""

from __future__ import annotations

import torch

from fla.ops.quasar.cuda.program import LoadedProgram
from fla.ops.quasar.layer.call import Activations, Call, Stages, Weights
from fla.ops.quasar.layer.hopper.stages import project_with, takes
from fla.ops.quasar.layer.portable.program import (
    PROGRAM,
    gated_output,
    output_layouts,
    portable_program,
    project,
    projection_layouts,
)


def find_program(call: Call, x: torch.Tensor, weights: Weights) -> LoadedProgram | None:
    """Return the kernels for a call, or None if they do not support it."""
    if call.cu_seqlens is not None or not takes(x, weights):
        return None
    return portable_program(x, call.dtype, call.backend)


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


def _output(call: Call, tensors: Activations) -> torch.Tensor | None:
    program = portable_program(tensors.o, tensors.o.dtype, call.backend)
    if program is None:
        return None
    return PROGRAM.attempt(call.backend, program, _launch_output, tensors, call.eps)


def _launch_output(tensors: Activations, eps: float, *, program: LoadedProgram) -> torch.Tensor:
    return gated_output(program, tensors.o, tensors.narrow, *tensors.output_weights, eps)


PORTABLE = Stages(_project, _output)


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
