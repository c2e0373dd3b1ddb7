// The backward pass's forward recomputation: V' of all tokens, and a checkpoint of the state after
// every 64 or 128 tokens, as many as a head has channels.
//
// Grid, warps and mainloop are those of segment_output.cu: one block for each segment, head and
// panel of 64 value channels; its warps own columns of -S^T. A chunk gives
//     V' = A diag(a) (V - K S),  S += K^T V',
// with the WY representation's matrix A diag(a) (chunk.cuh). V' enters the state rounded, as it is
// stored. Later V' then compensate for the rounding of earlier ones, and the sum of K^T V' over a
// tile equals the state's change even if keys are alike. V' is stored in the rows of dq. With
// decays, the stored V' is decayed to the chunk's end and enters the state as two operands.
//
// Shared memory: two stages of keys, two of values (V' overwrites v), one set of WY matrices.

#include "gradients.cuh"

namespace quasar::scan {

struct CheckpointTiles {
  uint4 keys[2][WALK_TILE_BYTES / 16];
  uint4 values[2][WALK_PANEL_BYTES / 16];  // overwritten by V'
  Triangle wy[WALK_WARPS];                 // -A diag(a)
};

struct CheckpointShared : CheckpointTiles, DecaySlots<WALK_WARPS> {
  u64 full[2], values_full[2];
};

// -A diag(a) of this warp's chunk
template <Scalar T>
__device__ __forceinline__ void prepare_wy(u32 keys, const Steps& steps, const BlockMasks& mask,
                                           Triangle& wy, ChunkDecays& chunk_decays, int lane) {
  ChunkKeys at = {};
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      u32 k[4];
      load_rows(k, row_address(keys + p * WALK_PANEL_BYTES, lane) ^ 32 * t);
      add_products<T>(at.gram, k, k);
    }
  compute_step_sizes(at, steps, lane);
  float wy_matrix[2][4];
  compute_wy(at, mask, wy_matrix, lane);
  const Decays decays(steps, lane);
  decays.apply(wy_matrix);
  chunk_decays.store(decays, lane);
  store_triangle(wy, wy_matrix, lane);
}

// updates the state's columns with one chunk, and writes its V' in place of its values
template <Scalar T>
__device__ __forceinline__ void walk_values(WalkState& state, u32 keys, u32 values,
                                            const Triangle& wy, const ChunkDecays& chunk_decays,
                                            int lane) {
  u32 v[COLUMN_BLOCKS][4], rounded[COLUMN_BLOCKS][4];
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; ++b) load_columns(v[b], values ^ 32 * b);
  const float4 left = wy.left[lane];
  const float2 corner = wy.corner[lane];
  finish_state<COLUMN_BLOCKS>(state);
  float read[COLUMN_BLOCKS][2][4], V[COLUMN_BLOCKS][2][4] = {};  // -V'^T
  read_keys<T, false>(state, read, keys, lane);
  const auto decays = chunk_decays.load(lane);
  for_each_state_element(state, [&](float& x) { chunk_decays.scale_state(x); });
  u32 low[COLUMN_BLOCKS][4];  // with decays: the low part of V'
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; ++b) {
    decays.scale_before(read[b][0], read[b][1]);
    add_values<T>(V[b], v[b], read[b][0], read[b][1], left, corner);
    pack_tiles<T>(rounded[b], V[b][0], V[b][1]);
    if constexpr (DECAY) {
      float behind[2][4];  // the stored V', decayed to the chunk's end
      unpack_tiles<T>(rounded[b], behind);
      decays.scale_after(behind[0], behind[1]);
      split<T>(behind, rounded[b], low[b]);
    }
  }
  open_products();
  add_rows<T>(state, rounded, keys, lane);
  if constexpr (DECAY) add_rows<T>(state, low, keys, lane);
  close_products();
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; ++b)
    store_output<T>(values ^ 32 * b, 1.f, V[b][0], V[b][1], lane);
}

template <Scalar T>
__device__ __forceinline__ void state_checkpoint(const GradientArguments& arg,
                                                 const GradientMaps& maps) {
  extern __shared__ __align__(1024) uint4 raw[];
  CheckpointShared& shared = *(CheckpointShared*)raw;
  const int unit = blockIdx.x / PANELS, panel = blockIdx.x % PANELS;
  const int head = unit % arg.heads, lane = threadIdx.x & 31;
  const int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0);  // uniform to the compiler
  const Segment segment = find_segment(arg, unit / arg.heads);
  const StepSizes steps(arg, segment, head, lane);
  const BlockMasks mask(lane);
  const int tiles = (segment.tokens + WALK_TOKENS - 1) / WALK_TOKENS;
  const int column = panel * PANEL + warp * COLUMN_BLOCKS * 16;  // the first of this warp's

  const u32 keys = shared_address(shared.keys), values = shared_address(shared.values);
  const Tiles k(maps.k, arg.k, arg.k_stride, segment, key_head(arg, head), warp, lane);
  const Tiles v(maps.v, arg.v, arg.v_stride, segment, head, warp, lane);
  const Tiles v_new(maps.dq, arg.dq, arg.o_stride, segment, head, warp, lane);
  const Pipeline<2> pipeline{shared_address(shared.full)};
  const Pipeline<2> values_pipeline{shared_address(shared.values_full)};
  if (threadIdx.x == 0) {
    pipeline.init(1);
    values_pipeline.init(1);
  }
  __syncthreads();

  auto load_keys = [&](int s) {
    if (s < tiles && Tiles::copied_by(warp)) {
      const int stage = s & 1;
      pipeline.producer_expect(stage, WALK_TILE_BYTES);
#pragma unroll
      for (int p = 0; p < PANELS; ++p)
        k.load(keys + stage * WALK_TILE_BYTES + p * WALK_PANEL_BYTES, s * WALK_TOKENS, p * PANEL,
               pipeline, stage);
    }
    pipeline.producer_commit();
  };
  auto load_values = [&](int s) {
    if (s < tiles && Tiles::copied_by(warp)) {
      const int stage = s & 1;
      values_pipeline.producer_expect(stage, WALK_PANEL_BYTES);
      v.load(values + stage * WALK_PANEL_BYTES, s * WALK_TOKENS, panel * PANEL, values_pipeline,
             stage);
    }
    values_pipeline.producer_commit();
  };
  load_keys(0);
  load_values(0);
  auto token = [&](int s) { return s * WALK_TOKENS + warp * CHUNK; };
  Steps next_steps = steps.of(token(0));  // of the tile that is prepared next

  WalkState state;  // -S^T
  const float* enter =
      segment.is_first
          ? (arg.initial_state ? arg.initial_state + (segment.sequence * arg.heads + head) * S * S
                               : nullptr)
          : arg.states + ((i64)unit - arg.heads) * S * S;
  for_each_place(state, column, lane, [&](int at, float& x) { x = enter ? -enter[at] : 0.f; });

  const u32 own_columns = row_address(values, lane) ^ 32 * warp * COLUMN_BLOCKS;
  // whether another sequence begins in the last tile
  const bool runs_over = Tiles::RUN_OVER && arg.table && segment.tokens % WALK_TOKENS;
  for (int s = 0; s < tiles; ++s) {
    const int stage = s & 1;
    const u32 parity = s >> 1 & 1;
    const u32 chunks = keys + stage * WALK_TILE_BYTES;
    const u32 chunk_values = values + stage * WALK_PANEL_BYTES;
    pipeline.template consumer_wait<1>(stage, parity);
    if (runs_over && s == tiles - 1) {  // zero keys leave the state unchanged
      values_pipeline.template consumer_wait<0>(stage, parity);
      const int left = segment.tokens - s * WALK_TOKENS - warp * CHUNK;
#pragma unroll
      for (int p = 0; p < PANELS; ++p)
        clear_rows(chunks + p * WALK_PANEL_BYTES + warp * CHUNK_BYTES, left, lane);
      clear_rows(chunk_values + warp * CHUNK_BYTES, left, lane);
    }
    fence_proxy_async();
    __syncthreads();
    if (s && Tiles::copied_by(warp))
      v_new.store(values + (stage ^ 1) * WALK_PANEL_BYTES, (s - 1) * WALK_TOKENS, panel * PANEL);
    load_keys(s + 1);
    prepare_wy<T>(chunks + warp * CHUNK_BYTES, next_steps, mask, shared.wy[warp],
                  shared.decays(warp), lane);
    next_steps = steps.of(token(s + 1));
    if (Tiles::copied_by(warp)) v_new.finish_stores();
    load_values(s + 1);  // overwrites V' of the previous tile
    values_pipeline.template consumer_wait<2>(stage, parity);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WALK_WARPS; ++i)
      walk_values<T>(state, chunks + i * CHUNK_BYTES,
                     own_columns + stage * WALK_PANEL_BYTES + i * CHUNK_BYTES, shared.wy[i],
                     shared.decays(i), lane);
    finish_state<COLUMN_BLOCKS>(state);
    const int done = (s + 1) * WALK_TOKENS;
    if (done % S == 0 && !(segment.is_last && done >= segment.tokens))
      store_checkpoint<T, -1>(arg.checkpoints, arg.o_stride, segment, head, done - S, state, column,
                              lane);
    sync_pair();
  }
  fence_proxy_async();
  __syncthreads();
  if (tiles > 0) {
    const u32 from = values + (tiles - 1 & 1) * WALK_PANEL_BYTES;
    if (runs_over) {
      Rows(arg.dq, arg.o_stride, segment, head, lane)
          .store(from + warp * CHUNK_BYTES, (tiles - 1) * WALK_TOKENS + warp * CHUNK,
                 panel * PANEL);
    } else if (Tiles::copied_by(warp)) {
      v_new.store(from, (tiles - 1) * WALK_TOKENS, panel * PANEL);
      v_new.finish_stores();
    }
  }
}

QUASAR_LAUNCH(state_checkpoint, 32 * WALK_WARPS, sizeof(CheckpointShared), GradientArguments)
QUASAR_KERNEL(state_checkpoint, QUASAR_IN_PAIRS __launch_bounds__(32 * WALK_WARPS, WALK_BLOCKS),
              (const __grid_constant__ GradientArguments arg,
               const __grid_constant__ GradientMaps maps),
              (arg, maps))

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
