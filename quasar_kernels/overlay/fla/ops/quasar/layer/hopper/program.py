"""The layer's fused products on Hopper GPUs: their program, its arguments, and its selection.

projection.py and gated_output.py launch its kernels. They need wgmma, clusters and bulk copies,
which only compute capability 9.0 has together. Other GPUs, and machines on which they cannot be
built, use the layer's general kernels.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from fla.ops.quasar.cuda.nvrtc import HOPPER
from fla.ops.quasar.cuda.program import (
    DTYPES,
    FLOAT,
    INT,
    INT64,
    POINTER,
    CudaProgram,
    LoadedProgram,
    Variant,
    fields,
)
from fla.ops.quasar.switches import Backend

MATRICES, VECTORS = 6, 5
"""Most matrices and vectors of one launch of pack_weights.cu."""


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


class ProjectionArguments(ctypes.Structure):
    """`quasar::layer::ProjectionArguments` of projection.cu."""

    _fields_ = [
        *fields(POINTER, "x taps weight_tiles qkv narrow"),
        *fields(INT64, "T"),
        *fields(INT, "steps lag"),
    ]


class OutputArguments(ctypes.Structure):
    """`quasar::layer::OutputArguments` of gated_rows.cuh."""

    _fields_ = [
        *fields(POINTER, "o narrow gate_weights out_weights bias y"),
        *fields(INT64, "T narrow_stride"),
        *fields(INT, "tiles row_tiles steps"),
        *fields(FLOAT, "eps"),
    ]


_CSRC = Path(__file__).with_name("csrc")
PROGRAM = CudaProgram(
    "hopper_products",
    [_CSRC / f"{part}.cu" for part in ("pack_weights", "projection", "gated_output")],
    {
        "pack_weights_{}": SwizzleArguments,
        "projection_{}": ProjectionArguments,
        "gated_output_{}": OutputArguments,
    },
    "the layer's fused products are not used: %s",
)


@functools.cache
def _is_hopper(device: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) == HOPPER


def hopper_program(x: torch.Tensor, dtype: torch.dtype, backend: Backend) -> LoadedProgram | None:
    """Return the kernels for products in `dtype` on x's device, or None where they are not used.

    That is so on other GPUs, with `backend` (QUASAR_BACKEND's value) triton or torch, and where the
    kernels cannot be built; the first time, one line is logged that names the cause and the remedy.
    """
    if not x.is_cuda or dtype not in DTYPES or not _is_hopper(x.device.index):
        return None
    if backend not in ("auto", "cuda"):
        return None
    program = PROGRAM.find(Variant(x.device.index, dtype))
    return program if isinstance(program, LoadedProgram) else None


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
