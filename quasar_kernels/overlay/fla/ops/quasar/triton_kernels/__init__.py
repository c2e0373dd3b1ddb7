"""The segmented scan in Triton: its kernels, how they are cut up, tuned and launched."""

# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
