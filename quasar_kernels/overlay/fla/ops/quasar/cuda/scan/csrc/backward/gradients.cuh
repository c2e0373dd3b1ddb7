// Shared by the kernels of the backward pass: their arguments, and the checkpoints between tiles.
//
// The state and its gradient are computed in opposite directions, so no single pass has both.
// state_checkpoint.cu and state_gradient.cu each store their [S, S] matrix after every S tokens, a
// checkpoint; input_gradient.cu then computes the gradients of q, k and beta for all tiles of S
// tokens in parallel. A checkpoint is stored transposed, one value channel a row, in the inputs'
// dtype, and fills S token rows of one head in a tensor shaped like the inputs.

#pragma once

#include "../copies.cuh"
#include "../output_chunk.cuh"
#include "../pace.cuh"

namespace quasar::scan {

// Arguments of every kernel of the backward pass; mirrored by scan_backward.py. Strides count
// elements; d_o, dq, dk, dv and checkpoints share o_stride.
struct GradientArguments {
  const void *q, *k, *v, *d_o;
  void *dq, *dk, *dv, *checkpoints;
  const float *beta, *initial_state, *d_final, *maps, *states;  // all but beta may be null
  float *d_states, *d_initial, *d_beta, *d_decay;               // all but d_beta may be null
  const i64 *table, *first;  // of packed sequences (cu_seqlens), otherwise null
  i64 T, length, q_stride[3], k_stride[3], v_stride[3], o_stride[3];  // batch, token, head
  int per_sequence, heads, parts;  // parts: blocks of input_gradient.cu per segment and head
  float scale;
  // used only with READ_STEP
  const float* decay;
  int group;  // heads that share one of q and k
  int omits;  // whether state_gradient_map searches for tokens to omit
};

// The kernels' second argument, filled for Hopper only. All tensor maps have tiles of 64 tokens.
struct GradientMaps {
  TensorMap q, k, v, d_o, dq, dk, dv, checkpoints;
};

constexpr int WALK_WARPS = QUASAR_WGMMA ? 4 : 2;  // per block
// occupancy: blocks per multiprocessor
constexpr int WALK_BLOCKS = QUASAR_WGMMA ? (S == 64 ? 4 : 2) : (S == 64 ? 4 : 3);
constexpr int COLUMN_BLOCKS = 4 / WALK_WARPS;  // of 16 columns that a warp owns
constexpr int WALK_TOKENS = WALK_WARPS * CHUNK;
// A tile has a chunk for each warp; its panels of channels follow one another.
constexpr u32 WALK_PANEL_BYTES = WALK_WARPS * CHUNK_BYTES;
constexpr u32 WALK_TILE_BYTES = PANELS * WALK_PANEL_BYTES;
static_assert(!Tiles::RUN_OVER || WALK_TOKENS == 64, "the tensor maps' tiles have 64 tokens");

typedef StateColumns WalkState[COLUMN_BLOCKS];  // 16 columns each of -S or dS, transposed

// calls f(index, element) for each element of a state that this warp owns, from `column` on; the
// index is that of the element in a state [S, S], keys' channels first
template <class F>
__device__ __forceinline__ void for_each_place(WalkState& state, int column, int lane, const F& f) {
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; ++b)
    for_each_element([&](int p, int m, int e) {
      const int channel = p * PANEL + 8 * m + 2 * (lane & 3) + (e & 1);
      f(channel * S + column + 16 * b + (lane >> 2) + 8 * (e >> 1), state[b][p][m][e]);
    });
}

// calls f(element) for each element of a state that this warp owns
template <class F>
__device__ __forceinline__ void for_each_state_element(WalkState& state, const F& f) {
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; ++b)
    for_each_element([&](int p, int m, int e) { f(state[b][p][m][e]); });
}

// the inverse of pack_tiles
template <Scalar T>
__device__ __forceinline__ void unpack_tiles(const u32 (&x)[4], float (&out)[2][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    unpack<T>(x[i], out[i >> 1][2 * (i & 1)], out[i >> 1][2 * (i & 1) + 1]);
}

// x[i] of lane c of four becomes x[c] of lane i
__device__ __forceinline__ void transpose_in_quad(u32 (&x)[4], int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const u32 got = __shfl_xor_sync(ALL, upper ? x[i] : x[i | step], step);
      x[i] = upper ? got : x[i];
      x[i | step] = upper ? x[i | step] : got;
    }
  }
}

// Writes the checkpoint rows that this warp owns, from `column` on, at token `first` of the
// segment; SIGN is -1 where `state` holds the negative state. Lanes exchange values so that each
// stores 16 contiguous bytes, which fills whole memory sectors.
template <Scalar T, int SIGN>
__device__ __forceinline__ void store_checkpoint(void* x, const i64 (&stride)[3],
                                                 const Segment& segment, int head, int first,
                                                 const WalkState& state, int column, int lane) {
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; ++b) {
    const i64 token = segment.begin + first + column + 16 * b + (lane >> 2);
    unsigned short* row = (unsigned short*)x + segment.row * stride[0] + head * stride[2] +
                          token * stride[1] + 8 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 4 * PANELS; ++i) {  // 32 channels of 8 rows
      u32 y[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float* from = &state[b][i / 4][4 * (i & 1) + m][i & 2];
        y[m] = pack_saturated<T>(SIGN * from[0], SIGN * from[1]);
      }
      transpose_in_quad(y, lane);
      *(uint4*)(row + (i & 2 ? 8 * stride[1] : 0) + i / 4 * PANEL + 32 * (i & 1)) =
          make_uint4(y[0], y[1], y[2], y[3]);
    }
  }
}

// 16 columns of a state as an operand `high`; with EXACT also the rounding error, as `low`
template <Scalar T, bool EXACT>
__device__ __forceinline__ void pack_state(u32 (&high)[4], u32 (&low)[4], const float (&left)[4],
                                           const float (&right)[4]) {
  if (EXACT) {
    const float x[2][4] = {{left[0], left[1], left[2], left[3]},
                           {right[0], right[1], right[2], right[3]}};
    split<T>(x, high, low);
  } else {
    pack_tiles<T>(high, left, right);
  }
}

// read = state K^T for the chunk `keys`; read[b] has its tokens 0..7 and 8..15. EXACT: the state
// enters as two operands.
template <Scalar T, bool EXACT>
__device__ __forceinline__ void read_keys(const WalkState& state,
                                          float (&read)[COLUMN_BLOCKS][2][4], u32 keys, int lane) {
#if QUASAR_WGMMA
  u32 high[PANELS][4][4], low[PANELS][4][4];
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t)
      pack_state<T, EXACT>(high[p][t], low[p][t], state[0][p][2 * t], state[0][p][2 * t + 1]);
  warpgroup_arrive();
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const u64 rows = at_columns(tile_descriptor(keys + p * WALK_PANEL_BYTES), t);
      if (p + t == 0)
        wgmma_rows<T, true>(read[0], high[p][t], rows);
      else
        wgmma_rows<T>(read[0], high[p][t], rows);
      if (EXACT) wgmma_rows<T>(read[0], low[p][t], rows);
    }
  warpgroup_commit();
  warpgroup_wait<0>();
  warpgroup_fence_operand(read[0]);
#else
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; ++b) clear(read[b]);
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      u32 k[4];
      load_rows(k, pair_address(keys + p * WALK_PANEL_BYTES, lane) ^ 32 * t);
#pragma unroll
      for (int b = 0; b < COLUMN_BLOCKS; ++b) {
        u32 high[4], low[4];
        pack_state<T, EXACT>(high, low, state[b][p][2 * t], state[b][p][2 * t + 1]);
        mma<T>(read[b][0], high, k[0], k[1]);
        mma<T>(read[b][1], high, k[2], k[3]);
        if (EXACT) {
          mma<T>(read[b][0], low, k[0], k[1]);
          mma<T>(read[b][1], low, k[2], k[3]);
        }
      }
    }
#endif
}

// state += x Y, x [., 16 tokens] an operand, Y a chunk. On Hopper, call it between open_products
// and close_products; finish_state waits for the products.
template <Scalar T>
__device__ __forceinline__ void add_rows(WalkState& state, const u32 (&x)[COLUMN_BLOCKS][4],
                                         u32 chunk, int lane) {
#if QUASAR_WGMMA
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
    wgmma_columns<T>(state[0][p], x[0], tile_descriptor(chunk + p * WALK_PANEL_BYTES));
#else
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      u32 k[4];
      load_columns(k, row_address(chunk + p * WALK_PANEL_BYTES, lane) ^ 32 * t);
#pragma unroll
      for (int b = 0; b < COLUMN_BLOCKS; ++b) {
        mma<T>(state[b][p][2 * t], x[b], k[0], k[1]);
        mma<T>(state[b][p][2 * t + 1], x[b], k[2], k[3]);
      }
    }
#endif
}

__device__ __forceinline__ void open_products() {
#if QUASAR_WGMMA
  warpgroup_arrive();
#endif
}

__device__ __forceinline__ void close_products() {
#if QUASAR_WGMMA
  warpgroup_commit();
#endif
}

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
