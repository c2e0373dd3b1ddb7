// Products of a tile's [S, S] matrices in shared memory; rows and columns are tokens or channels.
//
// Each matrix consists of squares: 64 rows (tokens, or value channels of a checkpoint) by 64
// channels, with the 128-byte swizzle. The four warps of a warpgroup own 64 rows of a product, 16
// each.

#pragma once

#include "gradients.cuh"

namespace quasar::scan {

constexpr int INPUT_WARPS = 4 * PANELS, INPUT_BLOCKS = S > 64 ? 1 : QUASAR_WGMMA ? 3 : 2;
constexpr u32 SQUARE_BYTES = PANEL * ROW_BYTES;  // 64 rows of 64 channels
constexpr u32 MATRIX_BYTES = PANELS * PANELS * SQUARE_BYTES;

__device__ __forceinline__ u32 square(u32 matrix, int row, int column) {
  return matrix + (row * PANELS + column) * SQUARE_BYTES;
}

typedef float Rows64[8][4];           // a warp's 16 rows of a product [64, 64]
typedef u32 Operand[4][4];            // 16 rows of 64 columns
typedef Operand OperandRows[PANELS];  // 16 rows of S columns

// this warp's rows of x, among the row-th 64
__device__ __forceinline__ void load_operand(OperandRows& out, u32 x, int row, int warp, int lane) {
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t)
      load_rows(out[p][t],
                row_address(square(x, row, p) + (warp & 3) * CHUNK_BYTES, lane) ^ 32 * t);
}

#if QUASAR_WGMMA
__device__ __forceinline__ void fence_operands(Rows64& d) { warpgroup_fence_operand(d); }

template <int COUNT>
__device__ __forceinline__ void fence_operands(Rows64 (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) warpgroup_fence_operand(d[i]);
}
#endif

// d += a b^T, b a square, or d = a b^T if FIRST; asynchronous on Hopper
template <Scalar T, bool FIRST>
__device__ __forceinline__ void add_by_rows(Rows64& d, const Operand& a, u32 b, int lane) {
#if !QUASAR_WGMMA
  if (FIRST) clear(d);
#endif
#pragma unroll
  for (int t = 0; t < 4; ++t) {
#if QUASAR_WGMMA
    const u64 columns = at_columns(tile_descriptor(b), t);
    if (FIRST && t == 0)
      wgmma_rows<T, true>(d, a[t], columns);
    else
      wgmma_rows<T>(d, a[t], columns);
#else
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 x[4];
      load_rows(x, pair_address(b + j * CHUNK_BYTES, lane) ^ 32 * t);
      mma<T>(d[2 * j], a[t], x[0], x[1]);
      mma<T>(d[2 * j + 1], a[t], x[2], x[3]);
    }
#endif
  }
}

// d += a b
template <Scalar T>
__device__ __forceinline__ void add_by_columns(Rows64& d, const Operand& a, u32 b, int lane) {
#pragma unroll
  for (int t = 0; t < 4; ++t) {
#if QUASAR_WGMMA
    wgmma_columns<T>(d, a[t], tile_descriptor(b + t * CHUNK_BYTES));
#else
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 x[4];
      load_columns(x, row_address(b + t * CHUNK_BYTES, lane) ^ 32 * j);
      mma<T>(d[2 * j], a[t], x[0], x[1]);
      mma<T>(d[2 * j + 1], a[t], x[2], x[3]);
    }
#endif
  }
}

// Waits for all products; d are their accumulators.
template <class... Accumulators>
__device__ __forceinline__ void finish_products(Accumulators&... d) {
#if QUASAR_WGMMA
  warpgroup_wait<0>();
  (fence_operands(d), ...);
#endif
}

// d[p] += a b over all columns of a and of d; b is a matrix
template <Scalar T>
__device__ __forceinline__ void add_matrix(Rows64 (&d)[PANELS], const OperandRows& a, u32 b,
                                           int lane) {
  open_products();
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int i = 0; i < PANELS; ++i) add_by_columns<T>(d[p], a[i], square(b, i, p), lane);
  close_products();
  finish_products(d);
}

// d[p] += diag(factor) a b, with a factor for each of a lane's rows. factor a is the sum of two
// operands. Scaling the product instead would need the registers of another accumulator.
template <Scalar T>
__device__ __forceinline__ void add_scaled_matrix(Rows64 (&d)[PANELS], const OperandRows& a, u32 b,
                                                  const float (&factor)[2], int lane) {
#pragma unroll
  for (int i = 0; i < PANELS; ++i) {
    Operand high, low;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      float x[2][4];
      unpack_tiles<T>(a[i][t], x);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[n][e] *= factor[e >> 1];
      split<T>(x, high[t], low[t]);
    }
    open_products();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) {
      add_by_columns<T>(d[p], high, square(b, i, p), lane);
      add_by_columns<T>(d[p], low, square(b, i, p), lane);
    }
    close_products();
    finish_products(d);
  }
}

// d <- diag(factor) d
__device__ __forceinline__ void scale_rows(Rows64 (&d)[PANELS], const float (&factor)[2]) {
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) d[p][m][e] *= factor[e >> 1];
}

// Calls f(r, element of d, element of x) for this warp's rows of the matrix x at `row`; r is the
// lane's row, 0 or 1.
template <Scalar T, class F>
__device__ __forceinline__ void for_each_pair(Rows64 (&d)[PANELS], u32 x, int row, int warp,
                                              int lane, const F& f) {
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      u32 rows[4];
      load_rows(rows, row_address(square(x, row, p) + (warp & 3) * CHUNK_BYTES, lane) ^ 32 * t);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float (&pair)[4] = d[p][2 * t + (i >> 1)];
        float left, right;
        unpack<T>(rows[i], left, right);
        f(i & 1, pair[2 * (i & 1)], left);
        f(i & 1, pair[2 * (i & 1) + 1], right);
      }
    }
}

// For this lane's two tokens, the sum over channels of d times the matrix x at `row`.
template <Scalar T>
__device__ __forceinline__ void compute_row_products(float (&out)[2], Rows64 (&d)[PANELS], u32 x,
                                                     int row, int warp, int lane) {
  out[0] = out[1] = 0.f;
  for_each_pair<T>(d, x, row, warp, lane,
                   [&](int r, float at, float other) { out[r] += at * other; });
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    out[r] += __shfl_xor_sync(ALL, out[r], 1);
    out[r] += __shfl_xor_sync(ALL, out[r], 2);
  }
}

// d += diag(factor) x, with the rows of the matrix x at `row`
template <Scalar T>
__device__ __forceinline__ void add_scaled_rows(Rows64 (&d)[PANELS], const float (&factor)[2],
                                                u32 x, int row, int warp, int lane) {
  for_each_pair<T>(d, x, row, warp, lane,
                   [&](int r, float& at, float other) { at += factor[r] * other; });
}

// d[p] += a b over the 64 rows of b at `row`
template <Scalar T>
__device__ __forceinline__ void add_tokens(Rows64 (&d)[PANELS], const Operand& a, u32 b, int row,
                                           int lane) {
  open_products();
#pragma unroll
  for (int p = 0; p < PANELS; ++p) add_by_columns<T>(d[p], a, square(b, row, p), lane);
  close_products();
  finish_products(d);
}

// d = a b^T, with the 64 rows of b at `row`
template <Scalar T>
__device__ __forceinline__ void compute_scores(Rows64& d, const OperandRows& a, u32 b, int row,
                                               int lane) {
  open_products();
  add_by_rows<T, true>(d, a[0], square(b, row, 0), lane);
#pragma unroll
  for (int p = 1; p < PANELS; ++p) add_by_rows<T, false>(d, a[p], square(b, row, p), lane);
  close_products();
  finish_products(d);
}

// A compile-time row of squares, so that loops over squares unroll.
template <int VALUE>
struct Fixed {
  __device__ __forceinline__ constexpr operator int() const { return VALUE; }
};

enum class Mask { all, lower, strictly_lower, upper, strictly_upper };

// Copies two tiles of a product's 16 rows, from column 16 t on, with zeros outside of MASK. The
// first row's token is `ahead` tokens after the first column's.
template <Mask MASK>
__device__ __forceinline__ void mask_entries(float (&out)[2][4], const Rows64& x, int t,
                                             float factor, int ahead, int warp, int lane) {
  const int row = ahead + (warp & 3) * 16 + (lane >> 2) - 2 * (lane & 3);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int below = row + 8 * (e >> 1) - 16 * t - 8 * n - (e & 1);  // 0 on the diagonal
      const bool keep = MASK == Mask::all || (MASK == Mask::lower && (ahead > 0 || below >= 0)) ||
                        (MASK == Mask::strictly_lower && (ahead > 0 || below > 0)) ||
                        (MASK == Mask::upper && (ahead < 0 || below <= 0)) ||
                        (MASK == Mask::strictly_upper && (ahead < 0 || below < 0));
      out[n][e] = keep ? factor * x[2 * t + n][e] : 0.f;
    }
}

// the same for all columns, as an operand
template <Scalar T, Mask MASK>
__device__ __forceinline__ void pack_entries(Operand& out, const Rows64& x, float factor, int ahead,
                                             int warp, int lane) {
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    float kept[2][4];
    mask_entries<MASK>(kept, x, t, factor, ahead, warp, lane);
    pack_tiles<T>(out[t], kept[0], kept[1]);
  }
}

// the same as the sum of two operands
template <Scalar T, Mask MASK>
__device__ __forceinline__ void split_entries(Operand& high, Operand& low, const Rows64& x,
                                              float factor, int ahead, int warp, int lane) {
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    float kept[2][4];
    mask_entries<MASK>(kept, x, t, factor, ahead, warp, lane);
    split<T>(kept, high[t], low[t]);
  }
}

// Returns the diagonal entries of rows g and g + 8 of this warp's 16.
__device__ __forceinline__ void extract_diagonal(float (&out)[2], const Rows64& x, int warp,
                                                 int lane) {
  float low = 0.f, high = 0.f;
#pragma unroll
  for (int w = 0; w < 4; ++w)
    if (w == (warp & 3)) {
      low = lane & 4 ? x[2 * w][1] : x[2 * w][0];
      high = lane & 4 ? x[2 * w + 1][3] : x[2 * w + 1][2];
    }
  const int owner = (lane & 28) | (lane >> 3);  // a lane with the same row
  out[0] = __shfl_sync(ALL, low, owner);
  out[1] = __shfl_sync(ALL, high, owner);
}

// Fills a checkpoint from an fp32 state [S, S], keys' channels first, or with zeros.
template <Scalar T>
__device__ __forceinline__ void fill_checkpoint(u32 to, const float* state) {
  for (int i = threadIdx.x; i < S * S / 2; i += 32 * INPUT_WARPS) {
    const int v = i % S, k = i / S * 2;
    const u32 pair = state ? pack_saturated<T>(state[k * S + v], state[(k + 1) * S + v]) : 0;
    const u32 at = square(to, v / PANEL, k / PANEL) + v % PANEL * ROW_BYTES +
                   ((k % PANEL / 8 ^ (v & 7)) << 4) + k % 8 * 2;
    asm volatile("st.shared.u32 [%0], %1;" : : "r"(at), "r"(pair) : "memory");
  }
}

// stores 16 rows of S columns as this warp's rows of a matrix
__device__ __forceinline__ void store_matrix_rows(u32 to, const OperandRows& x, int row, int warp,
                                                  int lane) {
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const u32 chunk = square(to, row, p) + (warp & 3) * CHUNK_BYTES;
      store_rows(x[p][t], row_address(chunk, lane) ^ 32 * t, chunk, t, lane);
    }
}

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
