"""The layer on a GPU: what surrounds the operator, its gradients, and replay as CUDA graphs."""

# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
