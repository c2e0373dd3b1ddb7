// The decays of a tile, and the gradients of their logarithms.
//
// The gradient of a token's log decay is <S, dS>, with S the decayed state before the token and dS
// that state's gradient. Both are sums over tokens and over the parts outside the tile. The value
// after the tile follows from V' dS^T and <S, dS> alone. Going backward from there, each token adds
// its reads of earlier tokens, which its decay has scaled, and subtracts its writes for later
// tokens, which its decay does not scale. A token reads its own write undecayed. That term is
// omitted, so the tiny gradients of strong decays keep their digits.

#pragma once

#include "tile_products.cuh"

namespace quasar::scan {

struct TileDecays {
  float since[S];  // log decays, base 2, from the tile's begin up to and including each token
  float flows[S];  // reads of earlier tokens minus writes for later ones
  float sums[S / 32], passed[INPUT_WARPS];

  __device__ __forceinline__ TileDecays* pointer() { return this; }
};

struct NoTileDecays {
  __device__ __forceinline__ TileDecays* pointer() { return nullptr; }
};

// Fills a tile's decays. `log_decays` points to the first token's log decay; they are `stride`
// elements apart. The caller must synchronize the block afterwards.
__device__ __forceinline__ void fill_decays(TileDecays& out, const float* log_decays, int stride,
                                            int tokens) {
  const int t = threadIdx.x, lane = t & 31;
  float x = 0.f;
  if (t < S) {
    if (t < tokens) x = log_decays[(i64)t * stride] * 1.44269504f;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float before = __shfl_up_sync(ALL, x, step);
      if (lane >= step) x += before;
    }
    if (lane == 31) out.sums[t / 32] = x;
  }
  __syncthreads();
  if (t < S) {
    for (int w = 0; w < t / 32; ++w) x += out.sums[w];
    out.since[t] = x;
  }
}

// The decays of a lane's two tokens: rows of the products [64, 64] of the row-th warpgroup.
struct TokenDecays {
  float since[2];

  __device__ __forceinline__ TokenDecays(const TileDecays* decays, int row, int warp, int lane) {
    const int token = row * 64 + (warp & 3) * CHUNK + (lane >> 2);
    since[0] = decays->since[token], since[1] = decays->since[token + 8];
  }

  // the decay from the tile's begin to token r
  __device__ __forceinline__ float before(int r) const { return exp2_of(since[r]); }

  // the decay from token r to the tile's end
  __device__ __forceinline__ float after(const TileDecays* decays, int r) const {
    return exp2_of(decays->since[S - 1] - since[r]);
  }

  // The decays between the rows' tokens and those of 16 columns (the t-th of the j-th 64), which come
  // before the rows', or after them if LATER. Other entries may overflow; mask_entries drops them.
  template <bool LATER>
  __device__ __forceinline__ void between(float (&out)[2][4], const TileDecays* decays, int j,
                                          int t, int lane) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float2 columns;  // reloaded each time, because the products need the registers
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(columns.x), "=f"(columns.y)
                   : "r"(shared_address(decays->since + j * 64 + 16 * t + 8 * n + 2 * (lane & 3)))
                   : "memory");
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float log_decay = since[e >> 1] - (e & 1 ? columns.y : columns.x);
        out[n][e] = exp2_of(LATER ? -log_decay : log_decay);
      }
    }
  }
};

// The interface of TokenDecays without decays.
struct NoTokenDecays {
  __device__ __forceinline__ NoTokenDecays(const TileDecays*, int, int, int) {}
  __device__ __forceinline__ float before(int) const { return 1.f; }
  __device__ __forceinline__ float after(const TileDecays*, int) const { return 1.f; }
  template <bool LATER>
  __device__ __forceinline__ void between(float (&out)[2][4], const TileDecays*, int, int,
                                          int) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) out[0][e] = out[1][e] = 1.f;
  }
};

using RowDecays = Select<DECAY, TokenDecays, NoTokenDecays>;

// This lane's part of the dot product of this warp's rows of the matrices x and y.
template <Scalar T>
__device__ __forceinline__ float dot_product(const uint4* x, const uint4* y, int warp, int lane) {
  constexpr int PIECES = CHUNK_BYTES / 16;  // of a chunk
  const int first = (warp / 4 * PANELS * 4 + (warp & 3)) * PIECES + lane;
  float sum = 0.f;
#pragma unroll 1  // more loads at once would need the registers of the products
  for (int n = 0; n < PANELS * PIECES / 32; ++n) {
    const int i = first + n * 32 % PIECES + n * 32 / PIECES * 4 * PIECES;
    const u32 a[4] = {x[i].x, x[i].y, x[i].z, x[i].w}, b[4] = {y[i].x, y[i].y, y[i].z, y[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float a0, a1, b0, b1;
      unpack<T>(a[j], a0, a1);
      unpack<T>(b[j], b0, b1);
      sum += a0 * b0 + a1 * b1;
    }
  }
  return sum;
}

// Stores the flows of this warp's tokens and its share of the flow through the tile's end: `passes`
// of its tokens plus `passed` of this lane. The caller must synchronize the block afterwards.
__device__ __forceinline__ void store_flows(TileDecays& out, const float (&flows)[2],
                                            const float (&passes)[2], float passed, int warp,
                                            int lane) {
  if ((lane & 3) == 0) {
    const int token = warp * CHUNK + (lane >> 2);
    out.flows[token] = flows[0], out.flows[token + 8] = flows[1];
    passed += passes[0] + passes[1];
  }
#pragma unroll
  for (int i = 1; i < 32; i *= 2) passed += __shfl_xor_sync(ALL, passed, i);
  if (lane == 0) out.passed[warp] = passed;
}

// the sum of the flows from this thread's token to the last one of its 32; a barrier must follow
__device__ __forceinline__ float sum_flows(TileDecays& decays) {
  const int t = threadIdx.x, lane = t & 31;
  if (t >= S) return 0.f;
  float x = decays.flows[t];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float later = __shfl_down_sync(ALL, x, step);
    if (lane + step < 32) x += later;
  }
  if (lane == 0) decays.sums[t / 32] = x;
  return x;
}

// Writes the gradients of the tile's log decays from sum_flows's result.
__device__ __forceinline__ void store_decay_gradient(float* to, int stride,
                                                     const TileDecays& decays, float flow,
                                                     int tokens) {
  const int t = threadIdx.x;
  if (t >= S || t >= tokens) return;
  for (int w = t / 32 + 1; w < S / 32; ++w) flow += decays.sums[w];
  for (int w = 0; w < INPUT_WARPS; ++w) flow += decays.passed[w];
  to[(i64)t * stride] = flow;
}

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
