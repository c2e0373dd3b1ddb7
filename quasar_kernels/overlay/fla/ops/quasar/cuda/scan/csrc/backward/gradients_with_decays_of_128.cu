// The backward pass with decays for heads of 128 channels, for tools that compile each .cu file
// separately; at run time NVRTC compiles the same sources, on Hopper only.

#define QUASAR_DECAY 1
#define QUASAR_HEAD 128

#include "../../../csrc/wgmma.cuh"

#if QUASAR_WGMMA
#include "input_gradient.cu"
#include "state_checkpoint.cu"
#include "state_gradient.cu"
#endif

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
