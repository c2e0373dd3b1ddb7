"""The layer's fused kernels for Hopper GPUs: the projections and the gated output."""

# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
