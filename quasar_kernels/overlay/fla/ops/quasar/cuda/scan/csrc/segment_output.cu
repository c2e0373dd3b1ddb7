// Pass 2 of the segmented scan: recompute each segment from the state that enters it, and write o.
//
// Grid: one block for each segment, head and panel of 64 value channels. Each warp owns 16 columns
// of the state (32 without wgmma) and keeps them in registers. output_chunk.cuh has the algebra.
//
// Mainloop, over tiles of 16 * WARPS tokens. While a tile is copied in, the one before it is
// prepared (warp w computes the WY matrix and the scores of chunk w) and then applied (every warp
// updates its columns with all chunks). There are no dedicated producer warps: on Hopper one lane
// of each warp copies its keys and queries, and a lane of warp 0 copies the values and o. Epilogue
// of a tile: o overwrites v in shared memory and is copied out from there.
//
// Shared memory: two stages of keys and queries, two of values, one set of WY matrices and scores.

#include "copies.cuh"
#include "output_chunk.cuh"
#include "pace.cuh"

namespace quasar::scan {

constexpr int OUTPUT_WARPS = QUASAR_WGMMA ? 4 : 2;
// occupancy: blocks per multiprocessor
constexpr int OUTPUT_BLOCKS = QUASAR_WGMMA ? (S == 64 ? 4 : 2) : (S == 64 ? 6 : 4);

struct OutputTiles {
  static constexpr int WARPS = OUTPUT_WARPS;
  uint4 keys_queries[2][WARPS * KeysQueries::BYTES / 16];
  uint4 values[2][WARPS * CHUNK_BYTES / 16];  // overwritten by o
  Triangle wy[WARPS];                         // -A diag(a)
  Triangle scores[WARPS];                     // tril(Q K^T)
};

struct OutputShared : OutputTiles, DecaySlots<OUTPUT_WARPS> {
  u64 full[2], values_full[2];
};

template <Scalar T>
__device__ __forceinline__ void segment_output(const Arguments& arg, const TensorMaps& maps) {
  constexpr int WARPS = OUTPUT_WARPS, BLOCKS = 4 / WARPS, TOKENS = WARPS * CHUNK;
  static_assert(!Tiles::RUN_OVER || TOKENS == 64, "the tensor maps' tiles have 64 tokens");
  extern __shared__ __align__(1024) uint4 raw[];
  OutputShared& shared = *(OutputShared*)raw;
  const int unit = blockIdx.x / PANELS, panel = blockIdx.x % PANELS;
  const int head = unit % arg.heads, lane = threadIdx.x & 31;
  const int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0);  // uniform to the compiler
  const Segment segment = find_segment(arg, unit / arg.heads);
  const i64 chain = segment.sequence * arg.heads + head;
  if (is_skipped(arg, chain)) return;
  const StepSizes steps(arg, segment, head, lane);
  const BlockMasks mask(lane);
  const int tiles = (segment.tokens + TOKENS - 1) / TOKENS;

  constexpr u32 BYTES = KeysQueries::BYTES, TILE = WARPS * BYTES, VALUES_TILE = WARPS * CHUNK_BYTES;
  const u32 keys_queries = shared_address(shared.keys_queries);
  const u32 own_keys_queries = keys_queries + warp * BYTES;
  const u32 values = shared_address(shared.values), own_values = values + warp * CHUNK_BYTES;
  const Chunks k(maps.k, arg.k, arg.k_stride, segment, key_head(arg, head), lane);
  const Chunks q(maps.q, arg.q, arg.q_stride, segment, key_head(arg, head), lane);
  const Tiles v(maps.v, arg.v, arg.v_stride, segment, head, warp, lane);
  const Tiles o(maps.o, arg.o, arg.o_stride, segment, head, warp, lane);
  const Pipeline<2> pipeline{shared_address(shared.full)};
  const Pipeline<2> values_pipeline{shared_address(shared.values_full)};
  if (threadIdx.x == 0) {
    pipeline.init(WARPS);
    values_pipeline.init(1);
  }
  __syncthreads();

  auto token = [&](int s) { return s * TOKENS + warp * CHUNK; };
  auto load_keys_queries = [&](int s) {
    if (s < tiles) {
      const int stage = s & 1;
      const u32 to = own_keys_queries + stage * TILE;
      pipeline.producer_expect(stage, BYTES);
#pragma unroll
      for (int p = 0; p < PANELS; ++p) {
        k.load(to + 2 * p * CHUNK_BYTES, token(s), p * PANEL, pipeline, stage);
        q.load(to + (2 * p + 1) * CHUNK_BYTES, token(s), p * PANEL, pipeline, stage);
      }
    }
    pipeline.producer_commit();
  };
  auto load_values = [&](int s) {
    if (s < tiles && Tiles::copied_by(warp)) {
      const int stage = s & 1;
      values_pipeline.producer_expect(stage, VALUES_TILE);
      v.load(values + stage * VALUES_TILE, s * TOKENS, panel * PANEL, values_pipeline, stage);
    }
    values_pipeline.producer_commit();
  };
  load_keys_queries(0);
  load_values(0);
  Steps next_steps = steps.of(token(0));  // of the tile that is prepared next

  StateColumns state[BLOCKS];
  const i64 own = chain * S * S;
  const float* enter = segment.is_first ? (arg.initial_state ? arg.initial_state + own : nullptr)
                                        : arg.states + ((i64)unit - arg.heads) * S * S;
  auto place = [&](int b, int p, int m, int e) {
    const int column = panel * PANEL + (warp * BLOCKS + b) * 16 + (lane >> 2) + 8 * (e >> 1);
    return (p * PANEL + 8 * m + 2 * (lane & 3) + (e & 1)) * S + column;
  };
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
    for_each_element(
        [&](int p, int m, int e) { state[b][p][m][e] = enter ? -enter[place(b, p, m, e)] : 0.f; });

  const u32 own_columns = row_address(values, lane) ^ 32 * warp * BLOCKS;
  // whether another sequence may begin in the last tile
  const bool runs_over = Chunks::RUN_OVER && arg.table && segment.tokens % TOKENS;
  int stops[PANELS];    // number of tiles at the segment's start that pass 1 skipped
  float skipped = 0.f;  // the largest entry of the state after these tiles
  // with decays: the product of the decays since then, times MAP_ROW_BOUND / NEGLIGIBLE
  float fading = 0.f;
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
    stops[p] = arg.stops && !arg.repeat ? arg.stops[(i64)unit * PANELS + p] / TOKENS : 0;
  for (int s = 0; s < tiles; ++s) {
    const int stage = s & 1;
    const u32 parity = s >> 1 & 1;
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
      if (s && s == stops[p]) {
        skipped = fmaxf(skipped, largest(state));
        fading = MAP_ROW_BOUND / NEGLIGIBLE<T>;
      }
    pipeline.template consumer_wait<1>(stage, parity);
    if (runs_over && s == tiles - 1) {  // zero keys leave the state unchanged
      values_pipeline.template consumer_wait<0>(stage, parity);
      const int left = segment.tokens - token(s);
#pragma unroll
      for (int p = 0; p < PANELS; ++p)
        clear_rows(own_keys_queries + stage * TILE + 2 * p * CHUNK_BYTES, left, lane);
      clear_rows(own_values + stage * VALUES_TILE, left, lane);
    }
    fence_proxy_async();
    __syncthreads();
    if (s && Tiles::copied_by(warp))
      o.store(values + (stage ^ 1) * VALUES_TILE, (s - 1) * TOKENS, panel * PANEL);
    load_keys_queries(s + 1);
    const u32 chunks = keys_queries + stage * TILE;
    prepare_chunk<T>({chunks + warp * BYTES}, next_steps, mask, shared.wy[warp],
                     shared.scores[warp], shared.decays(warp), lane);
    next_steps = steps.of(token(s + 1));
    if (Tiles::copied_by(warp)) o.finish_stores();
    load_values(s + 1);  // overwrites the previous tile's output
    values_pipeline.template consumer_wait<2>(stage, parity);
    __syncthreads();
    const u32 columns = own_columns + stage * VALUES_TILE;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      walk_chunk<T, BLOCKS>(state, {chunks + i * BYTES}, columns + i * CHUNK_BYTES, shared.wy[i],
                            shared.scores[i], shared.decays(i), arg.scale, lane);
      fading *= shared.decays(i).whole;
    }
    finish_state<BLOCKS>(state);
    sync_pair();
  }
  fence_proxy_async();
  __syncthreads();
  if (tiles > 0) {
    const u32 from = (tiles - 1 & 1) * VALUES_TILE;
    if (runs_over) {
      Rows(arg.o, arg.o_stride, segment, head, lane)
          .store(own_values + from, token(tiles - 1), panel * PANEL);
    } else if (Tiles::copied_by(warp)) {
      o.store(values + from, (tiles - 1) * TOKENS, panel * PANEL);
      o.finish_stores();
    }
  }
  if constexpr (DECAY) skipped *= fminf(fading, 1.f);
  // the columns of the state are independent, so each warp checks its own columns
  if (skipped > 0.f && !(skipped <= STATE_RATIO * largest(state)) && lane == 0)
    arg.unfinished[chain] = 1;
  if (!segment.is_last || !arg.final_state) return;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
    for_each_element([&](int p, int m, int e) {
      arg.final_state[own + place(b, p, m, e)] = -state[b][p][m][e];
    });
}

QUASAR_LAUNCH(segment_output, 32 * OUTPUT_WARPS, sizeof(OutputShared), Arguments)
QUASAR_KERNEL(segment_output, QUASAR_IN_PAIRS __launch_bounds__(32 * OUTPUT_WARPS, OUTPUT_BLOCKS),
              (const __grid_constant__ Arguments arg, const __grid_constant__ TensorMaps maps),
              (arg, maps))

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
