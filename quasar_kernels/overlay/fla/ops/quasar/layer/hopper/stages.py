"""The layer's stages on Hopper, compute capability 9.0."""

from __future__ import annotations

from fla.ops.quasar.layer.fused import FusedKernels
from fla.ops.quasar.layer.hopper.gated_output import gated_output, output_layouts
from fla.ops.quasar.layer.hopper.program import PROGRAM, hopper_program
from fla.ops.quasar.layer.hopper.projection import project, projection_layouts

KERNELS = FusedKernels(
    *(PROGRAM, ("auto", "cuda"), hopper_program),
    *(projection_layouts, project, output_layouts, gated_output),
)
HOPPER = KERNELS.stages()


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
