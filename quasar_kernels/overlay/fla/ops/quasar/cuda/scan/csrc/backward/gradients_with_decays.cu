// The backward pass with decays, for tools that compile each .cu file separately; at run time NVRTC
// compiles the same sources with the same definitions.

#define QUASAR_DECAY 1

#include "input_gradient.cu"
#include "state_checkpoint.cu"
#include "state_gradient.cu"

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
