// The gradients of q and k, and of beta, for one tile of S tokens of one head.
//
// Grid: one block for each tile of S tokens and head; heads are adjacent in the grid. A warpgroup
// handles 64 tokens, 16 per warp (two warpgroups for heads of 128). A block reads V', dv, the state
// S before its tile and the state's gradient dS after it. state_checkpoint.cu and state_gradient.cu
// have stored these, so all tiles run in parallel. With dP = tril(dO V'^T) and N =
// strict_tril(dv V'^T),
//   dQ = dO S^T + dP K
//   dK = V' dS^T - dv S^T + dP^T Q - (N + N^T) K + 2 diag(dlambda) K,
// where dlambda follows from da_t = dv_t V'_t / a_t^2, because a_t only enters V'_t =
// a_t (v_t - S_(t-1)^T k_t). If step sizes are inputs, da is their gradient. With decays each
// product is weighted by the decay between its two tokens; tile_decays.cuh computes these and their
// gradients.
//
// Prologue: two groups of copies, first the operands of dQ. There is no loop over tiles. Epilogue:
// dQ and dK overwrite S and dS in shared memory and are copied to device memory from there.
//
// Shared memory: seven [S, S] matrices in 16 bits: q, k, dO, V', dv, S and dS.
//
// Precision: if keys are alike, dP K is a small difference of large terms, so dP enters it as the
// sum of two operands.

#include "tile_decays.cuh"
#include "tile_products.cuh"

// for heads of 128, a tile takes 225 KB of shared memory, and this code exists for Hopper only
#if QUASAR_WGMMA || QUASAR_HEAD == 64

namespace quasar::scan {

struct InputTiles {
  uint4 q[MATRIX_BYTES / 16], k[MATRIX_BYTES / 16], d_o[MATRIX_BYTES / 16];
  uint4 v_new[MATRIX_BYTES / 16], dv[MATRIX_BYTES / 16];
  uint4 state[MATRIX_BYTES / 16], d_state[MATRIX_BYTES / 16];
};

struct InputShared : InputTiles, Select<DECAY, TileDecays, NoTileDecays> {
  float d_beta[INPUT_WARPS];
  u64 full[2];
};

// d alpha / d lambda and d alpha / d beta; gate.py has the derivation
__device__ __forceinline__ void step_size_slopes(float lambda, float beta, float& by_lambda,
                                                 float& by_beta) {
  const float x = beta * lambda, decay = __expf(-x), total = lambda + 1e-8f;
  float g, h;
  if (x < 0.25f) {
    g = 1.f - x / 2 * (1.f - x / 3 * (1.f - x / 4 * (1.f - x / 5 * (1.f - x / 6))));
    h = 0.5f - x * (1.f / 3 - x * (1.f / 8 - x * (1.f / 30 - x * (1.f / 144 - x / 840))));
  } else {
    g = (1.f - decay) / x;
    h = (1.f - decay * (1.f + x)) / (x * x);
  }
  const float ratio = lambda / total;
  by_lambda = beta * g * (1e-8f / total) / total - beta * beta * h * ratio;
  by_beta = decay * ratio;
}

// dK += 2 diag(dlambda) K; returns the contribution of this lane's rows to beta's gradient.
// d_values is the diagonal of dv V'^T; K is at `k`.
template <Scalar T>
__device__ __forceinline__ float add_step_sizes(Rows64 (&dK)[PANELS], const float (&d_values)[2],
                                                u32 k, int row, const ComputedSteps& steps,
                                                int warp, int lane) {
  OperandRows keys;
  load_operand(keys, k, row, warp, lane);
  float lambda[2] = {};
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x, y;
        unpack<T>(keys[p][t][i], x, y);
        lambda[i & 1] += x * x + y * y;
      }
  float factor[2], d_beta = 0.f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    lambda[r] += __shfl_xor_sync(ALL, lambda[r], 1);
    lambda[r] += __shfl_xor_sync(ALL, lambda[r], 2);
    const float a = steps.size(r, lambda[r]);
    float by_lambda, by_beta;
    step_size_slopes(lambda[r], steps.beta, by_lambda, by_beta);
    const float da = a > 0.f ? d_values[r] / a / a : 0.f;  // a is 0 only for zero keys
    factor[r] = 2.f * da * by_lambda;
    d_beta += da * by_beta;
  }
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x, y;
        unpack<T>(keys[p][t][i], x, y);
        dK[p][2 * t + (i >> 1)][2 * (i & 1)] += factor[i & 1] * x;
        dK[p][2 * t + (i >> 1)][2 * (i & 1) + 1] += factor[i & 1] * y;
      }
  return d_beta;
}

// The shared-memory addresses of a tile's matrices.
struct TileOperands {
  u32 q, k, d_o, v_new, dv, state, d_state;
};

// Computes dQ of the row-th 64 tokens, which this warpgroup owns, as operands. With decays, `reads`
// becomes q . dQ of this lane's tokens without each token's read of its own write. `queries_arrive`
// waits for q.
template <Scalar T, class Row, class Arrive>
__device__ __forceinline__ void compute_query_gradient(OperandRows& out, const TileOperands& tile,
                                                       const TileDecays* decays, float (&reads)[2],
                                                       const Arrive& queries_arrive, float scale,
                                                       Row row, int warp, int lane) {
  constexpr Mask EARLIER = DECAY ? Mask::strictly_lower : Mask::lower;
  OperandRows own;
  Rows64 dQ[PANELS] = {}, x;
  load_operand(own, tile.d_o, row, warp, lane);
  add_matrix<T>(dQ, own, tile.state, lane);
  const RowDecays here(decays, row, warp, lane);
  if constexpr (DECAY) scale_rows(dQ, {scale * here.before(0), scale * here.before(1)});
  float own_scores[2];  // with decays: q . k of a token and itself
#pragma unroll
  for (int j = 0; j <= row; ++j) {
    Operand high, low;
    compute_scores<T>(x, own, tile.v_new, j, lane);
    if (DECAY && j == row) extract_diagonal(own_scores, x, warp, lane);
    here.apply<false>(x, decays, j, lane);
    split_entries<T, EARLIER>(high, low, x, DECAY ? scale : 1.f, 64 * (row - j), warp, lane);
    add_tokens<T>(dQ, high, tile.k, j, lane);
    add_tokens<T>(dQ, low, tile.k, j, lane);
  }
  if constexpr (DECAY) {
    queries_arrive();
    compute_row_products<T>(reads, dQ, tile.q, row, warp, lane);
    own_scores[0] *= scale, own_scores[1] *= scale;
    add_scaled_rows<T>(dQ, own_scores, tile.k, row, warp, lane);
  }
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
    pack_entries<T, Mask::all>(out[p], dQ[p], DECAY ? 1.f : scale, 0, warp, lane);
}

// -dv of this warp's rows
__device__ __forceinline__ void load_values(OperandRows& out, const TileOperands& tile, int row,
                                            int warp, int lane) {
  load_operand(out, tile.dv, row, warp, lane);
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[p][t][i] ^= 0x80008000u;
}

// Adds all remaining products to dK, which holds -dv S^T, and sets d_values to the rows' dv . V'.
// With decays, for each of this lane's tokens: `reads`, which holds q . dQ, becomes the reads of
// earlier tokens minus the writes for later ones (tile_decays.cuh), and `passes` the writes for
// tokens after the tile.
template <Scalar T, class Row>
__device__ __forceinline__ void add_key_gradient(Rows64 (&dK)[PANELS], float (&d_values)[2],
                                                 const TileOperands& tile, const TileDecays* decays,
                                                 float (&reads)[2], float (&passes)[2], float scale,
                                                 Row row, int warp, int lane) {
  OperandRows own;
  Operand scores;
  Rows64 x;
  const RowDecays here(decays, row, warp, lane);
  load_values(own, tile, row, warp, lane);
#pragma unroll
  for (int j = 0; j <= row; ++j) {
    compute_scores<T>(x, own, tile.v_new, j, lane);
    if (j == row) extract_diagonal(d_values, x, warp, lane);
    here.apply<false>(x, decays, j, lane);
    pack_entries<T, Mask::strictly_lower>(scores, x, 1.f, 64 * (row - j), warp, lane);
    add_tokens<T>(dK, scores, tile.k, j, lane);
  }
  d_values[0] = -d_values[0], d_values[1] = -d_values[1];
  load_operand(own, tile.v_new, row, warp, lane);
  float so_far[2], sum[2], own_scores[2];  // with decays
  if constexpr (DECAY) {
    compute_row_products<T>(so_far, dK, tile.k, row, warp, lane);
    add_scaled_matrix<T>(dK, own, tile.d_state, {here.after(decays, 0), here.after(decays, 1)},
                         lane);
    compute_row_products<T>(sum, dK, tile.k, row, warp, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      reads[r] += 2.f * so_far[r];
      passes[r] = sum[r] - so_far[r];
    }
  } else {
    add_matrix<T>(dK, own, tile.d_state, lane);
  }
#pragma unroll
  for (int j = row; j < PANELS; ++j) {
    const int ahead = 64 * (row - j);
    compute_scores<T>(x, own, tile.d_o, j, lane);
    if constexpr (DECAY) {
      Operand low;
      if (j == row) extract_diagonal(own_scores, x, warp, lane);
      here.apply<true>(x, decays, j, lane);
      split_entries<T, Mask::strictly_upper>(scores, low, x, scale, ahead, warp, lane);
      add_tokens<T>(dK, low, tile.q, j, lane);
    } else {
      pack_entries<T, Mask::upper>(scores, x, scale, ahead, warp, lane);
    }
    add_tokens<T>(dK, scores, tile.q, j, lane);
    compute_scores<T>(x, own, tile.dv, j, lane);
    here.apply<true>(x, decays, j, lane);
    pack_entries<T, Mask::strictly_upper>(scores, x, -1.f, ahead, warp, lane);
    add_tokens<T>(dK, scores, tile.k, j, lane);
  }
  if constexpr (DECAY) {
    compute_row_products<T>(sum, dK, tile.k, row, warp, lane);
    reads[0] -= sum[0], reads[1] -= sum[1];
    own_scores[0] *= scale, own_scores[1] *= scale;
    add_scaled_rows<T>(dK, own_scores, tile.q, row, warp, lane);
  }
}

template <Scalar T>
__device__ __forceinline__ void input_gradient(const GradientArguments& arg,
                                               const GradientMaps& maps) {
  extern __shared__ __align__(1024) uint4 raw[];
  InputShared& shared = *(InputShared*)raw;
  const int head = blockIdx.x % arg.heads, lane = threadIdx.x & 31;
  const int index = blockIdx.x / arg.heads / arg.parts, tile = blockIdx.x / arg.heads % arg.parts;
  const int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0);  // uniform to the compiler
  const int row = S == 64 ? 0 : warp / 4;                  // index of this warpgroup's 64 rows
  const Segment segment = find_segment(arg, index);
  const int first = tile * S, left = segment.tokens - first;
  if (left <= 0) {
    if (!READ_STEP && threadIdx.x == 0) arg.d_beta[blockIdx.x] = 0.f;
    return;
  }
  const Steps steps = StepSizes(arg, segment, head, lane).of(first + warp * CHUNK);
  const i64 entry = entry_of(arg, segment, head, first);  // offset of step sizes and decays
  TileDecays* const decays = shared.pointer();            // null without decays
  if constexpr (DECAY) fill_decays(*decays, arg.decay + entry, arg.heads, left);
  const i64 own = (segment.sequence * arg.heads + head) * S * S;
  const bool starts = segment.is_first && tile == 0, ends = segment.is_last && left <= S;
  const TileOperands at = {shared_address(shared.q),      shared_address(shared.k),
                           shared_address(shared.d_o),    shared_address(shared.v_new),
                           shared_address(shared.dv),     shared_address(shared.state),
                           shared_address(shared.d_state)};

  // Prologue. On Hopper one warp copies everything, on other GPUs each warp copies its chunk. The
  // operands of dQ come first.
  const Pipeline<2> pipeline{shared_address(shared.full)};
  if (threadIdx.x == 0) pipeline.init(1);
  __syncthreads();
  const bool copies = !Tiles::RUN_OVER || warp == 0;
  const int keys_of = key_head(arg, head);
  auto copy = [&](const TensorMap& map, const void* x, const i64(&stride)[3], int from_head, u32 to,
                  int token, int stage) {
    const Tiles from(map, x, stride, segment, from_head, warp & 3, lane);
#pragma unroll
    for (int r = 0; r < PANELS; ++r)
      if (Tiles::RUN_OVER || r == row)
#pragma unroll
        for (int p = 0; p < PANELS; ++p)
          from.load(square(to, r, p), token + r * PANEL, p * PANEL, pipeline, stage);
  };
  if (copies) {
    pipeline.producer_expect(0, (3 + !starts) * MATRIX_BYTES);
    copy(maps.d_o, arg.d_o, arg.o_stride, head, at.d_o, first, 0);
    copy(maps.dq, arg.dq, arg.o_stride, head, at.v_new, first, 0);
    copy(maps.k, arg.k, arg.k_stride, keys_of, at.k, first, 0);
    if (!starts)
      copy(maps.checkpoints, arg.checkpoints, arg.o_stride, head, at.state, first - S, 0);
  }
  pipeline.producer_commit();
  if (copies) {
    pipeline.producer_expect(1, (2 + !ends) * MATRIX_BYTES);
    copy(maps.dv, arg.dv, arg.o_stride, head, at.dv, first, 1);
    copy(maps.q, arg.q, arg.q_stride, keys_of, at.q, first, 1);
    if (!ends) copy(maps.dk, arg.dk, arg.o_stride, head, at.d_state, first, 1);
  }
  pipeline.producer_commit();
  if (starts) fill_checkpoint<T>(at.state, arg.initial_state ? arg.initial_state + own : nullptr);
  if (ends) fill_checkpoint<T>(at.d_state, arg.d_final ? arg.d_final + own : nullptr);
  // whether another sequence begins in the tile
  const bool runs_over = Tiles::RUN_OVER && arg.table && left < S;
  auto clear = [&](u32 matrix) {
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
      clear_rows(square(matrix, row, p) + (warp & 3) * CHUNK_BYTES, left - warp * CHUNK, lane);
  };
  pipeline.template consumer_wait<1>(0, 0);
  if (runs_over) clear(at.d_o), clear(at.v_new), clear(at.k);
  fence_proxy_async();
  __syncthreads();

  auto all_arrive = [&] {
    pipeline.template consumer_wait<0>(1, 0);
    if (runs_over) clear(at.dv), clear(at.q);
    fence_proxy_async();
    __syncthreads();
  };
  OperandRows rows;
  float reads[2], passes[2];
  // A row index known at compile time is faster, unless the code of both rows exceeds the
  // instruction cache, as with decays.
  const bool lower = S > 64 && row > 0;  // uniform in a warpgroup
  if constexpr (DECAY) {
    compute_query_gradient<T>(rows, at, decays, reads, all_arrive, arg.scale, row, warp, lane);
  } else {
    if (lower)
      compute_query_gradient<T>(rows, at, decays, reads, all_arrive, arg.scale, Fixed<PANELS - 1>(),
                                warp, lane);
    else
      compute_query_gradient<T>(rows, at, decays, reads, all_arrive, arg.scale, Fixed<0>(), warp,
                                lane);
    all_arrive();
  }
  Rows64 dK[PANELS] = {};
  {
    OperandRows values;
    load_values(values, at, row, warp, lane);
    add_matrix<T>(dK, values, at.state, lane);
  }
  float passed = 0.f;  // the flow through the whole tile
  if constexpr (DECAY) {
    const TokenDecays here(decays, row, warp, lane);
    scale_rows(dK, {here.before(0), here.before(1)});
    passed = exp2_of(decays->since[S - 1]) *
             dot_product<T>(shared.state, shared.d_state, MATRIX_BYTES / 16);
  }
  __syncthreads();  // all products with the state are done; dQ overwrites it
  store_matrix_rows(at.state, rows, row, warp, lane);
  float d_values[2];
  if constexpr (DECAY) {
    add_key_gradient<T>(dK, d_values, at, decays, reads, passes, arg.scale, row, warp, lane);
    store_flows(*decays, reads, passes, passed, warp, lane);
  } else if (lower) {
    add_key_gradient<T>(dK, d_values, at, decays, reads, passes, arg.scale, Fixed<PANELS - 1>(),
                        warp, lane);
  } else {
    add_key_gradient<T>(dK, d_values, at, decays, reads, passes, arg.scale, Fixed<0>(), warp, lane);
  }
  float d_beta = 0.f;
  if constexpr (READ_STEP) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own_token = warp * CHUNK + (lane >> 2) + 8 * r;
      const float a = steps.size(r, 0.f);
      if ((lane & 3) == 0 && own_token < left)
        arg.d_beta[entry + (i64)own_token * arg.heads] = a > 0.f ? d_values[r] / a / a : 0.f;
    }
  } else {
    d_beta = add_step_sizes<T>(dK, d_values, at.k, row, steps, warp, lane);
  }
#pragma unroll
  for (int p = 0; p < PANELS; ++p) pack_entries<T, Mask::all>(rows[p], dK[p], 1.f, 0, warp, lane);
  if constexpr (!READ_STEP) {
    // the four lanes of a row have the same value, so only one is added
    d_beta = lane & 3 ? 0.f : d_beta;
#pragma unroll
    for (int i = 4; i < 32; i *= 2) d_beta += __shfl_xor_sync(ALL, d_beta, i);
    if (lane == 0) shared.d_beta[warp] = d_beta;
  }
  __syncthreads();  // all products with dS are done; dK overwrites it
  store_matrix_rows(at.d_state, rows, row, warp, lane);
  float flow = 0.f;
  if constexpr (DECAY) flow = sum_flows(*decays);
  fence_proxy_async();
  __syncthreads();
  if constexpr (DECAY) store_decay_gradient(arg.d_decay + entry, arg.heads, *decays, flow, left);
  if (!READ_STEP && threadIdx.x == 0) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < INPUT_WARPS; ++w) sum += shared.d_beta[w];
    arg.d_beta[blockIdx.x] = sum;
  }
  auto store = [&](const TensorMap& map, void* x, u32 from) {
    if (runs_over || !Tiles::RUN_OVER) {
      const Rows to(x, arg.o_stride, segment, head, lane);
#pragma unroll
      for (int p = 0; p < PANELS; ++p)
        to.store(square(from, row, p) + (warp & 3) * CHUNK_BYTES, first + warp * CHUNK, p * PANEL);
    } else if (warp == 0) {
      const Tiles to(map, x, arg.o_stride, segment, head, warp & 3, lane);
#pragma unroll
      for (int r = 0; r < PANELS; ++r)
#pragma unroll
        for (int p = 0; p < PANELS; ++p) to.store(square(from, r, p), first + r * PANEL, p * PANEL);
      to.finish_stores();
    }
  };
  store(maps.dq, arg.dq, at.state);
  store(maps.dk, arg.dk, at.d_state);
}

QUASAR_LAUNCH(input_gradient, 32 * INPUT_WARPS, sizeof(InputShared), GradientArguments)
QUASAR_KERNEL(input_gradient, __launch_bounds__(32 * INPUT_WARPS, INPUT_BLOCKS),
              (const __grid_constant__ GradientArguments arg,
               const __grid_constant__ GradientMaps maps),
              (arg, maps))

}  // namespace quasar::scan

#endif

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
