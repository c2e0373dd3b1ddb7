// The same for heads of 128 channels, whose sources differ from those for 64 on Hopper alone.

#define QUASAR_DECAY 1
#define QUASAR_HEAD 128

#include "../../csrc/wgmma.cuh"

#if QUASAR_WGMMA
#include "segment_map.cu"
#include "segment_output.cu"
#endif

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
