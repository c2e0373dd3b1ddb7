"""The layer's fused kernels for every GPU from compute capability 8.0, by mma.sync."""

# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
