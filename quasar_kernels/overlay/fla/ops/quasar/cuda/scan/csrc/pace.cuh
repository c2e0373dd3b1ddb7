// Pairs of blocks that advance through their segments in step, on Hopper.
//
// A pair is a cluster of two blocks: neighbouring heads, or two panels of one head. Their loads and
// stores are adjacent in device memory, where larger pieces at a time are faster. QUASAR_ALONE
// disables pairs, for grids with an odd number of blocks.

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

// waits until the pair's other block has also called this, or has exited
__device__ __forceinline__ void sync_pair() {
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
