// Hopper's mbarriers: barriers in shared memory that also count the bytes of bulk copies (TMA).
//
// `barrier` is the shared-memory address of a 64-bit barrier. One side arrives, the other waits for
// a phase, which is named by its parity.

#pragma once

#include "wgmma.cuh"

namespace quasar {

// A tensor's description for bulk copies (CUtensorMap), made by driver.py.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

}  // namespace quasar

#if QUASAR_WGMMA
namespace quasar {

__device__ __forceinline__ void init_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(barrier), "r"(arrivals)
               : "memory");
}

// make initial values visible to bulk copies and the cluster; call before the blocks synchronize
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

// the barrier's phase also waits for this thread's copies so far (cp.async), as one of its arrivals
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(barrier) : "memory");
}

// one arrival; the phase also waits for `bytes` bytes of bulk copies
__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(barrier), "r"(bytes)
               : "memory");
}

// wait until the phase of this parity is complete
__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred over;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
      "@!over bra again;\n}"
      :
      : "r"(barrier), "r"(parity)
      : "memory");
}

}  // namespace quasar
#endif

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
