"""The layer's stages by mma.sync, on every GPU from compute capability 8.0 without Hopper's.

They serve with QUASAR_BACKEND=cuda alone: with auto the library does, until they have been
measured to be faster on a GPU without Hopper's instructions.
"""

from __future__ import annotations

from fla.ops.quasar.layer.fused import FusedKernels
from fla.ops.quasar.layer.portable.program import (
    PROGRAM,
    gated_output,
    output_layouts,
    portable_program,
    project,
    projection_layouts,
)

KERNELS = FusedKernels(
    *(PROGRAM, ("cuda",), portable_program),
    *(projection_layouts, project, output_layouts, gated_output),
)
PORTABLE = KERNELS.stages()


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
