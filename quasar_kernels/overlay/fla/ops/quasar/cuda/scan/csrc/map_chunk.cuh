// The update of a segment's affine map by one chunk, for segment_map.cu.
//
// The segment is processed backward. From G = I, R = 0 a chunk gives
//     Z = G K^T,  Y = Z A diag(a),  R += Y V,  G -= Y K,
// where A diag(a) is the WY representation's matrix (chunk.cuh). Rows of G and R are independent,
// so each warp owns 16 rows and keeps them in registers.
//
// Precision: in directions in which keys have small components, errors of G persist over a whole
// segment. All operands that affect G therefore have 11 significant bits. Each key is divided by a
// power of two near its norm, which is exact, and converted to fp16. |G| <= 1 fits fp16, and so do
// Z and A diag(a) for the scaled keys. Only Y V has bf16 operands. If keys are alike, Z is a small
// difference, for which G near 1 on its diagonal has too few digits. Each row of G is therefore
// stored as G - I while it is closer to I's row than to 0, with Z = K^T + (G - I) K^T.
// Each row switches from G - I to G when its diagonal drops below 1/2. This avoids cancellation
// early, when G is near I, and late, when G - I is near -I. Rows switch independently, because
// channels with small keys stay near I for long.

#pragma once

#include "chunk.cuh"
#include "../../csrc/wgmma.cuh"

namespace quasar::scan {

constexpr int MAP_WARPS = 4;
// A tile has one chunk for each warp; in shared memory, its panels of channels are adjacent.
constexpr u32 MAP_PANEL_BYTES = MAP_WARPS * CHUNK_BYTES;

__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float((u32)(127 + exponent) << 23);
}

// two entries of a key times 2^-e, in fp16
template <Scalar T>
__device__ __forceinline__ u32 scale_keys(u32 pair, float power) {
  float low, high;
  if (T == Scalar::bf16) {  // a bf16 product with a power of two is exact
    const u32 powers = __byte_perm(__float_as_uint(power), 0, 0x3232);
    unpack<T>(multiply_bf16(pair, powers), low, high);
    return pack<Scalar::fp16>(low, high);
  }
  unpack<T>(pair, low, high);
  return pack<Scalar::fp16>(low * power, high * power);
}

// Scale factors of one chunk; [r] belongs to token g + 8 r.
struct Scales {
  float power[2], root[2];  // 2^-e with 1 <= |k| 2^-e < 2; -sqrt(step size) 2^e
  float descale;            // 1 / scale

  __device__ __forceinline__ Scales(const ChunkKeys& at, const Steps& steps) {
    const float bound = steps.wy_bound(at.lambda);
    descale = __uint_as_float(__float_as_uint(bound) & 0x7f800000u);
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // from the exponent of |k|^2; zero keys stay zero
      const int e = ((int)(__float_as_uint(at.lambda[r]) >> 23) - 127) >> 1;
      power[r] = power_of_two(-e);
      root[r] = at.root[r] * power_of_two(e);
    }
  }

  __device__ __forceinline__ float scale() const {
    return __uint_as_float(0x7f000000u - __float_as_uint(descale));
  }
};

// ---- the shared data of a prepared chunk: one policy without decays, one with ----

// With keys k~ = 2^-e k, the products are Z = G K~^T, Y = Z wy / scale, G -= Y K~ and
// R += Y diag(2^-e) V. `scale`, a power of two, brings the largest entry of `wy` near 1,
// because small keys have small entries, which fp16 could not hold.
struct PlainPrepared {
  uint4 wy[32];       // per lane: 3 registers of scale 2^e A diag(a) 2^e; -1 / scale twice
  u32 unscale[4][2];  // 2^-e / scale in bf16 of tokens 2c, 2c + 1 and 2c + 8, 2c + 9
};

struct DecayedPrepared {
  uint4 wy[32];
  float4 unscale[4];  // 2^-e / scale, times the decay from the token to the chunk's end
  float log_whole;    // log2 of the chunk's decay
};

using Prepared = Select<DECAY, DecayedPrepared, PlainPrepared>;

__device__ __forceinline__ void store_unscale(PlainPrepared& out, const Scales& scales,
                                              const NoDecays&, int lane) {
  const int g = lane >> 2;
  if ((lane & 3) == 0) {
    unsigned short* unscale = (unsigned short*)out.unscale + (g >> 1) * 4 + (g & 1);
    unscale[0] = __float_as_uint(scales.power[0] * scales.descale) >> 16;
    unscale[2] = __float_as_uint(scales.power[1] * scales.descale) >> 16;
  }
}

__device__ __forceinline__ void store_unscale(DecayedPrepared& out, const Scales& scales,
                                              const RunningDecays& decays, int lane) {
  const int g = lane >> 2;
  if ((lane & 3) == 0) {
    float* unscale = (float*)out.unscale + (g >> 1) * 4 + (g & 1);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      unscale[2 * r] = scales.power[r] * scales.descale * exp2_of(decays.whole - decays.since[r]);
    if (lane == 0) out.log_whole = decays.whole;
  }
}

// A lane's `unscale`. With decays, `log_decay_behind` (see absorb_chunk) is applied and updated.
__device__ __forceinline__ uint2 load_unscale(const PlainPrepared& chunk, float&, int lane) {
  return *(const uint2*)chunk.unscale[lane & 3];
}

__device__ __forceinline__ float4 load_unscale(const DecayedPrepared& chunk,
                                               float& log_decay_behind, int lane) {
  float4 u = chunk.unscale[lane & 3];
  const float decay = exp2_of(log_decay_behind);
  u.x *= decay, u.y *= decay, u.z *= decay, u.w *= decay;
  log_decay_behind += chunk.log_whole;
  return u;
}

// tokens 8 n + 2c, 8 n + 2c + 1 of Y, as an operand
template <Scalar T>
__device__ __forceinline__ u32 unscaled(float low, float high, const uint2& u, int n) {
  const u32 factors = n ? u.y : u.x;
  if (T == Scalar::bf16) return multiply_bf16(pack<T>(low, high), factors);
  float x, y;
  unpack<Scalar::bf16>(factors, x, y);
  return pack_saturated<T>(low * x, high * y);
}

template <Scalar T>
__device__ __forceinline__ u32 unscaled(float low, float high, const float4& u, int n) {
  return pack_saturated<T>(low * (n ? u.z : u.x), high * (n ? u.w : u.y));
}

// computes `wy` and `unscale` from the chunk's products
__device__ __forceinline__ void store_prepared(Prepared& out, ChunkKeys& at, const Scales& scales,
                                               const BlockMasks& mask, const Decays& decays,
                                               int lane) {
  constexpr Scalar H = Scalar::fp16;
  store_unscale(out, scales, decays, lane);
  float columns[2][2];
  rows_to_columns(at.root, columns, lane);
  scale_by_roots(at.gram, at.root, columns);
  u32 wy[3];
  invert_transposed(at.gram, mask, wy);
  rows_to_columns(scales.root, columns, lane);
#pragma unroll
  for (int i = 0; i < 3; ++i) {  // blocks (0, 0), (0, 1) and (1, 1)
    const float row = scales.root[i >> 1] * scales.scale(), *column = columns[(i + 1) >> 1];
    wy[i] = multiply_fp16(wy[i], pack<H>(row * column[0], row * column[1]));
  }
  out.wy[lane] = make_uint4(wy[0], wy[1], wy[2], pack<H>(-scales.descale, -scales.descale));
}

// Prepares this warp's chunk: converts its keys to scaled fp16 in place, and fills `out`.
template <Scalar T>
__device__ __forceinline__ void prepare_chunk(u32 chunk, const Steps& steps, const BlockMasks& mask,
                                              Prepared& out, int lane) {
  const u32 rows = row_address(chunk, lane);
  constexpr int PIECES = 4 * PANELS;  // of 16 columns
  u32 keys[PIECES][4];
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    load_rows(keys[i], (rows ^ 32 * (i % 4)) + i / 4 * MAP_PANEL_BYTES);
  ChunkKeys at = {};
#pragma unroll
  for (int i = 0; i < PIECES; ++i) add_products<T>(at.gram, keys[i], keys[i]);
  compute_step_sizes(at, steps, lane);
  const Scales scales(at, steps);
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int panel = i / 4 * MAP_PANEL_BYTES, t = i % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) keys[i][j] = scale_keys<T>(keys[i][j], scales.power[j & 1]);
    store_rows(keys[i], (rows ^ 32 * t) + panel, chunk + panel, t, lane);
  }
  store_prepared(out, at, scales, mask, Decays(steps, lane), lane);
}

// 16 rows of Y as operands: negated for G's product with keys, and for R's product with values
struct YOperands {
  u32 keys[4], values[4];
};

// Y from 16 rows of Z [., 16]; m and unscale are this lane's parts of the prepared chunk
template <Scalar T, class Factors>
__device__ __forceinline__ YOperands apply_wy(const float (&Z)[2][4], const uint4& m,
                                              const Factors& unscale) {
  constexpr Scalar H = Scalar::fp16;
  float Y[2][4] = {};
  const u32 z[4] = {pack<H>(Z[0][0], Z[0][1]), pack<H>(Z[0][2], Z[0][3]), pack<H>(Z[1][0], Z[1][1]),
                    pack<H>(Z[1][2], Z[1][3])};
  // the matrix is triangular, so its block (1, 0) is zero
  mma<H>(Y[0], z, m.x, m.y);
  mma_half<H>(Y[1], z[2], z[3], m.z);
  YOperands out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = Y[i >> 1][2 * (i & 1)], high = Y[i >> 1][2 * (i & 1) + 1];
    out.keys[i] = multiply_fp16(pack<H>(low, high), m.w);
    out.values[i] = unscaled<T>(low, high, unscale, i >> 1);
  }
  return out;
}

// columns 16 t .. 16 t + 15 of 16 rows as an A operand
__device__ __forceinline__ void pack_rows(u32 (&out)[4], const float (&rows)[8][4], int t) {
  constexpr Scalar H = Scalar::fp16;  // |G| <= 1
  out[0] = pack<H>(rows[2 * t][0], rows[2 * t][1]);
  out[1] = pack<H>(rows[2 * t][2], rows[2 * t][3]);
  out[2] = pack<H>(rows[2 * t + 1][0], rows[2 * t + 1][1]);
  out[3] = pack<H>(rows[2 * t + 1][2], rows[2 * t + 1][3]);
}

typedef Accumulators MapRows;  // 16 rows of G or R

// For this lane's rows g and g + 8 of G: ALL if the row is stored as G - I, otherwise 0.
typedef u32 NearIdentity[2];

// 16 rows of a chunk's K~^T, masked by `near`. `at` is row_address of their panel, XOR 32 t
// for its t-th group of 16 rows.
__device__ __forceinline__ void load_channels(float (&out)[2][4], u32 at,
                                              const NearIdentity& near) {
  u32 k[4];
  load_columns(k, at);
#pragma unroll
  for (int i = 0; i < 4; ++i) k[i] &= near[i >> 1];
  unpack_columns<Scalar::fp16>(k, out);
}

// Calls f(x, here) for each element of rows g + 8 HALF that can be on the diagonal of G. `here` is
// true if this lane's element is on the diagonal; `row` is the warp's first row.
template <int HALF, class Rows, class F>
__device__ __forceinline__ void for_diagonal(Rows& G, int row, int lane, const F& f) {
  const int odd = lane >> 2 & 1;
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int m = HALF; m < 8; m += 2) {
      const bool crossed = row / 8 + HALF == 8 * p + m && lane >> 3 == (lane & 3);
      f(G[p][m][2 * HALF], crossed && !odd);
      f(G[p][m][2 * HALF + 1], crossed && odd);
    }
}

// Switches rows g + 8 HALF from G - I to G if their diagonal element is at most `bound`.
template <int HALF>
__device__ __forceinline__ void switch_rows(MapRows& G, NearIdentity& near, float bound, int row,
                                            int lane) {
  u32 x = 0;
  for_diagonal<HALF>(G, row, lane,
                     [&](float value, bool here) { x |= here ? __float_as_uint(value) : 0; });
  const int owner = (lane & 28) | lane >> 3;  // of the diagonal's element
  const float diagonal = __uint_as_float(__shfl_sync(ALL, x, owner));
  const bool leaves = near[HALF] && diagonal <= bound;
  for_diagonal<HALF>(G, row, lane,
                     [&](float& value, bool here) { value += leaves && here ? 1.f : 0.f; });
  if (leaves) near[HALF] = 0;
}

// whether in each of these rows of G the sum of magnitudes is less than `bound`
__device__ __forceinline__ bool is_below(const MapRows& G, float bound) {
  float sums[2] = {};
  for_each_element([&](int p, int m, int e) { sums[e >> 1] += fabsf(G[p][m][e]); });
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sums[r] += __shfl_xor_sync(ALL, sums[r], 1);
    sums[r] += __shfl_xor_sync(ALL, sums[r], 2);
  }
  return sums[0] < bound && sums[1] < bound;  // false for NaN
}

// Updates 16 rows of G and R with one prepared chunk. The `near` rows are stored as G - I; there
// are such rows only if ANY_NEAR. `own` is the address of the same rows of K~^T for load_channels.
// On Hopper the update of R runs asynchronously; finish_rows waits for it. G is stored without
// decays, which scale all of it. `log_decay_behind` is the logarithm (base 2) of the decay over the
// chunks that were processed before, which follow this one in the sequence.
template <Scalar T, bool ANY_NEAR>
__device__ __forceinline__ void absorb_chunk(MapRows& G, MapRows& R, const NearIdentity& near,
                                             u32 keys, u32 own, u32 values, const Prepared& chunk,
                                             float& log_decay_behind, int lane) {
  constexpr Scalar H = Scalar::fp16;
  const uint4 m = chunk.wy[lane];
  const auto u = load_unscale(chunk, log_decay_behind, lane);
  float Z[2][4] = {};
  if (ANY_NEAR) load_channels(Z, own, near);
#if QUASAR_WGMMA
  u32 rows[4 * PANELS][4];
#pragma unroll
  for (int i = 0; i < 4 * PANELS; ++i) pack_rows(rows[i], G[i / 4], i % 4);
  warpgroup_arrive();
#pragma unroll
  for (int i = 0; i < 4 * PANELS; ++i) {
    const u64 columns = at_columns(tile_descriptor(keys + i / 4 * MAP_PANEL_BYTES), i % 4);
    if (i == 0 && !ANY_NEAR)
      wgmma_rows<H, true>(Z, rows[i], columns);
    else
      wgmma_rows<H>(Z, rows[i], columns);
  }
  warpgroup_commit();
  warpgroup_wait<0>();
  warpgroup_fence_operand(Z);
#pragma unroll
  for (int p = 0; p < PANELS; ++p) warpgroup_fence_operand(R[p]);
  const YOperands Y = apply_wy<T>(Z, m, u);
  warpgroup_arrive();
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
    wgmma_columns<H>(G[p], Y.keys, tile_descriptor(keys + p * MAP_PANEL_BYTES));
  warpgroup_commit();
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
    wgmma_columns<T>(R[p], Y.values, tile_descriptor(values + p * MAP_PANEL_BYTES));
  warpgroup_commit();
  warpgroup_wait<1>();  // R is not needed before the next wait
#pragma unroll
  for (int p = 0; p < PANELS; ++p) warpgroup_fence_operand(G[p]);
#else
#pragma unroll
  for (int i = 0; i < 4 * PANELS; ++i) {
    const int p = i / 4, t = i % 4;
    u32 k[4], rows[4];
    load_rows(k, pair_address(keys + p * MAP_PANEL_BYTES, lane) ^ 32 * t);
    pack_rows(rows, G[p], t);
    mma<H>(Z[0], rows, k[0], k[1]);
    mma<H>(Z[1], rows, k[2], k[3]);
  }
  const YOperands Y = apply_wy<T>(Z, m, u);
#pragma unroll
  for (int i = 0; i < 4 * PANELS; ++i) {
    const int p = i / 4, t = i % 4;
    u32 k[4], v[4];
    load_columns(k, row_address(keys + p * MAP_PANEL_BYTES, lane) ^ 32 * t);
    load_columns(v, row_address(values + p * MAP_PANEL_BYTES, lane) ^ 32 * t);
    mma<H>(G[p][2 * t], Y.keys, k[0], k[1]);
    mma<H>(G[p][2 * t + 1], Y.keys, k[2], k[3]);
    mma<T>(R[p][2 * t], Y.values, v[0], v[1]);
    mma<T>(R[p][2 * t + 1], Y.values, v[2], v[3]);
  }
#endif
}

__device__ __forceinline__ void finish_rows(MapRows& R) {
#if QUASAR_WGMMA
  warpgroup_wait<0>();
#pragma unroll
  for (int p = 0; p < PANELS; ++p) warpgroup_fence_operand(R[p]);
#endif
}

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
