// Products of 128 tokens, which stay on chip, with weight tiles, which stream past them. They use
// mma.sync, cp.async and 99 KB of shared memory, which every GPU from compute capability 8.0 has.
//
// A block has two groups of four warps. Warp w of each group owns the tokens 32 w .. 32 w + 31 of
// the block's 128, and a group owns half of the output channels, 64 at a time. The tokens' 512
// inputs are A operands. Each warp holds the first 256 in registers, so each group has a copy. The
// others are in shared memory, in the order of the registers, so that one load of 16 bytes brings a
// lane's part of an operand. 128 KB of registers and 64 KB of shared memory therefore hold 128
// tokens. 64 tokens would fit shared memory alone, but weights would then be read from the L2 cache
// twice as often. With 16 tokens per warp, every weight would be read from shared memory twice as
// often. Either would take longer than the products on GPUs with at least 1,024 multiply-adds per
// clock and multiprocessor.
//
// Each group has its own pipeline: STAGES pieces of 64 output channels x 64 inputs, halves of the
// weight tiles that pack_weights.cu writes. While one group waits or computes its results, the
// other multiplies. Where a multiprocessor holds two blocks (228 KB of shared memory), a block is
// one group: then no operand is held twice, and no group waits for another.
//
// Tokens of a warp: row g (+ 8 h) of the operand m holds token 4 g + 2 m + h, so a lane owns four
// neighbours. Its inputs are in the order in which pack_weights.cu permutes groups of 16 or 32.

#pragma once

#include "../../../cuda/csrc/fragments.cuh"

namespace quasar::layer {

#ifndef QUASAR_GROUPS
#if __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
#define QUASAR_GROUPS 1
#else
#define QUASAR_GROUPS 2
#endif
#endif

constexpr int GROUPS = QUASAR_GROUPS;        // of a block
constexpr int BLOCKS = GROUPS == 1 ? 2 : 1;  // of a multiprocessor
constexpr int WARPS = 4, GROUP_THREADS = 32 * WARPS, THREADS = GROUPS * GROUP_THREADS;
constexpr int TOKENS = 128, WARP_TOKENS = 32, LANE_TOKENS = 4;  // of a block, a warp, a lane
constexpr int INPUTS = 512, OPERANDS = INPUTS / 16;
constexpr int HELD = OPERANDS / 2;           // operands in registers
constexpr int PIECE_CHANNELS = 64;           // of a weight piece, which also has 64 inputs
constexpr int PIECES = INPUTS / 64;          // for 64 output channels
constexpr u32 PIECE_BYTES = 64 * ROW_BYTES;  // half of a weight tile of 128 channels
constexpr int STAGES = GROUPS == 1 ? 4 : 2;
constexpr int BATCH = GROUPS == 1 ? 2 : 1;  // pieces that a group waits for at once

typedef u32 Held[HELD][2][4];    // a warp's operands [32, 16] in registers
typedef float Results[2][8][4];  // 32 tokens x 64 channels

struct ResidentShared {
  uint4 inputs[OPERANDS - HELD][WARPS][2][32];
  uint4 weights[GROUPS][STAGES][PIECE_BYTES / 16];
};

__device__ __forceinline__ int lane_index() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_index() { return threadIdx.x >> 5 & (WARPS - 1); }

// the number of this lane's first token within the block's tokens
__device__ __forceinline__ int first_token() {
  return WARP_TOKENS * warp_index() + LANE_TOKENS * (lane_index() >> 2);
}

// the threads of a group
__device__ __forceinline__ void group_sync(int group) {
  asm volatile("bar.sync %0, %1;" : : "r"(group + 1), "n"(GROUP_THREADS) : "memory");
}

// Stores this lane's part of an operand in shared memory; load_operand reads it.
__device__ __forceinline__ void store_operand(uint4 (&to)[32], const u32 (&x)[4]) {
  to[lane_index()] = make_uint4(x[0], x[1], x[2], x[3]);
}

__device__ __forceinline__ void load_operand(u32 (&x)[4], const uint4 (&from)[32]) {
  const uint4 v = from[lane_index()];
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

// Synchronizes the threads that share operands in shared memory. In a block of one group these are
// the threads of a warp, because each warp has its own tokens.
__device__ __forceinline__ void operands_sync() {
  if (GROUPS > 1)
    __syncthreads();
  else
    __syncwarp();
}

// Streams a group's weight pieces: all `pieces` for one tile of tokens, then the same again for the
// next tile. `Order` gives the address of each piece.
template <class Order>
struct WeightStream {
  const Order& order;
  const int group, pieces;
  const u32 own;       // address of this thread's first 16 bytes in stage 0
  int next_piece = 0;  // the next to load
  int stage = 0;       // the next to read

  __device__ __forceinline__ WeightStream(ResidentShared& shared, const Order& order, int group,
                                          int pieces)
      : order(order),
        group(group),
        pieces(pieces),
        own(shared_address(shared.weights[group]) + 16 * (threadIdx.x % GROUP_THREADS)) {
#pragma unroll
    for (int i = 0; i < STAGES - BATCH; i += BATCH) load(i);
  }

  // Starts loading the next BATCH pieces into stages from `stage` on.
  __device__ __forceinline__ void load(int stage) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const char* from = order.piece(next_piece) + 16 * (threadIdx.x % GROUP_THREADS);
#pragma unroll
      for (u32 at = 0; at < PIECE_BYTES; at += 16 * GROUP_THREADS)
        copy16(own + (stage + i) * PIECE_BYTES + at, from + at);
      if (++next_piece == pieces) next_piece = 0;
    }
    commit_loads();
  }

  // Returns the address of the next piece. `number` is its index; at a multiple of BATCH, waits
  // for the batch that begins with this piece, and starts loading another one.
  __device__ __forceinline__ u32 next(int number) {
    if (number % BATCH == 0) {
      wait_loads<STAGES / BATCH - 2>();
      group_sync(group);  // copies have arrived, and all warps have read the previous batch
      load(stage == 0 ? STAGES - BATCH : stage - BATCH);
    }
    const u32 arrived = own + stage * PIECE_BYTES - 16 * (threadIdx.x % GROUP_THREADS);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    return arrived;
  }
};

// d [32, 64] += a [32, 16] w^T, where w is the 16 columns of `piece` from column 16 t on
template <Scalar T>
__device__ __forceinline__ void multiply(Results& d, const u32 (&a)[2][4], u32 piece, int t) {
  const u32 from = pair_address(piece, lane_index()) ^ 32 * t;
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    u32 b[4];
    load_rows(b, from + n * 8 * ROW_BYTES);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      mma<T>(d[m][n], a[m], b[0], b[1]);
      mma<T>(d[m][n + 1], a[m], b[2], b[3]);
    }
  }
}

// d [32, 64] = the warp's tokens by the next 64 output channels
template <Scalar T, class Order>
__device__ __forceinline__ void product(Results& d, const Held& held, const ResidentShared& shared,
                                        WeightStream<Order>& weights) {
  clear(d[0]);
  clear(d[1]);
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece) {
    const u32 b = weights.next(piece);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int k = 4 * piece + t;
      if (k < HELD) {
        multiply<T>(d, held[k], b, t);
      } else {
        u32 a[2][4];
        load_operand(a[0], shared.inputs[k - HELD][warp_index()][0]);
        load_operand(a[1], shared.inputs[k - HELD][warp_index()][1]);
        multiply<T>(d, a, b, t);
      }
    }
  }
}

// Returns 16 bytes: this lane's 8 of the 32 output channels of one half, for its token `own`. The
// row order of pack_weights.cu makes them neighbours.
template <Scalar T>
__device__ __forceinline__ uint4 packed_channels(const Results& d, int own, int half) {
  const float (&r)[8][4] = d[own / 2];
  const int e = own % 2 * 2, n = 4 * half;
  return make_uint4(
      pack_finite<T>(r[n][e], r[n][e + 1]), pack_finite<T>(r[n + 1][e], r[n + 1][e + 1]),
      pack_finite<T>(r[n + 2][e], r[n + 2][e + 1]), pack_finite<T>(r[n + 3][e], r[n + 3][e + 1]));
}

__device__ __forceinline__ float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace quasar::layer

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
