"""QuasarAttention: the delta rule with the step size that solves its continuous form exactly."""

from .chunk import chunk_quasar
from .fused_recurrent import fused_recurrent_quasar

__all__ = ["chunk_quasar", "fused_recurrent_quasar"]

# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
