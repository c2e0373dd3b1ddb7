// The forward passes with decays for heads of 128 channels, for tools that compile each .cu file
// separately. They compile this width for Hopper only; at run time NVRTC compiles the same sources
// for other GPUs, too.

#define QUASAR_DECAY 1
#define QUASAR_HEAD 128

#include "../../csrc/wgmma.cuh"

#if QUASAR_WGMMA
#include "segment_map.cu"
#include "segment_output.cu"
#endif

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
