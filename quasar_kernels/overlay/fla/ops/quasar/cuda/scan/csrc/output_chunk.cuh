// The update of the state by one chunk, and its outputs, for segment_output.cu.
//
//     D = V - K S,  V' = A diag(a) D,  O = Q S + tril(Q K^T) V',  S += K^T V',
// where A diag(a) is the WY representation's matrix (chunk.cuh). Columns of S, V' and O are
// independent, so each warp owns 16 * BLOCKS columns and keeps them in registers. All matrices are
// transposed: -S^T is the A operand of [D^T, -O^T] = [V^T, 0] - S^T [K^T, Q^T], and -V'^T is the A
// operand of -V'^T tril(Q K^T)^T and of -V'^T K.
//
// Precision: operands of the large products have the inputs' dtype. The small products, with the WY
// matrix and the scores, are tf32. V' enters the state as the sum of two operands, because its
// rounding error would persist there.

#pragma once

#include "chunk.cuh"
#include "../../csrc/wgmma.cuh"

namespace quasar::scan {

// A chunk's keys and queries in shared memory: for each panel of channels, a tile of 16 rows of
// keys, followed by a tile of 16 rows of queries.
struct KeysQueries {
  static constexpr int BYTES = PANELS * 2 * CHUNK_BYTES;
  u32 address;

  __device__ __forceinline__ u32 keys(int panel) const { return address + panel * 2 * CHUNK_BYTES; }
  __device__ __forceinline__ u32 queries(int panel) const { return keys(panel) + CHUNK_BYTES; }
};

// Fragments of a lower triangular matrix [16, 16]: its left half, and its lower right block.
struct Triangle {
  float4 left[32];
  float2 corner[32];
};

__device__ __forceinline__ void store_triangle(Triangle& out, const float (&x)[2][4], int lane) {
  out.left[lane] =
      make_float4(to_tf32(x[0][0]), to_tf32(x[0][1]), to_tf32(x[0][2]), to_tf32(x[0][3]));
  out.corner[lane] = make_float2(to_tf32(x[1][2]), to_tf32(x[1][3]));
}

// d += x triangle^T in tf32; the triangle's block (0, 1) is zero
__device__ __forceinline__ void multiply(float (&d0)[4], float (&d1)[4], const float (&x0)[4],
                                         const float (&x1)[4], float4 left, float2 corner) {
  mma_tf32(d0, x0, left.x, left.y);
  mma_tf32(d1, x0, left.z, left.w);
  mma_tf32(d1, x1, corner.x, corner.y);
}

// d += (V - K S)^T wy^T, which is -V'^T, for 16 columns, from the values of load_columns and from
// read = -S^T K^T.
template <Scalar T>
__device__ __forceinline__ void add_values(float (&d)[2][4], const u32 (&values)[4],
                                           const float (&read0)[4], const float (&read1)[4],
                                           float4 left, float2 corner) {
  float D[2][4];
  unpack_columns<T>(values, D);
#pragma unroll
  for (int e = 0; e < 4; ++e) D[0][e] += read0[e], D[1][e] += read1[e];
  multiply(d[0], d[1], D[0], D[1], left, corner);
}

// Computes the WY matrix -A diag(a) and the scores tril(Q K^T) of this warp's chunk.
template <Scalar T>
__device__ __forceinline__ void prepare_chunk(KeysQueries chunk, const Steps& steps,
                                              const BlockMasks& mask, Triangle& wy,
                                              Triangle& scores, ChunkDecays& chunk_decays,
                                              int lane) {
  ChunkKeys at = {};
  float P[2][4] = {};
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      u32 k[4], q[4];
      load_rows(k, row_address(chunk.keys(p), lane) ^ 32 * t);
      load_rows(q, row_address(chunk.queries(p), lane) ^ 32 * t);
      add_products<T>(at.gram, k, k);
      add_products<T>(P, q, k);
    }
  compute_step_sizes(at, steps, lane);
#pragma unroll
  for (int e = 0; e < 2; ++e)
    if (2 * (lane & 3) + e > lane >> 2) P[0][e] = P[1][2 + e] = 0.f;
  const Decays decays(steps, lane);
  decays.apply(P);
  chunk_decays.store(decays, lane);
  store_triangle(scores, P, lane);
  float wy_matrix[2][4];
  compute_wy(at, mask, wy_matrix, lane);
  decays.apply(wy_matrix);
  store_triangle(wy, wy_matrix, lane);
}

// x as the sum of two operands
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

typedef Accumulators StateColumns;  // 16 columns of -S, transposed: tiles hold keys' channels

// read = -S^T [K^T, Q^T]: two tiles of tokens each
template <Scalar T, int BLOCKS>
__device__ __forceinline__ void read_state(const StateColumns (&state)[BLOCKS],
                                           float (&read)[BLOCKS][4][4], KeysQueries chunk,
                                           int lane) {
#if QUASAR_WGMMA
  if constexpr (BLOCKS == 1) {
    u32 s[PANELS][4][4];
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
#pragma unroll
      for (int t = 0; t < 4; ++t)
        pack_tiles<T>(s[p][t], state[0][p][2 * t], state[0][p][2 * t + 1]);
    warpgroup_arrive();
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const u64 rows = at_columns(tile_descriptor(chunk.keys(p)), t);
        if (p + t == 0)
          wgmma_rows<T, true>(read[0], s[p][t], rows);
        else
          wgmma_rows<T>(read[0], s[p][t], rows);
      }
    warpgroup_commit();
    warpgroup_wait<0>();
    warpgroup_fence_operand(read[0]);
    return;
  }
#endif
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) clear(read[b]);
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      u32 k[4], q[4];
      load_rows(k, pair_address(chunk.keys(p), lane) ^ 32 * t);
      load_rows(q, pair_address(chunk.queries(p), lane) ^ 32 * t);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        u32 s[4];
        pack_tiles<T>(s, state[b][p][2 * t], state[b][p][2 * t + 1]);
        mma<T>(read[b][0], s, k[0], k[1]);
        mma<T>(read[b][1], s, k[2], k[3]);
        mma<T>(read[b][2], s, q[0], q[1]);
        mma<T>(read[b][3], s, q[2], q[3]);
      }
    }
}

// state -= V'^T K, with V' as the sum of two operands. On Hopper the products are asynchronous, and
// finish_state waits for them.
template <Scalar T, int BLOCKS>
__device__ __forceinline__ void write_state(StateColumns (&state)[BLOCKS],
                                            const u32 (&high)[BLOCKS][4],
                                            const u32 (&low)[BLOCKS][4], KeysQueries chunk,
                                            int lane) {
#if QUASAR_WGMMA
  if constexpr (BLOCKS == 1) {
    warpgroup_arrive();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) {
      wgmma_columns<T>(state[0][p], high[0], tile_descriptor(chunk.keys(p)));
      wgmma_columns<T>(state[0][p], low[0], tile_descriptor(chunk.keys(p)));
    }
    warpgroup_commit();
    return;
  }
#endif
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      u32 k[4];
      load_columns(k, row_address(chunk.keys(p), lane) ^ 32 * t);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        mma<T>(state[b][p][2 * t], high[b], k[0], k[1]);
        mma<T>(state[b][p][2 * t + 1], high[b], k[2], k[3]);
        mma<T>(state[b][p][2 * t], low[b], k[0], k[1]);
        mma<T>(state[b][p][2 * t + 1], low[b], k[2], k[3]);
      }
    }
}

template <int BLOCKS>
__device__ __forceinline__ void finish_state(StateColumns (&state)[BLOCKS]) {
#if QUASAR_WGMMA
  if constexpr (BLOCKS == 1) {
    warpgroup_wait<0>();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) warpgroup_fence_operand(state[0][p]);
  }
#endif
}

// a warp's largest magnitude; NaN counts as infinite
template <int BLOCKS>
__device__ __forceinline__ float largest(const StateColumns (&state)[BLOCKS]) {
  u32 most = 0;  // magnitudes are ordered like their bits
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
    for_each_element([&](int p, int m, int e) {
      most = max(most, __float_as_uint(state[b][p][m][e]) & 0x7fffffffu);
    });
  return __uint_as_float(min(__reduce_max_sync(ALL, most), 0x7f800000u));
}

// Overwrites 16 columns of a chunk's values by o, from -O^T; `at` is their row_address.
template <Scalar T>
__device__ __forceinline__ void store_output(u32 at, float scale, float (&left)[4],
                                             float (&right)[4], int lane) {
  if (scale != 1.f) {
#pragma unroll
    for (int e = 0; e < 4; ++e) left[e] *= scale, right[e] *= scale;
  }
  u32 x[4];
  pack_tiles<T>(x, left, right);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] ^= 0x80008000u;
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               :
               : "r"(at), "r"(x[0]), "r"(x[2]), "r"(x[1]), "r"(x[3])
               : "memory");
#else
  // as in stmatrix, lane l has the row address of matrix l / 8: tokens 0..7, 8..15, of both halves
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

// Updates 16 * BLOCKS state columns with one chunk, and overwrites its values by o. `values` is
// their row_address at the first column.
template <Scalar T, int BLOCKS>
__device__ __forceinline__ void walk_chunk(StateColumns (&state)[BLOCKS], KeysQueries chunk,
                                           u32 values, const Triangle& wy, const Triangle& scores,
                                           const ChunkDecays& chunk_decays, float scale, int lane) {
  u32 v[BLOCKS][4];
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) load_columns(v[b], values ^ 32 * b);
  const float4 m = wy.left[lane], s = scores.left[lane];
  const float2 m_corner = wy.corner[lane], s_corner = scores.corner[lane];
  finish_state<BLOCKS>(state);
  float read[BLOCKS][4][4];
  read_state<T, BLOCKS>(state, read, chunk, lane);
  const auto decays = chunk_decays.load(lane);
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    decays.scale_before(read[b][0], read[b][1]);
    decays.scale_before(read[b][2], read[b][3]);
    for_each_element([&](int p, int m, int e) { chunk_decays.scale_state(state[b][p][m][e]); });
  }
  float V[BLOCKS][2][4] = {};  // -V'^T
  u32 high[BLOCKS][4], low[BLOCKS][4];
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    add_values<T>(V[b], v[b], read[b][0], read[b][1], m, m_corner);
    float written[2][4];  // V' at the chunk's end
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) written[n][e] = V[b][n][e];
    decays.scale_after(written[0], written[1]);
    split<T>(written, high[b], low[b]);
  }
  write_state<T, BLOCKS>(state, high, low, chunk, lane);
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) V[b][n][e] = to_tf32(V[b][n][e]);
    multiply(read[b][2], read[b][3], V[b][0], V[b][1], s, s_corner);
    store_output<T>(values ^ 32 * b, scale, read[b][2], read[b][3], lane);
  }
}

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
