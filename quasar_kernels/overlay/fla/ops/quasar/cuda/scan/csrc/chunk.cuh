// Computations inside one chunk that do not involve the state: step sizes, decays and the WY
// representation.
//
// Q, K, V are a chunk's rows, a its step sizes. The WY representation (UT transform) turns 16
// sequential rank-1 updates into matrix products by the matrix
//     A diag(a),  A = (I + strict_tril(a K K^T))^-1.
// One warp computes it for one chunk, in registers.

#pragma once

#include "segments.cuh"

namespace quasar::scan {

// (1 - exp(-beta lambda)) / (lambda + 1e-8), by a series where the difference would cancel
__device__ __forceinline__ float step_size(float lambda, float beta) {
  const float x = beta * lambda;
  const float series = x * (1.f - x * (0.5f - x * (1.f / 6.f)));
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(lambda + 1e-8f));
  return (x < 0.03f ? series : 1.f - power) * inverse;
}

// ---- step sizes: one policy reads them, the other computes them from the keys ----

// The step sizes and, in calls with decays, the log decays of a chunk's tokens. Lane (g, c) holds
// one value of token g + 8 (c & 1): the step size, or with decays for c > 1 the log decay.
struct ReadSteps {
  float value;

  // the step size of token g + 8 r; this policy ignores lambda = |k|^2
  __device__ __forceinline__ float size(int r, float) const {
    return __shfl_sync(ALL, value, r, 4);
  }
  // base 2
  __device__ __forceinline__ float log_decay(int r) const {
    return __shfl_sync(ALL, value, 2 + r, 4) * 1.44269504f;
  }
  // an upper bound of the absolute entries of the WY representation's matrix for keys of length 1
  __device__ __forceinline__ float wy_bound(const float (&lambda)[2]) const {
    const float own = fmaxf(size(0, lambda[0]) * lambda[0], size(1, lambda[1]) * lambda[1]);
    return __uint_as_float(__reduce_max_sync(ALL, __float_as_uint(own)));
  }
};

// A segment's step sizes and log decays of one head, read from device memory one tile ahead.
struct ReadStepSizes {
  const float* at;    // the value of this lane's token of the segment's first chunk
  int heads, tokens;  // heads of the call; tokens of the segment from this lane's token on

  template <class Args>
  __device__ __forceinline__ ReadStepSizes(const Args& arg, const Segment& segment, int head,
                                           int lane)
      : heads(arg.heads) {
    const int own = (lane >> 2) + 8 * (lane & 1);
    at = (DECAY && lane & 2 ? arg.decay : arg.beta) + entry_of(arg, segment, head, own);
    tokens = segment.tokens - own;
  }

  // the values of the chunk that begins at `token` of the segment; zeros outside of the segment
  __device__ __forceinline__ ReadSteps of(int token) const {
    return {token >= 0 && token < tokens ? at[(i64)token * heads] : 0.f};
  }
};

// The same interfaces, computed from a head's beta.
struct ComputedSteps {
  float beta;

  __device__ __forceinline__ float size(int, float lambda) const { return step_size(lambda, beta); }
  // an upper bound of 1 - exp(-beta |k|^2), which is at most beta |k|^2 and at most 1
  __device__ __forceinline__ float wy_bound(const float (&lambda)[2]) const {
    const u32 largest =
        __reduce_max_sync(ALL, max(__float_as_uint(lambda[0]), __float_as_uint(lambda[1])));
    return fminf(beta * __uint_as_float(largest), 1.f);
  }
};

struct ComputedStepSizes {
  float beta;

  template <class Args>
  __device__ __forceinline__ ComputedStepSizes(const Args& arg, const Segment&, int head, int)
      : beta(arg.beta[head]) {}
  __device__ __forceinline__ ComputedSteps of(int) const { return {beta}; }
};

using Steps = Select<READ_STEP, ReadSteps, ComputedSteps>;
using StepSizes = Select<READ_STEP, ReadStepSizes, ComputedStepSizes>;

// Bit masks over one 8 x 8 block, of which a lane has elements (g, 2c) and (g, 2c+1) in one
// register. Each mask selects those of the two that belong to a part of the block.
struct BlockMasks {
  u32 one, pair_below, pair_above, four, eight;

  __device__ __forceinline__ explicit BlockMasks(int lane) {
    const int g = lane >> 2, c = lane & 3;
    one = g == 2 * c ? 0x00003c00u : g == 2 * c + 1 ? 0x3c000000u : 0u;  // the identity in fp16
    pair_below = (g & 1) && c == g >> 1 ? 0x0000ffffu : 0u;
    pair_above = !(g & 1) && c == g >> 1 ? 0xffff0000u : 0u;
    four = (g & 2) && c == (g >> 2) * 2 ? ALL : 0u;  // the 4 x 4 blocks' lower left 2 x 2
    eight = g >= 4 && c < 2 ? ALL : 0u;
  }
};

// One chunk's products of keys (gram = K K^T), their squared norms, and the roots of step sizes.
struct ChunkKeys {
  float gram[2][4];
  float lambda[2], root[2];  // of tokens g and g + 8: |k|^2, and -sqrt(step size)
};

// d [16, 16] += a b^T. Both are 16 columns of 16 tokens, loaded at row_address. This works because
// a quarter of an A operand is laid out as a B operand of its transpose.
template <Scalar T>
__device__ __forceinline__ void add_products(float (&d)[2][4], const u32 (&a)[4],
                                             const u32 (&b)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    mma_half<T>(d[0], a[i], a[i + 1], b[i]);
    mma_half<T>(d[1], a[i], a[i + 1], b[i + 1]);
  }
}

// compute lambda and root from gram
__device__ __forceinline__ void compute_step_sizes(ChunkKeys& out, const Steps& steps, int lane) {
  const int g = lane >> 2, owner = (lane & 28) | (g >> 1);
  const float low = g & 1 ? out.gram[0][1] : out.gram[0][0];
  const float high = g & 1 ? out.gram[1][3] : out.gram[1][2];
  // a shuffle reads a lane with the same g, which has therefore chosen the right element
  out.lambda[0] = __shfl_sync(ALL, low, owner);
  out.lambda[1] = __shfl_sync(ALL, high, owner);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(steps.size(r, out.lambda[r])));
    out.root[r] = -root;
  }
}

// From the values of tokens g and g + 8, those of a lane's columns: tokens 2c, 2c+1, 8+2c, 8+2c+1.
__device__ __forceinline__ void rows_to_columns(const float (&rows)[2], float (&columns)[2][2],
                                                int lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    columns[n][0] = __shfl_sync(ALL, rows[n], 8 * (lane & 3));
    columns[n][1] = __shfl_sync(ALL, rows[n], 8 * (lane & 3) + 4);
  }
}

// The diagonal 8 x 8 blocks of (I + M)^-1, M = strict_tril(-minus), in quarters 0 and 3 of A, and
// transposed in At; minus [16, 16] is symmetric with a diagonal above -1. The inverse's entries are
// then at most 1, so fp16 operands have errors of 2^-11 and never overflow. Blocks of 2 need no
// product. Blocks of 4 and 8 are joined by A <- A - A M_off A, which fills elements that were zero,
// so an OR of packed values adds them. Each product computes both diagonal blocks, which form a
// block diagonal A operand, or one above the other a B operand.
__device__ __forceinline__ void invert_blocks(const float (&minus)[2][4], const BlockMasks& mask,
                                              u32 (&A)[4], u32 (&At)[4]) {
  constexpr Scalar H = Scalar::fp16;
  const u32 low = pack<H>(minus[0][0], minus[0][1]), high = pack<H>(minus[1][2], minus[1][3]);
  A[1] = A[2] = At[1] = At[2] = 0;
  A[0] = mask.one | (low & mask.pair_below), A[3] = mask.one | (high & mask.pair_below);
  At[0] = mask.one | (low & mask.pair_above), At[3] = mask.one | (high & mask.pair_above);
#pragma unroll
  for (int level = 0; level < 2; ++level) {
    const u32 off = level == 0 ? mask.four : mask.eight;
    float x[4] = {}, a[4] = {}, at[4] = {};
    mma<H>(x, At, low & off, high & off);  // -(M_off A)^T
    u32 X[4] = {pack<H>(x[0], x[1]), 0, 0, pack<H>(x[2], x[3])};
    mma<H>(a, A, X[0], X[3]);
    mma<H>(at, X, A[0], A[3]);
    A[0] |= pack<H>(a[0], a[1]);
    A[3] |= pack<H>(a[2], a[3]);
    At[0] |= pack<H>(at[0], at[1]);
    At[3] |= pack<H>(at[2], at[3]);
  }
}

// -(M_21 A_11)^T, packed. The product of A_22 with its transpose is the inverse's block (1, 0).
__device__ __forceinline__ u32 corner(const float (&minus)[2][4], const u32 (&At)[4]) {
  constexpr Scalar H = Scalar::fp16;
  float x[4] = {};
  mma_8x8(x, At[0], pack<H>(minus[0][2], minus[0][3]));
  return pack<H>(x[0], x[1]);
}

// the whole inverse, of `minus` as above
__device__ __forceinline__ void invert(const float (&minus)[2][4], const BlockMasks& mask,
                                       float (&out)[2][4]) {
  constexpr Scalar H = Scalar::fp16;
  u32 A[4], At[4];
  invert_blocks(minus, mask, A, At);
  float joined[4] = {};
  mma_8x8(joined, A[3], corner(minus, At));
  unpack<H>(A[0], out[0][0], out[0][1]);
  unpack<H>(A[3], out[1][2], out[1][3]);
  out[0][2] = joined[0], out[0][3] = joined[1], out[1][0] = out[1][1] = 0.f;
}

// ---- decays: one policy for calls with decays, and an empty one for calls without ----

// Running sums of a chunk's log decays, base 2.
struct RunningDecays {
  float since[2];       // sums up to and including tokens g and g + 8
  float columns[2][2];  // the same of the tokens of this lane's columns
  float whole;          // the chunk's sum

  __device__ __forceinline__ RunningDecays(const ReadSteps& steps, int lane) {
    float low = steps.log_decay(0), high = steps.log_decay(1);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      const float l = __shfl_up_sync(ALL, low, step), h = __shfl_up_sync(ALL, high, step);
      if (lane >= step) low += l, high += h;
    }
    since[0] = low, since[1] = high + __shfl_sync(ALL, low, 31);
    whole = __shfl_sync(ALL, since[1], 31);
    rows_to_columns(since, columns, lane);
  }

  // Scales x's entries on and below the diagonal (above it where x is TRANSPOSED) by the decay
  // between their tokens.
  template <bool TRANSPOSED = false>
  __device__ __forceinline__ void apply(float (&x)[2][4]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float between = since[e >> 1] - columns[n][e & 1];
        x[n][e] *= exp2_of(fminf(TRANSPOSED ? -between : between, 0.f));
      }
  }
};

struct NoDecays {
  __device__ __forceinline__ NoDecays(const Steps&, int) {}
  template <bool TRANSPOSED = false>
  __device__ __forceinline__ void apply(float (&)[2][4]) const {}
};

using Decays = Select<DECAY, RunningDecays, NoDecays>;

// scales columns by their tokens' factors: d0 has tokens 0..7, d1 tokens 8..15
__device__ __forceinline__ void scale_columns(float (&d0)[4], float (&d1)[4], const float4& by) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    d0[e] *= e & 1 ? by.y : by.x;
    d1[e] *= e & 1 ? by.w : by.z;
  }
}

// The decay factors of the tokens of a lane's columns.
struct LaneDecays {
  float4 before, after;

  // by the decay from the chunk's begin to each token
  __device__ __forceinline__ void scale_before(float (&d0)[4], float (&d1)[4]) const {
    scale_columns(d0, d1, before);
  }
  // by the decay from each token to the chunk's end
  __device__ __forceinline__ void scale_after(float (&d0)[4], float (&d1)[4]) const {
    scale_columns(d0, d1, after);
  }
};

struct NoLaneDecays {
  __device__ __forceinline__ void scale_before(float (&)[4], float (&)[4]) const {}
  __device__ __forceinline__ void scale_after(float (&)[4], float (&)[4]) const {}
};

// A chunk's decay factors in shared memory, one float4 for each c: of tokens 2c, 2c + 1, 2c + 8,
// 2c + 9.
struct SharedDecays {
  float4 before[4], after[4];  // from the chunk's begin to the token, from there to the end
  float whole;

  __device__ __forceinline__ void store(const RunningDecays& decays, int lane) {
    if (lane & 3) return;
    const int g = lane >> 2, at = (g >> 1) * 4 + (g & 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      ((float*)before)[at + 2 * r] = exp2_of(decays.since[r]);
      ((float*)after)[at + 2 * r] = exp2_of(decays.whole - decays.since[r]);
    }
    if (lane == 0) whole = exp2_of(decays.whole);
  }
  __device__ __forceinline__ LaneDecays load(int lane) const {
    return {before[lane & 3], after[lane & 3]};
  }
  __device__ __forceinline__ void scale_state(float& x) const { x *= whole; }
};

struct NoSharedDecays {
  static constexpr float whole = 1.f;

  __device__ __forceinline__ void store(const NoDecays&, int) {}
  __device__ __forceinline__ NoLaneDecays load(int) const { return {}; }
  __device__ __forceinline__ void scale_state(float&) const {}
};

using ChunkDecays = Select<DECAY, SharedDecays, NoSharedDecays>;

// Base classes of a kernel's shared memory: the decays of some chunks; empty in calls without.
template <int CHUNKS>
struct SharedDecaySlots {
  SharedDecays slots[CHUNKS];
  __device__ __forceinline__ SharedDecays& decays(int chunk) { return slots[chunk]; }
};
struct NoDecaySlots : NoSharedDecays {
  __device__ __forceinline__ NoSharedDecays& decays(int) { return *this; }
};
template <int CHUNKS>
using DecaySlots = Select<DECAY, SharedDecaySlots<CHUNKS>, NoDecaySlots>;

// x <- diag(root) x diag(root); `columns` is rows_to_columns(root)
__device__ __forceinline__ void scale_by_roots(float (&x)[2][4], const float (&root)[2],
                                               const float (&columns)[2][2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)  // both roots are negative
      x[n][e] *= -root[e >> 1] * columns[n][e & 1];
}

// The WY representation's matrix -A diag(a), A = (I + strict_tril(a K K^T))^-1, from a chunk's
// products, which it overwrites
__device__ __forceinline__ void compute_wy(ChunkKeys& at, const BlockMasks& mask,
                                           float (&out)[2][4], int lane) {
  float columns[2][2];
  rows_to_columns(at.root, columns, lane);
  scale_by_roots(at.gram, at.root, columns);
  invert(at.gram, mask, out);
  scale_by_roots(out, at.root, columns);
}

// the transpose of the inverse: its blocks (0, 0), (0, 1) and (1, 1), packed; (1, 0) is zero
__device__ __forceinline__ void invert_transposed(const float (&minus)[2][4],
                                                  const BlockMasks& mask, u32 (&out)[3]) {
  u32 A[4], At[4];
  invert_blocks(minus, mask, A, At);
  float joined[4] = {};
  mma_8x8(joined, corner(minus, At), A[3]);
  out[0] = At[0], out[1] = pack<Scalar::fp16>(joined[0], joined[1]), out[2] = At[3];
}

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
