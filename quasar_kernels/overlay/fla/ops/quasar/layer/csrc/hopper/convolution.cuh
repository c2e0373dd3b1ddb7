// The projection's epilogue: the short causal convolution and SiLU, from fp16 products in shared
// memory.
//
// Taps and sums are fp16, two channels per instruction, so that one epilogue warpgroup is as fast
// as two consumer warpgroups. This adds 0.4e-3 to a bf16 result's rounding error of 1.7e-3. Sums
// are fused multiply-adds. Only a sum's first term is rounded by itself and may be infinite, so the
// sum of finite products is never NaN.

#pragma once

#include "warpgroup_product.cuh"

#if QUASAR_WGMMA
namespace quasar::layer {

constexpr int CHANNELS = 3 * 512;  // q, k and v
constexpr int TAPS = 4, BEFORE = TAPS - 1;
constexpr u32 RESULT_ROW = 2 * WEIGHT_TILE_ROWS, RESULT_PITCH = RESULT_ROW + 16;
// threads at a result's barriers: those of a consumer warpgroup and of the epilogue warpgroup
constexpr int RESULT_THREADS = 256;

__device__ __forceinline__ uint2 load_shared(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(u32 address, const uint2& v) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" : : "r"(address), "r"(v.x), "r"(v.y) : "memory");
}

// two numbers in fp16
__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ u32 multiply_add_pair(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// silu(2 h). The least finite number first replaces minus infinity, because its SiLU would be NaN.
__device__ __forceinline__ void silu_of_half(float (&y)[2], u32 h) {
  asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(h) : "r"(0xfbfffbffu));
  unpack<Scalar::fp16>(h, y[0], y[1]);
#pragma unroll
  for (int e = 0; e < 2; ++e) y[e] = y[e] * tanh_fast(y[e]) + y[e];
}

// A consumer's result [64, 128]; addresses are in shared memory.
struct Result {
  u32 rows;        // RESULT_PITCH bytes each
  u32 before;      // the last rows of the previous tile
  u32 last;        // for this tile's last rows; warp 3 may write it while warp 0 reads `before`
  u32 taps;        // [4, CHANNELS] from the result's first channel on, halved
  int full, free;  // named barriers: the rows are written; they may be overwritten
};

// One warpgroup convolves a result and stores its rows begin .. end - 1; `to` points to the first
// row's place in [T, CHANNELS]. A thread owns 4 channels of its warp's 16 rows.
template <Scalar T>
__device__ __forceinline__ void convolve(unsigned short* to, int begin, int end,
                                         const Result& result) {
  constexpr int ROWS = 16, BLOCK = 4;  // rows of a warp, and rows computed together
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const u32 own = result.rows + ROWS * warp * RESULT_PITCH + 8 * lane;
  uint2 x[BEFORE + BLOCK], row[2][BLOCK], weight[TAPS];  // x: a block of rows and those before it
#pragma unroll
  for (int i = 0; i < TAPS; ++i) weight[i] = load_shared(result.taps + 2 * CHANNELS * i + 8 * lane);
  // warp 3 has then also stored the previous tile's last rows
  named_barrier_sync(result.full, RESULT_THREADS);
#pragma unroll
  for (int i = 0; i < BEFORE; ++i)
    x[i] = load_shared(warp == 0 ? result.before + i * RESULT_ROW + 8 * lane
                                 : own + (i - BEFORE) * RESULT_PITCH);
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) row[0][i] = load_shared(own + i * RESULT_PITCH);

  to += ROWS * warp * CHANNELS + 4 * lane;
  begin -= ROWS * warp;
  end -= ROWS * warp;
#pragma unroll
  for (int b = 0; b < ROWS / BLOCK; ++b) {
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
      x[BEFORE + i] = row[b & 1][i];
      if (b + 1 < ROWS / BLOCK)
        row[~b & 1][i] = load_shared(own + (BLOCK * (b + 1) + i) * RESULT_PITCH);
    }
    if (b + 1 == ROWS / BLOCK) named_barrier_arrive(result.free, RESULT_THREADS);
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
      u32 low = multiply_pair(weight[0].x, x[i].x), high = multiply_pair(weight[0].y, x[i].y);
#pragma unroll
      for (int j = 1; j < TAPS; ++j) {
        low = multiply_add_pair(weight[j].x, x[i + j].x, low);
        high = multiply_add_pair(weight[j].y, x[i + j].y, high);
      }
      float y[2][2];
      silu_of_half(y[0], low);
      silu_of_half(y[1], high);
      const int r = BLOCK * b + i;
      if (r >= begin && r < end)
        *(uint2*)(to + r * CHANNELS) =
            make_uint2(pack_finite<T>(y[0][0], y[0][1]), pack_finite<T>(y[1][0], y[1][1]));
    }
#pragma unroll
    for (int i = 0; i < BEFORE; ++i) x[i] = x[BLOCK + i];
  }
  if (warp == 3)
#pragma unroll
    for (int i = 0; i < BEFORE; ++i) store_shared(result.last + i * RESULT_ROW + 8 * lane, x[i]);
}

}  // namespace quasar::layer
#endif

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
