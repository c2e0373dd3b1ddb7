// What pass 1 of the segmented scan does with one chunk.
//
// The scan runs over the segment backward. From G = I, R = 0, a chunk gives Z = G K^T,
// Y = Z A diag(a), R += Y V, G -= Y K, where A = (I + strict_tril(a K K^T))^-1. Rows of G and R are
// independent of one another, so a warp owns 16 * (4 / WARPS) of them and keeps them in registers.
//
// Precision: errors of G in the directions that keys share little of last for a whole segment, so
// everything that G passes through has 11 bits: keys become fp16 after division by a power of two
// of their own size (exact), |G| <= 1 fits fp16, and Z A a is tf32. Only Y V has bf16 operands.

#pragma once

#include "chunk.cuh"
#include "wgmma.cuh"

namespace quasar {

// Phase A: this warp's chunk: its keys become fp16 in place, and `mix`, `unscale` are filled.
template <Scalar T>
__device__ __forceinline__ void prepare_chunk(u32 chunk, float beta, const BlockMasks& mask,
                                              float4 (&mix)[2][32], float (&unscale)[CHUNK],
                                              int lane) {
  const int g = lane >> 2, c = lane & 3;
  u32 keys[4][4], pairs[4][4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    load_rows(keys[t], row_address(chunk, lane) ^ 32 * t);
    load_rows(pairs[t], pair_address(chunk, lane) ^ 32 * t);
  }
  ChunkKeys at = {};
#pragma unroll
  for (int t = 0; t < 4; ++t) add_products<T>(at.gram, keys[t], pairs[t]);
  find_step_sizes(at, beta, lane);
  __syncwarp();  // every lane has read the keys before one overwrites them

  // 2^-e with 1 <= |k| 2^-e < 2, from the exponent of |k|^2; zero keys stay zero
  float inverse[2], scaled_root[2], root_columns[2][2], scaled_columns[2][2];
  const u32 own = chunk + g * ROW_BYTES + (g << 4) + 4 * c;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int exponent = ((int)(__float_as_uint(at.lambda[r]) >> 23) - 127) >> 1;
    inverse[r] = __uint_as_float((u32)(127 - exponent) << 23);
    scaled_root[r] = at.root[r] * __uint_as_float((u32)(127 + exponent) << 23);
    if (c == 0) unscale[g + 8 * r] = -inverse[r];
  }
#pragma unroll
  for (int t = 0; t < 4; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low, high;
      unpack<T>(keys[t][i], low, high);
      const u32 packed = pack<Scalar::fp16>(low * inverse[i & 1], high * inverse[i & 1]);
      const u32 to = (own ^ (2 * t + (i >> 1)) << 4) + (i & 1) * 8 * ROW_BYTES;
      asm volatile("st.shared.u32 [%0], %1;" : : "r"(to), "r"(packed) : "memory");
    }
  }
  spread(at.root, root_columns, lane);
  spread(scaled_root, scaled_columns, lane);
  float inverse_t[2][4];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e)  // both roots are negative
      at.gram[n][e] *= -at.root[e >> 1] * root_columns[n][e & 1];
  }
  invert<true>(at.gram, mask, inverse_t);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      inverse_t[n][e] = to_tf32(-scaled_root[e >> 1] * inverse_t[n][e] * scaled_columns[n][e & 1]);
    mix[n][lane] = make_float4(inverse_t[n][0], inverse_t[n][1], inverse_t[n][2], inverse_t[n][3]);
  }
}

// 16 rows of -Y, as it multiplies scaled keys, and of Y, as it multiplies values
struct Shares {
  u32 keys[4], values[4];
};

// Y from 16 rows of Z [., 16]; m and u are this lane's `mix` and `unscale`
template <Scalar T>
__device__ __forceinline__ Shares mix_chunk(const float (&Z)[2][4], float4 m0, float4 m1,
                                            float2 u0, float2 u1) {
  constexpr Scalar H = Scalar::fp16;
  float Y[2][4] = {};
  // the inverse is triangular: tokens 8..15 get nothing from tokens 0..7
  mma_tf32(Y[0], Z[0], m0.x, m0.y);
  mma_tf32(Y[1], Z[1], m1.z, m1.w);
  mma_tf32(Y[0], Z[1], m1.x, m1.y);
  return {{pack<H>(Y[0][0], Y[0][1]), pack<H>(Y[0][2], Y[0][3]), pack<H>(Y[1][0], Y[1][1]),
           pack<H>(Y[1][2], Y[1][3])},
          {pack_saturated<T>(Y[0][0] * u0.x, Y[0][1] * u0.y),
           pack_saturated<T>(Y[0][2] * u0.x, Y[0][3] * u0.y),
           pack_saturated<T>(Y[1][0] * u1.x, Y[1][1] * u1.y),
           pack_saturated<T>(Y[1][2] * u1.x, Y[1][3] * u1.y)}};
}

// columns 16 t .. 16 t + 15 of 16 rows as an A operand
__device__ __forceinline__ void pack_rows(u32 (&out)[4], const float (&rows)[8][4], int t) {
  constexpr Scalar H = Scalar::fp16;  // |G| <= 1
  out[0] = pack<H>(rows[2 * t][0], rows[2 * t][1]);
  out[1] = pack<H>(rows[2 * t][2], rows[2 * t][3]);
  out[2] = pack<H>(rows[2 * t + 1][0], rows[2 * t + 1][1]);
  out[3] = pack<H>(rows[2 * t + 1][2], rows[2 * t + 1][3]);
}

// Phase B: 16 * BLOCKS rows of G and R absorb one prepared chunk.
template <Scalar T, int BLOCKS>
__device__ __forceinline__ void absorb_chunk(float (&G)[BLOCKS][8][4], float (&R)[BLOCKS][8][4],
                                             u32 keys, u32 values, const float4 (&mix)[2][32],
                                             const float (&unscale)[CHUNK], int lane) {
  constexpr Scalar H = Scalar::fp16;
  const float4 m0 = mix[0][lane], m1 = mix[1][lane];
  const float2 u0 = *(const float2*)&unscale[2 * (lane & 3)];
  const float2 u1 = *(const float2*)&unscale[8 + 2 * (lane & 3)];
  Shares Y[BLOCKS];
#if QUASAR_WGMMA
  if constexpr (BLOCKS == 1) {
    float Z[1][2][4];
    u32 rows[4][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) pack_rows(rows[t], G[0], t);
    warpgroup_arrive();
    wgmma_first_rows<H>(Z[0], rows[0], tile_descriptor(keys));
#pragma unroll
    for (int t = 1; t < 4; ++t) wgmma_rows<H>(Z[0], rows[t], at_columns(tile_descriptor(keys), t));
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(Z[0]);
    settle(R[0]);
    Y[0] = mix_chunk<T>(Z[0], m0, m1, u0, u1);
    warpgroup_arrive();
    wgmma_columns<H>(G[0], Y[0].keys, tile_descriptor(keys));
    warpgroup_commit();
    wgmma_columns<T>(R[0], Y[0].values, tile_descriptor(values));
    warpgroup_commit();
    warpgroup_wait<1>();  // R is not needed before the next wait
    settle(G[0]);
    return;
  }
#endif
  float Z[BLOCKS][2][4] = {};
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    u32 k[4];
    load_rows(k, pair_address(keys, lane) ^ 32 * t);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      u32 rows[4];
      pack_rows(rows, G[b], t);
      mma<H>(Z[b][0], rows, k[0], k[1]);
      mma<H>(Z[b][1], rows, k[2], k[3]);
    }
  }
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) Y[b] = mix_chunk<T>(Z[b], m0, m1, u0, u1);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    u32 k[4], v[4];
    load_columns(k, row_address(keys, lane) ^ 32 * t);
    load_columns(v, row_address(values, lane) ^ 32 * t);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      mma<H>(G[b][2 * t], Y[b].keys, k[0], k[1]);
      mma<H>(G[b][2 * t + 1], Y[b].keys, k[2], k[3]);
      mma<T>(R[b][2 * t], Y[b].values, v[0], v[1]);
      mma<T>(R[b][2 * t + 1], Y[b].values, v[2], v[3]);
    }
  }
}

}  // namespace quasar
