// The backward pass with decays, for tools that compile every .cu file by itself; what a call needs is
// compiled from the same sources at run time.

#define QUASAR_DECAY 1

#include "input_gradient.cu"
#include "state_checkpoint.cu"
#include "state_gradient.cu"

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
