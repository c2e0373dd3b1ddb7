// Pass 1 of the segmented scan: each segment's affine map of the state, S_out = G S_in + R.
// map_chunk.cuh has the algebra.

#include "copies.cuh"
#include "map_chunk.cuh"

#ifndef QUASAR_MAP_WARPS
#define QUASAR_MAP_WARPS 4
#if QUASAR_WGMMA
#define QUASAR_MAP_BLOCKS (QUASAR_HEAD == 64 ? 4 : 2)  // that share a multiprocessor
#else
#define QUASAR_MAP_BLOCKS (QUASAR_HEAD == 64 ? 3 : 2)
#endif
#endif

namespace quasar {

template <int WARPS>
struct MapShared {
  static constexpr int TILE = WARPS * PANELS * CHUNK_BYTES;
  uint4 keys[3][TILE / 16], values[2][TILE / 16];
  Prepared chunks[2][WARPS];
  u64 arrived[3];
};

// One block a segment, head and panel of rows. Tiles of 16 * WARPS tokens, from the last one on, go
// through three steps, each one barrier apart: copied in, prepared (warp w its chunk w), absorbed
// (every warp all chunks, its own rows). Segments that are not a sequence's last are whole tiles.
template <Scalar T, int WARPS>
__device__ __forceinline__ void segment_map(const Arguments& arg, const TensorMaps& maps) {
  constexpr int BLOCKS = 4 / WARPS, TOKENS = WARPS * CHUNK;
  constexpr u32 BYTES = PANELS * CHUNK_BYTES, TILE = WARPS * BYTES;  // of a warp's chunk, of a tile
  extern __shared__ __align__(1024) uint4 raw[];
  MapShared<WARPS>& shared = *(MapShared<WARPS>*)raw;
  const int unit = blockIdx.x / PANELS, panel = blockIdx.x % PANELS;
  const int head = unit % arg.heads, lane = threadIdx.x & 31;
  const int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0);  // known to be the same in all lanes
  const Segment segment = find_segment(arg, unit / arg.heads);
  if (segment.is_last) return;  // no segment starts from the state behind a sequence's last one
  const float beta = arg.beta[head];
  const BlockMasks mask(lane);
  const Chunks keys(maps.k, arg.k, arg.k_stride, segment, head, lane);
  const Chunks values(maps.v, arg.v, arg.v_stride, segment, head, lane);
  const int tiles = segment.tokens / TOKENS;

  MapRows G[BLOCKS], R[BLOCKS] = {};
  auto row_of = [&](int b, int r) {  // of this lane's elements 2 r and 2 r + 1
    return panel * PANEL + (warp * BLOCKS + b) * 16 + (lane >> 2) + 8 * r;
  };
  auto column_of = [&](int p, int m) { return p * PANEL + 8 * m + 2 * (lane & 3); };
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
#pragma unroll
      for (int m = 0; m < 8; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          G[b][p][m][e] = row_of(b, e >> 1) == column_of(p, m) + (e & 1) ? 1.f : 0.f;

  // Step s handles the tile that is s-th from the end. A group of copies, on its way for a step, is
  // one step's values and the next one's keys; the first keys are one more.
  constexpr int FIRST = 2;  // their stage
  const u32 all_keys = shared_address(shared.keys), all_values = shared_address(shared.values);
  const Arrivals<3> arrivals{shared_address(shared.arrived)};
  if (threadIdx.x == 0) arrivals.init(WARPS);
  __syncthreads();
  auto copy = [&](u32 to, const Chunks& from, int s, int stage) {
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
      from.load(to + warp * BYTES + p * CHUNK_BYTES,
                segment.tokens - (s + 1) * TOKENS + warp * CHUNK, p * PANEL, arrivals, stage);
  };
  auto load = [&](int s) {
    if (s < tiles) {
      const int stage = s & 1;
      const bool more = s + 1 < tiles;
      arrivals.open(stage, more ? 2 * BYTES : BYTES);
      copy(all_values + stage * TILE, values, s, stage);
      if (more) copy(all_keys + (s + 1) % 3 * TILE, keys, s + 1, stage);
    }
    arrivals.close();
  };
  auto prepare = [&](int s) {
    prepare_chunk<T>(all_keys + s % 3 * TILE + warp * BYTES, beta, mask,
                     shared.chunks[s & 1][warp], lane);
  };
  arrivals.open(FIRST, BYTES);
  copy(all_keys, keys, 0, FIRST);
  arrivals.close();
  load(0);
  arrivals.template wait<1>(FIRST, 0);
  __syncwarp();
  prepare(0);
  for (int s = 0; s < tiles; ++s) {
    arrivals.template wait<0>(s & 1, s >> 1 & 1);
    publish_shared();
    __syncthreads();
    load(s + 1);
    const u32 k = all_keys + s % 3 * TILE, v = all_values + (s & 1) * TILE;
    if (s + 1 < tiles) prepare(s + 1);
#pragma unroll
    for (int i = WARPS - 1; i >= 0; --i)
      absorb_chunk<T, BLOCKS>(G, R, k + i * BYTES, v + i * BYTES, shared.chunks[s & 1][i], lane);
#if QUASAR_WGMMA
    if constexpr (BLOCKS == 1) {
      warpgroup_wait<0>();
#pragma unroll
      for (int p = 0; p < PANELS; ++p) settle(R[0][p]);
    }
#endif
  }

  const i64 own = (i64)unit * S * S;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
#pragma unroll
      for (int m = 0; m < 8; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float(&g)[4] = G[b][p][m], (&x)[4] = R[b][p][m];
          const i64 at = own + row_of(b, r) * S + column_of(p, m);
          *(float2*)(arg.maps + at) = make_float2(round_tf32(g[2 * r]), round_tf32(g[2 * r + 1]));
          *(float2*)(arg.states + at) = make_float2(x[2 * r], x[2 * r + 1]);
        }
}

}  // namespace quasar

// threads and shared bytes of a block, for whoever launches it
extern "C" __constant__ int quasar_segment_map_launch[2] = {
    32 * QUASAR_MAP_WARPS, sizeof(quasar::MapShared<QUASAR_MAP_WARPS>)};

#ifndef QUASAR_ONLY_FP16
extern "C" __global__ void __launch_bounds__(32 * QUASAR_MAP_WARPS, QUASAR_MAP_BLOCKS)
    quasar_segment_map_bf16(const __grid_constant__ quasar::Arguments arg,
                            const __grid_constant__ quasar::TensorMaps maps) {
  quasar::segment_map<quasar::Scalar::bf16, QUASAR_MAP_WARPS>(arg, maps);
}
#endif

#ifndef QUASAR_ONLY_BF16
extern "C" __global__ void __launch_bounds__(32 * QUASAR_MAP_WARPS, QUASAR_MAP_BLOCKS)
    quasar_segment_map_fp16(const __grid_constant__ quasar::Arguments arg,
                            const __grid_constant__ quasar::TensorMaps maps) {
  quasar::segment_map<quasar::Scalar::fp16, QUASAR_MAP_WARPS>(arg, maps);
}
#endif
