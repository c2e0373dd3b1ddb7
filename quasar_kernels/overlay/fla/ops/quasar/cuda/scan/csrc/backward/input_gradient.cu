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
// Prologue: three groups of copies, first the operands of the products with S. There is no loop over
// tiles. Epilogue: dQ and dK overwrite S and dS in shared memory and are copied to device memory from
// there.
//
// A wait for products costs about as much as the products themselves, so independent products share
// one wait: the scores dO V'^T and dv V'^T of the same columns, and two of the terms of dK.
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
  u64 full[3];
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
  float lambda[2] = {};
  for_each_pair<T>(k, row, warp, lane, [&](int r, float x, float&) { lambda[r] += x * x; }, dK);
  add_in_quad(lambda);
  float factor[2], d_beta = 0.f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float a = steps.size(r, lambda[r]);
    float by_lambda, by_beta;
    step_size_slopes(lambda[r], steps.beta, by_lambda, by_beta);
    const float da = a > 0.f ? d_values[r] / a / a : 0.f;  // a is 0 only for zero keys
    factor[r] = 2.f * da * by_lambda;
    d_beta += da * by_beta;
  }
  for_each_pair<T>(k, row, warp, lane, [&](int r, float x, float& at) { at += factor[r] * x; }, dK);
  return d_beta;
}

// The shared-memory addresses of a tile's matrices.
struct TileOperands {
  u32 q, k, d_o, v_new, dv, state, d_state;
};

// A block's barrier in two parts: a warpgroup that calls leave_state goes on, and wait_for_state
// returns once the other warpgroup has called leave_state.
__device__ __forceinline__ void leave_state(int row) {
#if QUASAR_WGMMA
  if (PANELS > 1) asm volatile("barrier.cta.arrive %0, 256;" : : "r"(2 - row) : "memory");
#endif
}
__device__ __forceinline__ void wait_for_state(int row) {
#if QUASAR_WGMMA
  if (PANELS > 1) {
    asm volatile("barrier.cta.sync %0, 256;" : : "r"(1 + row) : "memory");
    return;
  }
#endif
  __syncthreads();
}

// Adds dP K to dQ, of the row-th 64 tokens, and sets `values` to -N, both for the columns of the j-th
// 64 tokens. If these are the same tokens (DIAGONAL), `own_scores` and `d_values` become dO . V' and
// dv . V' of this lane's tokens. With decays, dP lacks its diagonal.
template <Scalar T, bool DIAGONAL>
__device__ __forceinline__ void add_earlier_tokens(Rows64 (&dQ)[PANELS], Operand& values,
                                                   float (&own_scores)[2], float (&d_values)[2],
                                                   const TileOperands& tile, const RowDecays& here,
                                                   const TileDecays* decays, float scale, int row,
                                                   int j, int warp, int lane) {
  constexpr Mask SCORES = !DIAGONAL ? Mask::all : DECAY ? Mask::strictly_lower : Mask::lower;
  constexpr Mask VALUES = DIAGONAL ? Mask::strictly_lower : Mask::all;
  Rows64 x, y;
  open_products();
  multiply_rows<T>(x, tile.d_o, row, tile.v_new, j, warp, lane);
  multiply_rows<T>(y, tile.dv, row, tile.v_new, j, warp, lane);
  close_products();
  finish_products(x, y);
  if constexpr (DIAGONAL) {
    extract_diagonal(own_scores, x, warp, lane);
    extract_diagonal(d_values, y, warp, lane);
  }
  Operand high, low;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    float between[2][4], kept[2][4];
    here.template between<false>(between, decays, j, t, lane);
    mask_entries<SCORES>(kept, x, t, between, DECAY ? scale : 1.f, warp, lane);
    split<T>(kept, high[t], low[t]);
    mask_entries<VALUES>(kept, y, t, between, -1.f, warp, lane);
    pack_tiles<T>(values[t], kept[0], kept[1]);
  }
  open_products();
  add_tokens<T>(dQ, high, tile.k, j, lane);
  add_tokens<T>(dQ, low, tile.k, j, lane);
  close_products();
  finish_products(dQ);
}

// Adds dP^T Q - N^T K for the columns of the j-th 64 tokens to dK. With decays, dP lacks its
// diagonal; if DIAGONAL, `own_scores` becomes dO . V' of this lane's tokens.
template <Scalar T, bool DIAGONAL>
__device__ __forceinline__ void add_later_tokens(Rows64 (&dK)[PANELS], float (&own_scores)[2],
                                                 const TileOperands& tile, const RowDecays& here,
                                                 const TileDecays* decays, float scale, int row,
                                                 int j, int warp, int lane) {
  constexpr Mask SCORES = !DIAGONAL ? Mask::all : DECAY ? Mask::strictly_upper : Mask::upper;
  constexpr Mask VALUES = DIAGONAL ? Mask::strictly_upper : Mask::all;
  Rows64 x, y;
  open_products();
  multiply_rows<T>(x, tile.v_new, row, tile.d_o, j, warp, lane);
  multiply_rows<T>(y, tile.v_new, row, tile.dv, j, warp, lane);
  close_products();
  finish_products(x, y);
  if constexpr (DECAY && DIAGONAL) extract_diagonal(own_scores, x, warp, lane);
  Operand high, low, scores;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    float between[2][4], kept[2][4];
    here.template between<true>(between, decays, j, t, lane);
    mask_entries<SCORES>(kept, x, t, between, scale, warp, lane);
    if constexpr (DECAY)
      split<T>(kept, high[t], low[t]);
    else
      pack_tiles<T>(high[t], kept[0], kept[1]);
    mask_entries<VALUES>(kept, y, t, between, -1.f, warp, lane);
    pack_tiles<T>(scores[t], kept[0], kept[1]);
  }
  open_products();
  add_tokens<T>(dK, high, tile.q, j, lane);
  if constexpr (DECAY) add_tokens<T>(dK, low, tile.q, j, lane);
  add_tokens<T>(dK, scores, tile.k, j, lane);
  close_products();
  finish_products(dK);
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
  const i64 own = (segment.sequence * arg.heads + head) * S * S;
  const bool starts = segment.is_first && tile == 0, ends = segment.is_last && left <= S;
  const TileOperands at = {shared_address(shared.q),      shared_address(shared.k),
                           shared_address(shared.d_o),    shared_address(shared.v_new),
                           shared_address(shared.dv),     shared_address(shared.state),
                           shared_address(shared.d_state)};

  // Prologue. On Hopper one warp copies everything, on other GPUs each warp copies its chunk. The
  // copies start first: a block of heads of 128 has its multiprocessor to itself and waits for them.
  const Pipeline<3> pipeline{shared_address(shared.full)};
  if (threadIdx.x == 0) pipeline.init(1);
  __syncwarp();
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
    pipeline.producer_expect(0, (2 + !starts) * MATRIX_BYTES);
    copy(maps.d_o, arg.d_o, arg.o_stride, head, at.d_o, first, 0);
    if (!starts)
      copy(maps.checkpoints, arg.checkpoints, arg.o_stride, head, at.state, first - S, 0);
    copy(maps.dv, arg.dv, arg.o_stride, head, at.dv, first, 0);
  }
  pipeline.producer_commit();
  if (copies) {
    pipeline.producer_expect(1, 2 * MATRIX_BYTES);
    copy(maps.dq, arg.dq, arg.o_stride, head, at.v_new, first, 1);
    copy(maps.k, arg.k, arg.k_stride, keys_of, at.k, first, 1);
  }
  pipeline.producer_commit();
  if (copies) {
    pipeline.producer_expect(2, (1 + !ends) * MATRIX_BYTES);
    if (!ends) copy(maps.dk, arg.dk, arg.o_stride, head, at.d_state, first, 2);
    copy(maps.q, arg.q, arg.q_stride, keys_of, at.q, first, 2);
  }
  pipeline.producer_commit();
  const Steps steps = StepSizes(arg, segment, head, lane).of(first + warp * CHUNK);
  const i64 entry = entry_of(arg, segment, head, first);  // offset of step sizes and decays
  TileDecays* const decays = shared.pointer();            // null without decays
  if constexpr (DECAY) fill_decays(*decays, arg.decay + entry, arg.heads, left);
  if (starts) fill_checkpoint<T>(at.state, arg.initial_state ? arg.initial_state + own : nullptr);
  if (ends) fill_checkpoint<T>(at.d_state, arg.d_final ? arg.d_final + own : nullptr);
  // whether another sequence begins in the tile
  const bool runs_over = Tiles::RUN_OVER && arg.table && left < S;
  auto clear = [&](u32 matrix) {
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
      clear_rows(square(matrix, row, p) + (warp & 3) * CHUNK_BYTES, left - warp * CHUNK, lane);
  };
  __syncthreads();  // the pipeline's barriers exist
  pipeline.template consumer_wait<2>(0, 0);
  if (runs_over) clear(at.d_o), clear(at.dv);
  fence_proxy_async();
  __syncthreads();

  Rows64 dQ[PANELS], dK[PANELS];
  open_products();
  multiply_matrix<T, true>(dQ, at.d_o, row, at.state, warp, lane);
  close_products();
  pipeline.template consumer_wait<1>(1, 0);
  if (runs_over || !Tiles::RUN_OVER) {
    if (runs_over) clear(at.v_new), clear(at.k);
    fence_proxy_async();
    __syncthreads();
  }
  finish_products(dQ);
  const RowDecays here(decays, row, warp, lane);
  if constexpr (DECAY) scale_rows(dQ, {arg.scale * here.before(0), arg.scale * here.before(1)});
  float own_scores[2], d_values[2], flows[2] = {}, passes[2] = {}, passed = 0.f;
  Operand earlier = {}, values;  // -N for the columns of the other 64 tokens, and of the same
  if (row > 0)
    add_earlier_tokens<T, false>(dQ, earlier, own_scores, d_values, at, here, decays, arg.scale,
                                 row, 0, warp, lane);
  add_earlier_tokens<T, true>(dQ, values, own_scores, d_values, at, here, decays, arg.scale, row,
                              row, warp, lane);
  if constexpr (READ_STEP) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own_token = warp * CHUNK + (lane >> 2) + 8 * r;
      const float size = steps.size(r, 0.f);
      if ((lane & 3) == 0 && own_token < left)
        arg.d_beta[entry + (i64)own_token * arg.heads] =
            size > 0.f ? d_values[r] / size / size : 0.f;
    }
  }
  pipeline.template consumer_wait<0>(2, 0);
  if (runs_over || !Tiles::RUN_OVER) {  // no barrier otherwise: the other warpgroup may be slower
    if (runs_over) clear(at.q);
    fence_proxy_async();
    __syncthreads();
  }

  open_products();
  multiply_matrix<T, true>(dK, at.dv, row, at.state, warp, lane);
  close_products();
  if constexpr (DECAY) {
    // q . dQ; each token's read of its own write is added afterwards
    for_each_pair<T>(
        at.q, row, warp, lane, [&](int r, float q, float dq) { flows[r] += q * dq; }, dQ);
    const float own[2] = {arg.scale * own_scores[0], arg.scale * own_scores[1]};
    for_each_pair<T>(
        at.k, row, warp, lane, [&](int r, float k, float& dq) { dq += own[r] * k; }, dQ);
    // the flow through the whole tile
    passed =
        exp2_of(decays->since[S - 1]) * dot_product<T>(shared.state, shared.d_state, warp, lane);
  }
  Operand rows[PANELS];  // dQ
  pack_rows<T>(rows, dQ, DECAY ? 1.f : arg.scale);
  auto store_queries = [&] {  // dQ overwrites S
    wait_for_state(row);
    store_matrix_rows(at.state, rows, row, warp, lane);
  };
  finish_products(dK);
  leave_state(row);
  if constexpr (PANELS == 1) store_queries();
  scale_rows(dK, {-here.before(0), -here.before(1)});
  open_products();
  if (PANELS > 1) add_tokens<T>(dK, earlier, at.k, 0, lane);
  add_tokens<T>(dK, values, at.k, row, lane);
  if constexpr (DECAY) {
    Rows64 written[PANELS];  // V' dS^T
    multiply_matrix<T, true>(written, at.v_new, row, at.d_state, warp, lane);
    close_products();
    finish_products(dK, written);
    float reads[2] = {};
    const float after[2] = {here.after(decays, 0), here.after(decays, 1)};
    for_each_pair<T>(
        at.k, row, warp, lane,
        [&](int r, float k, float& dk, float write) {
          reads[r] += k * dk;
          passes[r] += k * write;
          dk += after[r] * write;
        },
        dK, written);
#pragma unroll
    for (int r = 0; r < 2; ++r) flows[r] += 2.f * reads[r], passes[r] *= after[r];
  } else {
    multiply_matrix<T, false>(dK, at.v_new, row, at.d_state, warp, lane);
    close_products();
    finish_products(dK);
  }
  if constexpr (PANELS > 1) store_queries();  // late: the other warpgroup may need S for longer
  if (row < PANELS - 1)
    add_later_tokens<T, false>(dK, own_scores, at, here, decays, arg.scale, row, PANELS - 1, warp,
                               lane);
  add_later_tokens<T, true>(dK, own_scores, at, here, decays, arg.scale, row, row, warp, lane);
  if constexpr (DECAY) {
    for_each_pair<T>(
        at.k, row, warp, lane, [&](int r, float k, float dk) { flows[r] -= k * dk; }, dK);
    add_in_quad(flows), add_in_quad(passes);
    const float own[2] = {arg.scale * own_scores[0], arg.scale * own_scores[1]};
    for_each_pair<T>(
        at.q, row, warp, lane, [&](int r, float q, float& dk) { dk += own[r] * q; }, dK);
    store_flows(*decays, flows, passes, passed, warp, lane);
  }
  float d_beta = 0.f;
  if constexpr (!READ_STEP) {
    d_beta = add_step_sizes<T>(dK, d_values, at.k, row, steps, warp, lane);
    // the four lanes of a row have the same value, so only one is added
    d_beta = lane & 3 ? 0.f : d_beta;
#pragma unroll
    for (int i = 4; i < 32; i *= 2) d_beta += __shfl_xor_sync(ALL, d_beta, i);
    if (lane == 0) shared.d_beta[warp] = d_beta;
  }
  __syncthreads();  // all products with dS are done; dK overwrites it
  pack_rows<T>(rows, dK, 1.f);
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
