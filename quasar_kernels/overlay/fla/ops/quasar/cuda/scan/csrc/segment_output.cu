// Pass 2 of the segmented scan: walk each segment from the state that enters it, and write o.
// output_chunk.cuh has the algebra.

#include "copies.cuh"
#include "output_chunk.cuh"
#include "pace.cuh"

namespace quasar::scan {

constexpr int OUTPUT_WARPS = QUASAR_WGMMA ? 4 : 2;
// that share a multiprocessor
constexpr int OUTPUT_BLOCKS = QUASAR_WGMMA ? (S == 64 ? 4 : 2) : (S == 64 ? 6 : 4);

struct OutputShared {
  static constexpr int WARPS = OUTPUT_WARPS;
  uint4 keys_queries[2][WARPS * KeysQueries::BYTES / 16];
  uint4 values[2][WARPS * CHUNK_BYTES / 16];  // o takes v's place
  Triangle mix[WARPS];                        // -A diag(a)
  Triangle scores[WARPS];                     // tril(Q K^T)
#if QUASAR_DECAY
  ChunkDecays decays[WARPS];
#endif
  u64 arrived[2], values_arrived[2];
};

// One block a segment, head and panel of values. Tiles of 16 * WARPS tokens are copied in while
// the one before is prepared (warp w its chunk w), then walked (every warp all chunks, its own
// columns).
template <Scalar T>
__device__ __forceinline__ void segment_output(const Arguments& arg, const TensorMaps& maps) {
  constexpr int WARPS = OUTPUT_WARPS, BLOCKS = 4 / WARPS, TOKENS = WARPS * CHUNK;
  static_assert(!Tiles::RUN_OVER || TOKENS == 64, "the tensor maps' tiles have 64 tokens");
  extern __shared__ __align__(1024) uint4 raw[];
  OutputShared& shared = *(OutputShared*)raw;
  const int unit = blockIdx.x / PANELS, panel = blockIdx.x % PANELS;
  const int head = unit % arg.heads, lane = threadIdx.x & 31;
  const int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0);  // known to be the same in all lanes
  const Segment segment = find_segment(arg, unit / arg.heads);
  const i64 chain = segment.sequence * arg.heads + head;
  if (is_idle(arg, chain)) return;
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
  const Arrivals<2> arrivals{shared_address(shared.arrived)};
  const Arrivals<2> values_arrivals{shared_address(shared.values_arrived)};
  if (threadIdx.x == 0) {
    arrivals.init(WARPS);
    values_arrivals.init(1);
  }
  __syncthreads();

  auto token = [&](int s) { return s * TOKENS + warp * CHUNK; };
  auto load_keys_queries = [&](int s) {
    if (s < tiles) {
      const int stage = s & 1;
      const u32 to = own_keys_queries + stage * TILE;
      arrivals.open(stage, BYTES);
#pragma unroll
      for (int p = 0; p < PANELS; ++p) {
        k.load(to + 2 * p * CHUNK_BYTES, token(s), p * PANEL, arrivals, stage);
        q.load(to + (2 * p + 1) * CHUNK_BYTES, token(s), p * PANEL, arrivals, stage);
      }
    }
    arrivals.close();
  };
  auto load_values = [&](int s) {
    if (s < tiles && Tiles::copied_by(warp)) {
      const int stage = s & 1;
      values_arrivals.open(stage, VALUES_TILE);
      v.load(values + stage * VALUES_TILE, s * TOKENS, panel * PANEL, values_arrivals, stage);
    }
    values_arrivals.close();
  };
  load_keys_queries(0);
  load_values(0);
  Steps given = steps.of(token(0));  // of the tile that is prepared next

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
  // where another sequence follows in the same tile
  const bool runs_over = Chunks::RUN_OVER && arg.table && segment.tokens % TOKENS;
  int stops[PANELS];     // tiles that pass 1 left out
  float left_out = 0.f;  // the largest entry of the state behind them
#if QUASAR_DECAY
  float fading = 0.f;  // bounds what of it is still there over NOTHING, as pass 1 does, once < 1
#endif
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
    stops[p] = arg.stops && !arg.repeat ? arg.stops[(i64)unit * PANELS + p] / TOKENS : 0;
  for (int s = 0; s < tiles; ++s) {
    const int stage = s & 1;
    const u32 parity = s >> 1 & 1;
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
      if (s && s == stops[p]) {
        left_out = fmaxf(left_out, largest(state));
#if QUASAR_DECAY
        fading = MOST_OF_ROW / NOTHING<T>;
#endif
      }
    arrivals.template wait<1>(stage, parity);
    if (runs_over && s == tiles - 1) {  // keys of zero change no state
      values_arrivals.template wait<0>(stage, parity);
      const int left = segment.tokens - token(s);
#pragma unroll
      for (int p = 0; p < PANELS; ++p)
        clear_rows(own_keys_queries + stage * TILE + 2 * p * CHUNK_BYTES, left, lane);
      clear_rows(own_values + stage * VALUES_TILE, left, lane);
    }
    publish_shared();
    __syncthreads();
    if (s && Tiles::copied_by(warp))
      o.store(values + (stage ^ 1) * VALUES_TILE, (s - 1) * TOKENS, panel * PANEL);
    load_keys_queries(s + 1);
    const u32 chunks = keys_queries + stage * TILE;
    prepare_chunk<T>({chunks + warp * BYTES}, given, mask, shared.mix[warp], shared.scores[warp],
#if QUASAR_DECAY
                     shared.decays[warp],
#endif
                     lane);
    given = steps.of(token(s + 1));
    if (Tiles::copied_by(warp)) o.finish_stores();
    load_values(s + 1);  // where the output before was
    values_arrivals.template wait<2>(stage, parity);
    __syncthreads();
    const u32 columns = own_columns + stage * VALUES_TILE;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      walk_chunk<T, BLOCKS>(state, {chunks + i * BYTES}, columns + i * CHUNK_BYTES, shared.mix[i],
                            shared.scores[i],
#if QUASAR_DECAY
                            shared.decays[i],
#endif
                            arg.scale, lane);
#if QUASAR_DECAY
      fading *= shared.decays[i].whole;
#endif
    }
    finish_state<BLOCKS>(state);
    keep_pace();
  }
  publish_shared();
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
#if QUASAR_DECAY
  left_out *= fminf(fading, 1.f);
#endif
  // columns of the state are independent of one another: each warp tells of its own
  if (left_out > 0.f && !(left_out <= TIMES * largest(state)) && lane == 0)
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
