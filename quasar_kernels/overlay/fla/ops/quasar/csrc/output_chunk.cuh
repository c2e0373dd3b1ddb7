// What pass 2 of the segmented scan does with one chunk.
//
// A chunk: D = V - K S, V' = A diag(a) D, O = Q S + tril(Q K^T) V', S += K^T V', with A = (I +
// strict_tril(a K K^T))^-1. Columns of S, V' and O are independent of one another, so a warp owns
// 16 * (4 / WARPS) of them and keeps them in registers, everything transposed: S^T is the A operand
// of D^T = V^T - S^T K^T and of S^T Q^T, V'^T that of V'^T P^T and of V'^T K.
//
// Precision: operands have the inputs' dtype, but the product with the inverse is tf32, and V' is
// the sum of two operands where it enters the state, where its rounding would stay, and the output.

#pragma once

#include "chunk.cuh"
#include "wgmma.cuh"

namespace quasar {

// x as the sum of two operands' tiles
template <Scalar T>
__device__ __forceinline__ void split(const float (&x)[2][4], u32 (&high)[4], u32 (&low)[4]) {
  pack_tiles<T>(high, x[0], x[1]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* from = &x[i >> 1][2 * (i & 1)];
    float left, right;
    unpack<T>(high[i], left, right);
    low[i] = pack_saturated<T>(from[0] - left, from[1] - right);
  }
}

// Phase A: fill `mix` and `scores` of this warp's chunk.
template <Scalar T>
__device__ __forceinline__ void prepare_chunk(u32 key_chunk, u32 query_chunk, float beta,
                                              const BlockMasks& mask, float4 (&mix)[2][32],
                                              uint4 (&scores)[2][32], int lane) {
  float P[2][4] = {};
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    u32 q[4], k[4];
    load_rows(q, row_address(query_chunk, lane) ^ 32 * t);
    load_rows(k, pair_address(key_chunk, lane) ^ 32 * t);
    mma<T>(P[0], q, k[0], k[1]);
    mma<T>(P[1], q, k[2], k[3]);
  }
  ChunkKeys at = {};
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    u32 rows[4], pairs[4];
    load_rows(rows, row_address(key_chunk, lane) ^ 32 * t);
    load_rows(pairs, pair_address(key_chunk, lane) ^ 32 * t);
    add_products<T>(at.gram, rows, pairs);
  }
  find_step_sizes(at, beta, lane);
  float columns[2][2], inverse[2][4];
  spread(at.root, columns, lane);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = (lane >> 2) + 8 * (e >> 1), column = 8 * n + 2 * (lane & 3) + (e & 1);
      if (column > row) P[n][e] = 0.f;
      at.gram[n][e] *= -at.root[e >> 1] * columns[n][e & 1];  // both roots are negative
    }
  }
  u32 high[4], low[4];
  split<T>(P, high, low);
  // as B operands that multiply by P^T: queries 0..7, then 8..15
  scores[0][lane] = make_uint4(high[0], high[2], high[1], high[3]);
  scores[1][lane] = make_uint4(low[0], low[2], low[1], low[3]);
  invert(at.gram, mask, inverse);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      inverse[n][e] = to_tf32(-at.root[e >> 1] * inverse[n][e] * columns[n][e & 1]);
    mix[n][lane] = make_float4(inverse[n][0], inverse[n][1], inverse[n][2], inverse[n][3]);
  }
}

// D += S^T K^T and out = S^T Q^T, the first products of a chunk. On Hopper `out` is left under way
// until write_state.
template <Scalar T, int BLOCKS>
__device__ __forceinline__ void read_state(const float (&state)[BLOCKS][8][4],
                                           float (&D)[BLOCKS][2][4], float (&out)[BLOCKS][2][4],
                                           u32 keys, u32 queries, int lane) {
#if QUASAR_WGMMA
  if constexpr (BLOCKS == 1) {
    u32 s[4][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) pack_tiles<T>(s[t], state[0][2 * t], state[0][2 * t + 1]);
    warpgroup_arrive();
#pragma unroll
    for (int t = 0; t < 4; ++t) wgmma_rows<T>(D[0], s[t], at_columns(tile_descriptor(keys), t));
    warpgroup_commit();
    wgmma_first_rows<T>(out[0], s[0], tile_descriptor(queries));
#pragma unroll
    for (int t = 1; t < 4; ++t)
      wgmma_rows<T>(out[0], s[t], at_columns(tile_descriptor(queries), t));
    warpgroup_commit();
    warpgroup_wait<1>();
    settle(D[0]);
    return;
  }
#endif
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[b][n][e] = 0.f;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    u32 k[4], q[4];
    load_rows(k, pair_address(keys, lane) ^ 32 * t);
    load_rows(q, pair_address(queries, lane) ^ 32 * t);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      u32 s[4];
      pack_tiles<T>(s, state[b][2 * t], state[b][2 * t + 1]);
      mma<T>(D[b][0], s, k[0], k[1]);
      mma<T>(D[b][1], s, k[2], k[3]);
      mma<T>(out[b][0], s, q[0], q[1]);
      mma<T>(out[b][1], s, q[2], q[3]);
    }
  }
}

// state += V'^T K, V' as the sum of two operands. On Hopper it is left under way: finish_state.
template <Scalar T, int BLOCKS>
__device__ __forceinline__ void write_state(float (&state)[BLOCKS][8][4],
                                            const u32 (&high)[BLOCKS][4],
                                            const u32 (&low)[BLOCKS][4],
                                            float (&out)[BLOCKS][2][4], u32 keys, int lane) {
#if QUASAR_WGMMA
  if constexpr (BLOCKS == 1) {
    warpgroup_arrive();
    wgmma_columns<T>(state[0], high[0], tile_descriptor(keys));
    wgmma_columns<T>(state[0], low[0], tile_descriptor(keys));
    warpgroup_commit();
    warpgroup_wait<1>();
    settle(out[0]);
    return;
  }
#endif
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    u32 k[4];
    load_columns(k, row_address(keys, lane) ^ 32 * t);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      mma<T>(state[b][2 * t], high[b], k[0], k[1]);
      mma<T>(state[b][2 * t + 1], high[b], k[2], k[3]);
      mma<T>(state[b][2 * t], low[b], k[0], k[1]);
      mma<T>(state[b][2 * t + 1], low[b], k[2], k[3]);
    }
  }
}

template <int BLOCKS>
__device__ __forceinline__ void finish_state(float (&state)[BLOCKS][8][4]) {
#if QUASAR_WGMMA
  if constexpr (BLOCKS == 1) {
    warpgroup_wait<0>();
    settle(state[0]);
  }
#endif
}

// Phase B: 16 * BLOCKS state columns (`state` is S^T) take one chunk; `out` becomes o^T.
template <Scalar T, int BLOCKS>
__device__ __forceinline__ void walk_chunk(float (&state)[BLOCKS][8][4], float (&out)[BLOCKS][2][4],
                                           u32 keys, u32 queries, u32 values,
                                           const float4 (&mix)[2][32],
                                           const uint4 (&scores)[2][32], int first, int lane) {
  const float4 m0 = mix[0][lane], m1 = mix[1][lane];
  const uint4 p = scores[0][lane], rest = scores[1][lane];
  float D[BLOCKS][2][4];  // -V^T, then -D^T
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    u32 v[4];
    load_columns(v, row_address(values, lane) ^ 32 * (first + b));
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] ^= 0x80008000u;
    unpack<T>(v[0], D[b][0][0], D[b][0][1]);
    unpack<T>(v[1], D[b][1][0], D[b][1][1]);
    unpack<T>(v[2], D[b][0][2], D[b][0][3]);
    unpack<T>(v[3], D[b][1][2], D[b][1][3]);
  }
  finish_state<BLOCKS>(state);
  read_state<T, BLOCKS>(state, D, out, keys, queries, lane);
  u32 high[BLOCKS][4], low[BLOCKS][4];
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    float V[2][4] = {};  // V'^T
    // the inverse is triangular: tokens 0..7 get nothing from tokens 8..15
    mma_tf32(V[0], D[b][0], m0.x, m0.y);
    mma_tf32(V[1], D[b][0], m0.z, m0.w);
    mma_tf32(V[1], D[b][1], m1.z, m1.w);
    split<T>(V, high[b], low[b]);
  }
  write_state<T, BLOCKS>(state, high, low, out, keys, lane);
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    mma<T>(out[b][0], high[b], p.x, p.y);
    mma<T>(out[b][1], high[b], p.z, p.w);
    mma<T>(out[b][0], low[b], p.x, p.y);
    mma<T>(out[b][1], low[b], p.z, p.w);
    mma<T>(out[b][0], high[b], rest.x, rest.y);
    mma<T>(out[b][1], high[b], rest.z, rest.w);
  }
}

// Put 16 columns of a chunk's o, given as o^T, where its values were; `at` is row_address there.
template <Scalar T>
__device__ __forceinline__ void keep_output(u32 at, float scale, float (&out)[2][4], int lane) {
  if (scale != 1.f) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] *= scale;
  }
  u32 x[4];
  pack_tiles<T>(x, out[0], out[1]);
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               :
               : "r"(at), "r"(x[0]), "r"(x[2]), "r"(x[1]), "r"(x[3])
               : "memory");
#else
  // lane l of stmatrix gives the row address of matrix l / 8: tokens 0..7, 8..15, for both halves
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 row = __shfl_sync(ALL, at, 8 * i + (lane >> 2));
    const u32 matrix = x[(i & 1) * 2 + i / 2];
    u32 turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(matrix));
    asm volatile("st.shared.u32 [%0], %1;" : : "r"(row + 4 * (lane & 3)), "r"(turned) : "memory");
  }
#endif
}

}  // namespace quasar
