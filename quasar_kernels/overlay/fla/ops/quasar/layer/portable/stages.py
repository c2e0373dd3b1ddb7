"""The layer's stages by mma.sync, on every GPU from compute capability 8.0 without Hopper's.

With QUASAR_BACKEND=auto they are used on GPUs on which they are faster than library.py (choice.py).
"""

from __future__ import annotations

from fla.ops.quasar.layer.fused import FusedKernels
from fla.ops.quasar.layer.portable.choice import fused_is_faster
from fla.ops.quasar.layer.portable.program import (
    PROGRAM,
    gated_output,
    output_layouts,
    portable_program,
    project,
    projection_layouts,
)

KERNELS = FusedKernels(
    *(PROGRAM, ("auto", "cuda"), portable_program),
    *(projection_layouts, project, output_layouts, gated_output, fused_is_faster),
)
PORTABLE = KERNELS.stages()


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
