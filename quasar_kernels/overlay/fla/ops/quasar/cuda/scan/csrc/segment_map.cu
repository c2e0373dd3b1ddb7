// Pass 1 of the segmented scan: each segment's affine map of the state, S_out = G S_in + R.
// map_chunk.cuh has the algebra.

#include "copies.cuh"
#include "map_chunk.cuh"

namespace quasar::scan {

constexpr int MAP_BLOCKS = S > 64 ? 2 : QUASAR_WGMMA ? 4 : 3;  // that share a multiprocessor
constexpr int LOOK = 4;                                        // tiles

struct MapShared {
  static constexpr int TILE = PANELS * MAP_PANEL_BYTES;
  uint4 keys[3][TILE / 16], values[2][TILE / 16];
  Prepared chunks[2][MAP_WARPS];
  u64 arrived[3];
};

// whether x is true in all threads of the block; known to be the same in all lanes
__device__ __forceinline__ bool all_agree(bool x) {
  return __shfl_sync(ALL, __syncthreads_and(x), 0) != 0;
}

// One block a segment, head and panel of rows. Tiles of 64 tokens, from the last one on, go
// through three steps, each one barrier apart: copied in, prepared (warp w its chunk w), absorbed
// (every warp all chunks, its own rows). Segments that are not a sequence's last are whole tiles.
// Every LOOK tiles G is looked at: rows far from I's are kept themselves, and once all of it is next
// to nothing the block may stop.
// Blocks that are launched a fixed number apart share a multiprocessor. The order of the heads
// turns once around over the segments, so that these are of different heads: the head that forgets
// last has as many multiprocessors as blocks.
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
  const int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0);  // known to be the same in all lanes
  const Segment segment = find_segment(arg, index);
  const i64 chain = segment.sequence * arg.heads + head;
  if (is_idle(arg, chain)) return;
  const bool may_stop = arg.stops && !arg.repeat;
  if (may_stop && threadIdx.x == 0) {
    arg.stops[unit * PANELS + panel] = 0;
    if (segment.is_first) arg.unfinished[chain] = 0;
  }
  if (segment.is_last) return;  // no segment starts from the state behind a sequence's last one
  const StepSizes steps(arg, segment, head, lane);
  const BlockMasks mask(lane);
  const Tiles keys(maps.k_tiles, arg.k, arg.k_stride, segment, key_head(arg, head), warp, lane);
  const Tiles values(maps.v, arg.v, arg.v_stride, segment, head, warp, lane);
  const int tiles = segment.tokens / TOKENS;

  MapRows G = {}, R = {};  // G - I at first
  NearIdentity near = {ALL, ALL};
  const int row = panel * PANEL + warp * 16;  // the first of this warp's 16

  // Step s handles the tile that is s-th from the end. A group of copies, on its way for a step, is
  // one step's values and the next one's keys; the first keys are one more.
  constexpr int FIRST = 2;  // their stage
  const u32 all_keys = shared_address(shared.keys), all_values = shared_address(shared.values);
  const Arrivals<3> arrivals{shared_address(shared.arrived)};
  if (threadIdx.x == 0) arrivals.init(1);
  __syncthreads();
  auto copy = [&](u32 to, const Tiles& from, int s, int stage) {
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
      from.load(to + p * MAP_PANEL_BYTES, segment.tokens - (s + 1) * TOKENS, p * PANEL, arrivals,
                stage);
  };
  auto load = [&](int s) {
    if (s < tiles && Tiles::copied_by(warp)) {
      const int stage = s & 1;
      const bool more = s + 1 < tiles;
      arrivals.open(stage, more ? 2 * TILE : TILE);
      copy(all_values + stage * TILE, values, s, stage);
      if (more) copy(all_keys + (s + 1) % 3 * TILE, keys, s + 1, stage);
    }
    arrivals.close();
  };
  auto token = [&](int s) { return segment.tokens - (s + 1) * TOKENS + warp * CHUNK; };
  Steps given = steps.of(token(0));  // of the tile that is prepared next
  auto prepare = [&](int s) {
    prepare_chunk<T>(all_keys + s % 3 * TILE + warp * CHUNK_BYTES, given, mask,
                     shared.chunks[s & 1][warp], lane);
    given = steps.of(token(s + 1));
  };
  if (Tiles::copied_by(warp)) {
    arrivals.open(FIRST, TILE);
    copy(all_keys, keys, 0, FIRST);
  }
  arrivals.close();
  load(0);
  arrivals.template wait<1>(FIRST, 0);
  __syncwarp();
  prepare(0);
  // this warp's rows of K~^T in a chunk
  const u32 own_rows = (row_address(all_keys, lane) ^ 32 * warp) + panel * MAP_PANEL_BYTES;
  int s = 0;
  float log_later = 0.f;  // see absorb_chunk
  bool faded = false;     // whether the decay alone makes the map next to nothing
#pragma unroll
  for (int phase = 0; phase < 2; ++phase) {  // unrolled: some rows of G - I at first, then none
    const bool any_near = phase == 0;
    bool done = faded;
    while (s < tiles && !done) {
      for (const int end = min(s + LOOK, tiles); s < end; ++s) {
        arrivals.template wait<0>(s & 1, s >> 1 & 1);
        publish_shared();
        __syncthreads();
        load(s + 1);
        const u32 k = all_keys + s % 3 * TILE, v = all_values + (s & 1) * TILE;
        if (s + 1 < tiles) prepare(s + 1);
#pragma unroll
        for (int i = MAP_WARPS - 1; i >= 0; --i) {
          const u32 at = i * CHUNK_BYTES;
          if (any_near)
            absorb_chunk<T, true>(G, R, near, k + at, own_rows + s % 3 * TILE + at, v + at,
                                  shared.chunks[s & 1][i], log_later, lane);
          else
            absorb_chunk<T, false>(G, R, near, k + at, 0, v + at, shared.chunks[s & 1][i],
                                   log_later, lane);
        }
        finish_rows(R);
      }
      if (s < tiles) {
        if (any_near) {
          leave_identity<0>(G, near, -0.5f, row, lane);
          leave_identity<1>(G, near, -0.5f, row, lane);
          done = all_agree(!(near[0] | near[1]));
#if QUASAR_DECAY
          faded = may_stop && exp2_of(log_later) * MOST_OF_ROW < NOTHING<T>;
          done |= faded;
#endif
        } else if (may_stop) {
#if QUASAR_DECAY
          done = all_agree(is_below(G, NOTHING<T> / fmaxf(exp2_of(log_later), 1e-30f)));
#else
          done = all_agree(is_below(G, NOTHING<T>));
#endif
        }
      }
    }
    if (any_near) {  // all of them: none is above 0
      leave_identity<0>(G, near, 0.5f, row, lane);
      leave_identity<1>(G, near, 0.5f, row, lane);
    }
  }
  const bool stops = s < tiles;
  if (stops) {
    if (threadIdx.x == 0) arg.stops[unit * PANELS + panel] = segment.tokens - s * TOKENS;
    arrivals.template wait<0>(s & 1, s >> 1 & 1);  // copies are under way to this block's memory
  }

#if QUASAR_DECAY
  const float decay = exp2_of(log_later);
  for_each_element([&](int p, int m, int e) { G[p][m][e] *= decay; });
#endif
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
