// The same for heads of 128 channels, which Hopper alone has the shared memory for.

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
