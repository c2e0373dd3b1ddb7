"""The segmented scan in CUDA C++: host code, and its kernels in csrc."""

# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
