// Pairs of blocks that walk in step.
//
// On Hopper two blocks keep the same pace, those of neighbouring heads, or panels of one: what they
// read and write lies side by side, and memory is faster with twice as long a piece of it at once.
// QUASAR_ALONE is for an odd number of them.

#pragma once

#include "../../csrc/wgmma.cuh"

#if QUASAR_WGMMA && !defined(QUASAR_ALONE)
#define QUASAR_PACED 1
#define QUASAR_IN_PAIRS __cluster_dims__(2, 1, 1)
#else
#define QUASAR_PACED 0
#define QUASAR_IN_PAIRS
#endif

namespace quasar::scan {

// until the other block of the pair is here too, or has ended
__device__ __forceinline__ void keep_pace() {
#if QUASAR_PACED
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;"
               :
               :
               : "memory");
#endif
}

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
