"""The layer's stages by mma.sync, on every GPU from compute capability 8.0 without Hopper's.

They are used only with QUASAR_BACKEND=cuda. With auto, library.py is used instead, because no
measurement has shown yet that these kernels are faster on a GPU without Hopper's instructions.
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
