// Pass 1 of the segmented scan: each segment's affine map of the state, S_out = G S_in + R, in
// fp32.
//
// Grid: one block for each segment, head and panel of 64 rows of G and R. Each of 4 warps owns 16
// rows and keeps them in registers. map_chunk.cuh has the algebra.
//
// Mainloop, over tiles of 64 tokens from the segment's last to its first. Three pipeline steps run
// on different tiles at once: copy (TMA on Hopper, cp.async elsewhere), prepare (warp w computes
// chunk w's step sizes and WY matrix), absorb (every warp multiplies its rows by all four chunks).
// There are no dedicated producer warps. A sequence's last segment needs no map, and all others are
// whole tiles, so no tile is partial. Rows of G are at first stored as G - I. Every CHECK_EVERY
// tiles, rows that are far from the identity's are switched to storing G, and the block may stop
// once all of G is negligible (segments.cuh).
// Epilogue: G, rounded to tf32, goes to `maps` and R to `states`.
//
// Shared memory: three stages of keys, two of values, two of prepared chunks, and the mbarriers.
//
// Blocks with launch indices that differ by a fixed number share a multiprocessor. Heads are
// rotated across segments, so that these blocks work on different heads. The blocks of the slowest
// head, in which maps decay last, then run on different multiprocessors.

#include "copies.cuh"
#include "map_chunk.cuh"

namespace quasar::scan {

constexpr int MAP_BLOCKS = S > 64 ? 2 : QUASAR_WGMMA ? 4 : 3;  // occupancy: blocks per SM
constexpr int CHECK_EVERY = 4;                                 // tiles

struct MapShared {
  static constexpr int TILE = PANELS * MAP_PANEL_BYTES;
  uint4 keys[3][TILE / 16], values[2][TILE / 16];
  Prepared chunks[2][MAP_WARPS];
  u64 full[3];
};

// whether x is true in all threads of the block; uniform in a warp, also to the compiler
__device__ __forceinline__ bool all_agree(bool x) {
  return __shfl_sync(ALL, __syncthreads_and(x), 0) != 0;
}

template <Scalar T>
__device__ __forceinline__ void segment_map(const Arguments& arg, const TensorMaps& maps) {
  constexpr int TOKENS = MAP_WARPS * CHUNK;
  constexpr u32 TILE = MapShared::TILE;
  extern __shared__ __align__(1024) uint4 raw[];
  MapShared& shared = *(MapShared*)raw;
  const int place = blockIdx.x / PANELS, panel = blockIdx.x % PANELS, lane = threadIdx.x & 31;
  const int index = place / arg.heads, total = gridDim.x / PANELS / arg.heads;  // of segments
  const int head = (place + index * arg.heads / total) % arg.heads;
  const int unit = index * arg.heads + head;
  const int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0);  // uniform to the compiler
  const Segment segment = find_segment(arg, index);
  const i64 chain = segment.sequence * arg.heads + head;
  if (is_skipped(arg, chain)) return;
  const bool may_stop = arg.stops && !arg.repeat;
  if (may_stop && threadIdx.x == 0) {
    arg.stops[unit * PANELS + panel] = 0;
    if (segment.is_first) arg.unfinished[chain] = 0;
  }
  if (segment.is_last) return;  // no segment starts from the state after a sequence's last one
  const StepSizes steps(arg, segment, head, lane);
  const BlockMasks mask(lane);
  const Tiles keys(maps.k_tiles, arg.k, arg.k_stride, segment, key_head(arg, head), warp, lane);
  const Tiles values(maps.v, arg.v, arg.v_stride, segment, head, warp, lane);
  const int tiles = segment.tokens / TOKENS;

  MapRows G = {}, R = {};  // G - I at first
  NearIdentity near = {ALL, ALL};
  const int row = panel * PANEL + warp * 16;  // the first of this warp's 16

  // Step s handles the tile that is s-th from the end. One group of copies has one step's values
  // and the next step's keys; the first group has only keys.
  constexpr int FIRST = 2;  // the first group's barrier
  const u32 all_keys = shared_address(shared.keys), all_values = shared_address(shared.values);
  const Pipeline<3> pipeline{shared_address(shared.full)};
  if (threadIdx.x == 0) pipeline.init(1);
  __syncthreads();
  auto copy = [&](u32 to, const Tiles& from, int s, int stage) {
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
      from.load(to + p * MAP_PANEL_BYTES, segment.tokens - (s + 1) * TOKENS, p * PANEL, pipeline,
                stage);
  };
  auto load = [&](int s) {
    if (s < tiles && Tiles::copied_by(warp)) {
      const int stage = s & 1;
      const bool more = s + 1 < tiles;
      pipeline.producer_expect(stage, more ? 2 * TILE : TILE);
      copy(all_values + stage * TILE, values, s, stage);
      if (more) copy(all_keys + (s + 1) % 3 * TILE, keys, s + 1, stage);
    }
    pipeline.producer_commit();
  };
  auto token = [&](int s) { return segment.tokens - (s + 1) * TOKENS + warp * CHUNK; };
  Steps next_steps = steps.of(token(0));  // of the tile that is prepared next
  auto prepare = [&](int s) {
    prepare_chunk<T>(all_keys + s % 3 * TILE + warp * CHUNK_BYTES, next_steps, mask,
                     shared.chunks[s & 1][warp], lane);
    next_steps = steps.of(token(s + 1));
  };
  if (Tiles::copied_by(warp)) {
    pipeline.producer_expect(FIRST, TILE);
    copy(all_keys, keys, 0, FIRST);
  }
  pipeline.producer_commit();
  load(0);
  pipeline.template consumer_wait<1>(FIRST, 0);
  __syncwarp();
  prepare(0);
  // this warp's rows of K~^T in a chunk
  const u32 own_rows = (row_address(all_keys, lane) ^ 32 * warp) + panel * MAP_PANEL_BYTES;
  int s = 0;
  float log_decay_behind = 0.f;  // see absorb_chunk
  bool faded = false;            // whether the decay alone makes the map negligible
#pragma unroll
  for (int phase = 0; phase < 2; ++phase) {  // unrolled: only phase 0 has rows of G - I
    const bool any_near = phase == 0;
    bool done = faded;
    while (s < tiles && !done) {
      for (const int end = min(s + CHECK_EVERY, tiles); s < end; ++s) {
        pipeline.template consumer_wait<0>(s & 1, s >> 1 & 1);
        fence_proxy_async();
        __syncthreads();
        load(s + 1);
        const u32 k = all_keys + s % 3 * TILE, v = all_values + (s & 1) * TILE;
        if (s + 1 < tiles) prepare(s + 1);
#pragma unroll
        for (int i = MAP_WARPS - 1; i >= 0; --i) {
          const u32 at = i * CHUNK_BYTES;
          if (any_near)
            absorb_chunk<T, true>(G, R, near, k + at, own_rows + s % 3 * TILE + at, v + at,
                                  shared.chunks[s & 1][i], log_decay_behind, lane);
          else
            absorb_chunk<T, false>(G, R, near, k + at, 0, v + at, shared.chunks[s & 1][i],
                                   log_decay_behind, lane);
        }
        finish_rows(R);
      }
      if (s < tiles) {
        if (any_near) {
          switch_rows<0>(G, near, -0.5f, row, lane);
          switch_rows<1>(G, near, -0.5f, row, lane);
          done = all_agree(!(near[0] | near[1]));
          if constexpr (DECAY) {
            faded = may_stop && exp2_of(log_decay_behind) * MAP_ROW_BOUND < NEGLIGIBLE<T>;
            done |= faded;
          }
        } else if (may_stop) {
          const float decay = DECAY ? fmaxf(exp2_of(log_decay_behind), 1e-30f) : 1.f;
          done = all_agree(is_below(G, NEGLIGIBLE<T> / decay));
        }
      }
    }
    if (any_near) {  // switches all rows, because no diagonal element of G - I is above 0
      switch_rows<0>(G, near, 0.5f, row, lane);
      switch_rows<1>(G, near, 0.5f, row, lane);
    }
  }
  const bool stops = s < tiles;
  if (stops) {
    if (threadIdx.x == 0) arg.stops[unit * PANELS + panel] = segment.tokens - s * TOKENS;
    // the block must not end before its copies
    pipeline.template consumer_wait<0>(s & 1, s >> 1 & 1);
  }

  if constexpr (DECAY) {
    const float decay = exp2_of(log_decay_behind);
    for_each_element([&](int p, int m, int e) { G[p][m][e] *= decay; });
  }
  const i64 own = (i64)unit * S * S;
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float (&g)[4] = G[p][m], (&x)[4] = R[p][m];
        const i64 at = own + (row + (lane >> 2) + 8 * r) * S + p * PANEL + 8 * m + 2 * (lane & 3);
        *(float2*)(arg.maps + at) =
            stops ? make_float2(0.f, 0.f)
                  : make_float2(round_tf32(g[2 * r]), round_tf32(g[2 * r + 1]));
        *(float2*)(arg.states + at) = make_float2(x[2 * r], x[2 * r + 1]);
      }
}

QUASAR_LAUNCH(segment_map, 32 * MAP_WARPS, sizeof(MapShared), Arguments)
QUASAR_KERNEL(segment_map, __launch_bounds__(32 * MAP_WARPS, MAP_BLOCKS),
              (const __grid_constant__ Arguments arg, const __grid_constant__ TensorMaps maps),
              (arg, maps))

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
