"""The layer on a GPU: the stages around the operator, gradients, and replay as CUDA graphs."""

# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
