"""The segmented scan in Triton: its kernels, tiles and launches."""

# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
