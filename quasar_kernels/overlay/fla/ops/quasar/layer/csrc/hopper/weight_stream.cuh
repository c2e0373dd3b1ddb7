// The producer/consumer pipeline that streams swizzled weight tiles through shared memory, on
// Hopper.
//
// A block has one producer warpgroup and two consumer warpgroups, each of which holds 64 tokens in
// registers as A operands. Both consumers multiply by the same weight tiles, which the producer
// copies into a pipeline of STAGES stages. The two blocks of a cluster each load one half of every
// weight tile and multicast it to both. `full` barriers count copied bytes, `empty` barriers the
// consumers' warps of both blocks.
//
// A weight tile holds up to 128 output channels (rows) x 64 inputs, in rows of 128 bytes with the
// 128-byte swizzle (tile_descriptor in wgmma.cuh). Within 16 inputs, positions 2c, 2c+1, 2c+8, 2c+9
// hold inputs 4c .. 4c+3. A thread's part of A (the tokens) is then four neighbours in memory (PTX
// ISA, "Register Fragments for wgmma.mma_async.m64nNk16").

#pragma once

#include "../../../cuda/csrc/barriers.cuh"

#if QUASAR_WGMMA
namespace quasar::layer {

constexpr int CONSUMERS = 2;  // warpgroups of a block that multiply
constexpr int BLOCK_THREADS = 128 * (CONSUMERS + 1);
constexpr int CLUSTER_BLOCKS = 2;  // blocks of a cluster
constexpr int TILE_TOKENS = 64;    // that a consumer holds
constexpr int WEIGHT_TILE_ROWS = 128, WEIGHT_TILE_INPUTS = 64;
constexpr u32 WEIGHT_TILE_BYTES = WEIGHT_TILE_ROWS * ROW_BYTES;

// ---- register reallocation from producer to consumers; all four warps of a warpgroup call it ----

template <int REGISTERS>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}

// ---- clusters ----

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// all threads of both blocks must call it; the threads of a warp need not be converged
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// the same place in the shared memory of block `rank` of the cluster
__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// ---- named barriers of a block; `threads` counts all that arrive, waiting or not ----

__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

// the 128 threads of one consumer
__device__ __forceinline__ void consumer_sync(int consumer) {
  named_barrier_sync(consumer + 1, 128);
}

// ---- barriers ----

// One arrival at a barrier of either block, by an address from in_block. It does not order memory
// accesses across blocks (that would need a full fence). No order is needed, because the products
// have read the stage before the arrival (warpgroup_wait).
__device__ __forceinline__ void arrive_in_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" : : "r"(barrier) : "memory");
}

// ---- bulk copies: addresses and sizes are multiples of 16 bytes ----

// Multicast to the same address in both blocks; completes on each block's mbarrier at `barrier`.
__device__ __forceinline__ void copy_to_both(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1], %2, [%3], %4;"
      :
      : "r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((unsigned short)3)
      : "memory");
}

__device__ __forceinline__ void prefetch_to_l2(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(from), "r"(bytes) : "memory");
}

// ---- the pipeline of weight tiles ----

// first in a block's shared memory, 1024-byte aligned
template <int STAGES>
struct PipelineShared {
  uint4 weight_tile[STAGES][WEIGHT_TILE_BYTES / 16];
  u64 full[STAGES], empty[STAGES];
};

// One thread of each block, before cluster_sync. A stage is empty when every warp of the consumers
// of both blocks has released it.
template <int STAGES>
__device__ __forceinline__ void init_pipeline(PipelineShared<STAGES>& pipeline) {
  for (int i = 0; i < STAGES; ++i) {
    init_barrier(shared_address(&pipeline.full[i]), 1);
    init_barrier(shared_address(&pipeline.empty[i]), CLUSTER_BLOCKS * CONSUMERS * 4);
  }
  fence_barrier_init();
}

// A pipeline's current stage, and the phase parity of its barriers.
template <int STAGES>
struct PipelineState {
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The producer's side, for one thread of each block. Both load the same weight tiles in one order.
template <int STAGES>
struct PipelineProducer {
  u32 weight_tile, full, empty, rank;
  PipelineState<STAGES> place;

  __device__ __forceinline__ explicit PipelineProducer(const PipelineShared<STAGES>& pipeline)
      : weight_tile(shared_address(pipeline.weight_tile)),
        full(shared_address(pipeline.full)),
        empty(shared_address(pipeline.empty)),
        rank(cluster_rank()) {}

  // Starts the copy of the next weight tile, of `bytes` (a multiple of 32), once its stage is
  // empty.
  __device__ __forceinline__ void load(const void* from, u32 bytes) {
    const u32 half = bytes / CLUSTER_BLOCKS, barrier = full + 8 * place.stage;
    wait_barrier(empty + 8 * place.stage, place.parity ^ 1);  // at first this does not wait
    arrive_expecting(barrier, bytes);
    copy_to_both(weight_tile + place.stage * WEIGHT_TILE_BYTES + rank * half,
                 (const char*)from + rank * half, half, barrier);
    place.advance();
  }
};

// A consumer's side, for all threads of its warpgroup.
template <int STAGES>
struct PipelineConsumer {
  u64 descriptor;   // of stage 0's tile
  u32 full, empty;  // empty: lane 0's barriers are in block 0, lane 1's in block 1
  bool reports;
  int held = 0;  // the oldest stage not released
  PipelineState<STAGES> place;

  __device__ __forceinline__ explicit PipelineConsumer(const PipelineShared<STAGES>& pipeline)
      : descriptor(tile_descriptor(shared_address(pipeline.weight_tile))),
        full(shared_address(pipeline.full)),
        reports((threadIdx.x & 31) < CLUSTER_BLOCKS) {
    empty = in_block(shared_address(pipeline.empty), threadIdx.x & (CLUSTER_BLOCKS - 1));
  }

  // Waits for the next weight tile and returns its descriptor.
  __device__ __forceinline__ u64 next() {
    wait_barrier(full + 8 * place.stage, place.parity);
    const u64 weight_tile = descriptor + place.stage * (WEIGHT_TILE_BYTES / 16);
    place.advance();
    return weight_tile;
  }

  // Releases the oldest weight tile of this warp; call after waiting for its products.
  __device__ __forceinline__ void release() {
    if (reports) arrive_in_cluster(empty + 8 * held);
    if (++held == STAGES) held = 0;
  }

  // Skips a weight tile that only the other consumer needs.
  __device__ __forceinline__ void skip() {
    next();
    __syncwarp();
    release();
  }
};

}  // namespace quasar::layer
#endif

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
