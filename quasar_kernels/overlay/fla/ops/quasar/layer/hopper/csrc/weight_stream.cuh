// Weights that stream through shared memory past tokens in registers, on Hopper.
//
// A block has a feeding warpgroup and two workers, warpgroups that keep 64 tokens each in registers
// as A operands. Both multiply the same images, tiles of weights that the feeder copies into a ring
// of stages; two blocks, a cluster, fetch half of each image and send it to both.
//
// An image holds up to 128 output channels (rows) x 64 inputs: rows of 128 bytes, whose 16-byte
// pieces are permuted by the row's number (tile_descriptor in wgmma.cuh). Within 16 inputs, places
// 2c, 2c+1, 2c+8, 2c+9 hold channels 4c .. 4c+3, so that a thread's part of an A operand is four
// neighbours in memory (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16").

#pragma once

#include "../../../cuda/csrc/barriers.cuh"

#if QUASAR_WGMMA
namespace quasar::layer {

constexpr int WORKERS = 2;  // warpgroups of a block that multiply
constexpr int BLOCK_THREADS = 128 * (WORKERS + 1);
constexpr int PEERS = 2;         // blocks of a cluster
constexpr int TILE_TOKENS = 64;  // that a worker holds
constexpr int IMAGE_ROWS = 128, IMAGE_INPUTS = 64;
constexpr u32 IMAGE_BYTES = IMAGE_ROWS * ROW_BYTES;

// ---- registers: the feeder gives up what the workers take; all four warps of each call it ----

template <int REGISTERS>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}

// ---- clusters ----

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// every thread of both blocks; threads of a warp may come one by one
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// the same place in the shared memory of block `rank` of the cluster
__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// ---- named barriers of a block; `threads` are all who come, to wait or not ----

__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

// the 128 threads of one worker
__device__ __forceinline__ void worker_sync(int worker) { named_sync(worker + 1, 128); }

// ---- barriers ----

// One arrival at a barrier of either block, by an address from in_block. It orders nothing in the
// other block, which would take a fence of all memory; products have read by then (warpgroup_wait).
__device__ __forceinline__ void arrive_in_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" : : "r"(barrier) : "memory");
}

// ---- bulk copies: addresses and sizes are multiples of 16 bytes ----

// to the same place in both blocks, whose barriers at `barrier` are told
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

// ---- the ring of images ----

// first in a block's shared memory, 1024-byte aligned
template <int STAGES>
struct RingShared {
  uint4 image[STAGES][IMAGE_BYTES / 16];
  u64 full[STAGES], empty[STAGES];
};

// One thread of each block, before cluster_sync. A stage is empty when every warp of the workers of
// both blocks has released it.
template <int STAGES>
__device__ __forceinline__ void init_ring(RingShared<STAGES>& ring) {
  for (int i = 0; i < STAGES; ++i) {
    init_barrier(shared_address(&ring.full[i]), 1);
    init_barrier(shared_address(&ring.empty[i]), PEERS * WORKERS * 4);
  }
  publish_barriers();
}

// Walks the stages; `parity` is that of the phases of its round.
template <int STAGES>
struct Place {
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The feeder's side: one thread of each block, which feed the same images in the same order.
template <int STAGES>
struct Feeder {
  u32 image, full, empty, rank;
  Place<STAGES> place;

  __device__ __forceinline__ explicit Feeder(const RingShared<STAGES>& ring)
      : image(shared_address(ring.image)),
        full(shared_address(ring.full)),
        empty(shared_address(ring.empty)),
        rank(cluster_rank()) {}

  // the next image, of `bytes` (a multiple of 32); returns once its copy is on the way
  __device__ __forceinline__ void feed(const void* from, u32 bytes) {
    const u32 half = bytes / PEERS, barrier = full + 8 * place.stage;
    wait_barrier(empty + 8 * place.stage, place.parity ^ 1);  // a fresh barrier is past parity 1
    arrive_expecting(barrier, bytes);
    copy_to_both(image + place.stage * IMAGE_BYTES + rank * half, (const char*)from + rank * half,
                 half, barrier);
    place.advance();
  }
};

// A worker's side; all its threads.
template <int STAGES>
struct Stream {
  u64 descriptor;   // of stage 0
  u32 full, empty;  // empty: in the block to which this lane reports, of lanes 0 and 1
  bool reports;
  int held = 0;  // the oldest stage not released
  Place<STAGES> place;

  __device__ __forceinline__ explicit Stream(const RingShared<STAGES>& ring)
      : descriptor(tile_descriptor(shared_address(ring.image))),
        full(shared_address(ring.full)),
        reports((threadIdx.x & 31) < PEERS) {
    empty = in_block(shared_address(ring.empty), threadIdx.x & (PEERS - 1));
  }

  // Wait for the next image; returns its descriptor.
  __device__ __forceinline__ u64 next() {
    wait_barrier(full + 8 * place.stage, place.parity);
    const u64 image = descriptor + place.stage * (IMAGE_BYTES / 16);
    place.advance();
    return image;
  }

  // The oldest image that this warp holds may be overwritten: its products are waited for.
  __device__ __forceinline__ void release() {
    if (reports) arrive_in_cluster(empty + 8 * held);
    if (++held == STAGES) held = 0;
  }

  // Pass an image by that the other worker alone needs.
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
