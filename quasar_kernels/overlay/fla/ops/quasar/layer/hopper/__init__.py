"""The layer in fused kernels for Hopper GPUs: projection, operator, gated output."""

# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
