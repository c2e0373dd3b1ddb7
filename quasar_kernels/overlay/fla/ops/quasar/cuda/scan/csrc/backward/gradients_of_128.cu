// The backward pass for heads of 128 channels, for tools that compile every .cu file by itself; what
// a call needs is compiled from the same sources at run time, and on Hopper alone.

#define QUASAR_HEAD 128

#include "../../../csrc/wgmma.cuh"

#if QUASAR_WGMMA
#include "gradient_scan.cu"
#include "input_gradient.cu"
#include "state_checkpoint.cu"
#include "state_gradient.cu"
#endif

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
