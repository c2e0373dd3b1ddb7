// Products of 64 tokens in one warpgroup's registers (A operands) with pipelined weight tiles
// (weight_stream.cuh), on Hopper.

#pragma once

#include "weight_stream.cuh"

#if QUASAR_WGMMA
namespace quasar::layer {

// ---- products: d [64, 8 * TILES] = a [64, 64 * WEIGHT_TILES] (weight tiles)^T ----

// Multiplies by the pipeline's next weight tiles, one for each 64 inputs (4 operands) of `a`; TILES
// is 16 for weight tiles of 128 rows and 8 for weight tiles of 64. A weight tile is released while
// the next is multiplied. A pipeline with as many stages as weight tiles is always at stage 0 here.
// If the last 64 inputs are in shared memory instead of `a`, `last` is the descriptor of their
// tile.
template <Scalar T, int TILES, int OPERANDS, int STAGES, class... Last>
__device__ __forceinline__ void product(float (&d)[TILES][4], const u32 (&a)[OPERANDS][4],
                                        PipelineConsumer<STAGES>& weights, Last... last) {
  constexpr int INPUTS = OPERANDS + 4 * sizeof...(Last);
  if (4 * STAGES == INPUTS) weights.held = weights.place.stage = 0;  // so that stages are constants
#pragma unroll
  for (int t = 0; t < INPUTS; t += 4) {
    const u64 b = weights.next();
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (t + i == 0)
        wgmma_rows<T, true>(d, a[0], b);
      else if (t < OPERANDS)
        wgmma_rows<T>(d, a[t < OPERANDS ? t + i : 0], at_columns(b, i));
      else
        (wgmma_tile<T>(d, at_columns(last, i), at_columns(b, i)), ...);
    }
    warpgroup_commit();
    if (t) {
      warpgroup_wait<1>();
      weights.release();
    }
  }
  warpgroup_wait<0>();
  weights.release();
  warpgroup_fence_operand(d);
}

// ---- results ----

__device__ __forceinline__ float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Writes an accumulator [64, 8 * TILES], converted by pack_finite, to shared memory, in rows of
// `pitch` bytes. The pitch is an odd number of 16-byte pieces, so that rows are in different banks.
template <Scalar T, int TILES>
__device__ __forceinline__ void store_tiles(u32 to, u32 pitch, const float (&d)[TILES][4]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const u32 at = to + (16 * warp + (lane & 15)) * pitch + (lane >> 4) * 16;
#pragma unroll
  for (int m = 0; m < TILES; m += 2)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 :
                 : "r"(at + 16 * m), "r"(pack_finite<T>(d[m][0], d[m][1])),
                   "r"(pack_finite<T>(d[m][2], d[m][3])),
                   "r"(pack_finite<T>(d[m + 1][0], d[m + 1][1])),
                   "r"(pack_finite<T>(d[m + 1][2], d[m + 1][3]))
                 : "memory");
}

}  // namespace quasar::layer
#endif

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
