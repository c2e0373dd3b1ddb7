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

typedef float Rows64[8][4];  // a warp's 16 rows of a product [64, 64]
typedef u32 Operand[4][4];   // 16 rows of 64 columns

// this warp's 16 rows of a square
__device__ __forceinline__ void load_operand(Operand& out, u32 square, int warp, int lane) {
#pragma unroll
  for (int t = 0; t < 4; ++t)
    load_rows(out[t], row_address(square + (warp & 3) * CHUNK_BYTES, lane) ^ 32 * t);
}

#if QUASAR_WGMMA
__device__ __forceinline__ void fence_operands(Rows64& d) { warpgroup_fence_operand(d); }

template <int COUNT>
__device__ __forceinline__ void fence_operands(Rows64 (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) warpgroup_fence_operand(d[i]);
}
#endif

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

// The next two are asynchronous on Hopper: call them between open_products and close_products. For
// heads of 128 they load `a` into registers, because products of two operands in shared memory are
// limited by its bandwidth. Heads of 64 have no registers to spare: three blocks share them.

// d[p] = a b if FIRST, otherwise d[p] += a b, with the rows of the matrix a at `row`
template <Scalar T, bool FIRST>
__device__ __forceinline__ void multiply_matrix(Rows64 (&d)[PANELS], u32 a, int row, u32 b,
                                                int warp, int lane) {
#if QUASAR_WGMMA
  if constexpr (S > 64) {
    Operand own[PANELS];
#pragma unroll
    for (int i = 0; i < PANELS; ++i) load_operand(own[i], square(a, row, i), warp, lane);
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < PANELS; ++i)
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int p = 0; p < PANELS; ++p) {
          const u64 columns = tile_descriptor(square(b, i, p) + t * CHUNK_BYTES);
          if (FIRST && i + t == 0)
            wgmma_columns<T, true>(d[p], own[i][t], columns);
          else
            wgmma_columns<T>(d[p], own[i][t], columns);
        }
    return;
  }
#pragma unroll
  for (int i = 0; i < PANELS; ++i)
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int p = 0; p < PANELS; ++p) {
        const u64 rows = at_columns(tile_descriptor(square(a, row, i)), t);
        const u64 columns = tile_descriptor(square(b, i, p) + t * CHUNK_BYTES);
        if (FIRST && i + t == 0)
          wgmma_tile_columns<T, true>(d[p], rows, columns);
        else
          wgmma_tile_columns<T>(d[p], rows, columns);
      }
#else
#pragma unroll
  for (int p = 0; p < PANELS; ++p) {
    if (FIRST) clear(d[p]);
#pragma unroll
    for (int i = 0; i < PANELS; ++i) {
      Operand rows;
      load_operand(rows, square(a, row, i), warp, lane);
      add_by_columns<T>(d[p], rows, square(b, i, p), lane);
    }
  }
#endif
}

// d = a b^T, with the rows of the matrix a at `row` and those of b at `column`
template <Scalar T>
__device__ __forceinline__ void multiply_rows(Rows64& d, u32 a, int row, u32 b, int column,
                                              int warp, int lane) {
#if !QUASAR_WGMMA
  clear(d);
#else
  if constexpr (S > 64) {
    Operand own[PANELS];
#pragma unroll
    for (int p = 0; p < PANELS; ++p) load_operand(own[p], square(a, row, p), warp, lane);
    warpgroup_arrive();
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const u64 columns = at_columns(tile_descriptor(square(b, column, p)), t);
        if (p + t == 0)
          wgmma_rows<T, true>(d, own[p][t], columns);
        else
          wgmma_rows<T>(d, own[p][t], columns);
      }
    return;
  }
#endif
#pragma unroll
  for (int p = 0; p < PANELS; ++p) {
#if !QUASAR_WGMMA
    Operand rows;
    load_operand(rows, square(a, row, p), warp, lane);
#endif
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#if QUASAR_WGMMA
      const u64 rows = at_columns(tile_descriptor(square(a, row, p)), t);
      const u64 columns = at_columns(tile_descriptor(square(b, column, p)), t);
      if (p + t == 0)
        wgmma_tile<T, true>(d, rows, columns);
      else
        wgmma_tile<T>(d, rows, columns);
#else
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 x[4];
        load_rows(x, pair_address(square(b, column, p) + j * CHUNK_BYTES, lane) ^ 32 * t);
        mma<T>(d[2 * j], rows[t], x[0], x[1]);
        mma<T>(d[2 * j + 1], rows[t], x[2], x[3]);
      }
#endif
    }
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

// Calls f(r, element of x, elements of d) for this warp's rows of the matrix x at `row`; r is the
// lane's row, 0 or 1.
template <Scalar T, class F, class... Accumulators>
__device__ __forceinline__ void for_each_pair(u32 x, int row, int warp, int lane, const F& f,
                                              Accumulators&... d) {
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      u32 rows[4];
      load_rows(rows, row_address(square(x, row, p) + (warp & 3) * CHUNK_BYTES, lane) ^ 32 * t);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float left, right;
        unpack<T>(rows[i], left, right);
        f(i & 1, left, d[p][2 * t + (i >> 1)][2 * (i & 1)]...);
        f(i & 1, right, d[p][2 * t + (i >> 1)][2 * (i & 1) + 1]...);
      }
    }
}

// Adds up the sums of the four lanes that share this lane's two rows.
__device__ __forceinline__ void add_in_quad(float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(ALL, sum[r], 1);
    sum[r] += __shfl_xor_sync(ALL, sum[r], 2);
  }
}

// d[p] += a b over the 64 rows of b at `row`; like multiply_rows asynchronous
template <Scalar T>
__device__ __forceinline__ void add_tokens(Rows64 (&d)[PANELS], const Operand& a, u32 b, int row,
                                           int lane) {
#pragma unroll
  for (int p = 0; p < PANELS; ++p) add_by_columns<T>(d[p], a, square(b, row, p), lane);
}

enum class Mask { all, lower, strictly_lower, upper, strictly_upper };

// Copies two tiles of a product's 16 rows, from column 16 t on, times `factors` and `factor`, with
// zeros outside of MASK, where the first row and the first column have the same token.
template <Mask MASK>
__device__ __forceinline__ void mask_entries(float (&out)[2][4], const Rows64& x, int t,
                                             const float (&factors)[2][4], float factor, int warp,
                                             int lane) {
  const int row = (warp & 3) * 16 + (lane >> 2) - 2 * (lane & 3);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int below = row + 8 * (e >> 1) - 16 * t - 8 * n - (e & 1);  // 0 on the diagonal
      const bool keep = MASK == Mask::all || (MASK == Mask::lower && below >= 0) ||
                        (MASK == Mask::strictly_lower && below > 0) ||
                        (MASK == Mask::upper && below <= 0) ||
                        (MASK == Mask::strictly_upper && below < 0);
      out[n][e] = keep ? factor * factors[n][e] * x[2 * t + n][e] : 0.f;
    }
}

// Returns the diagonal entries of rows g and g + 8 of this warp's 16.
__device__ __forceinline__ void extract_diagonal(float (&out)[2], const Rows64& x, int warp,
                                                 int lane) {
  u32 low = 0, high = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) {  // a branch would let the compiler index x, in local memory
    const u32 own = w == (warp & 3) ? ALL : 0;
    low |= own & __float_as_uint(lane & 4 ? x[2 * w][1] : x[2 * w][0]);
    high |= own & __float_as_uint(lane & 4 ? x[2 * w + 1][3] : x[2 * w + 1][2]);
  }
  const int owner = (lane & 28) | (lane >> 3);  // a lane with the same row
  out[0] = __uint_as_float(__shfl_sync(ALL, low, owner));
  out[1] = __uint_as_float(__shfl_sync(ALL, high, owner));
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

// 16 rows of S columns, times `factor`, as operands
template <Scalar T>
__device__ __forceinline__ void pack_rows(Operand (&out)[PANELS], const Rows64 (&x)[PANELS],
                                          float factor) {
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      float scaled[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) scaled[n][e] = factor * x[p][2 * t + n][e];
      pack_tiles<T>(out[p][t], scaled[0], scaled[1]);
    }
}

// stores them as this warp's rows of a matrix
__device__ __forceinline__ void store_matrix_rows(u32 to, const Operand (&x)[PANELS], int row,
                                                  int warp, int lane) {
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
