// Pass 1 of the segmented scan: each segment's affine map of the state, S_out = G S_in + R.
// map_chunk.cuh has the algebra.

#include "map_chunk.cuh"
#include "segments.cuh"

#ifndef QUASAR_MAP_WARPS
#define QUASAR_MAP_WARPS 4
#define QUASAR_MAP_BLOCKS (QUASAR_HEAD == 64 ? 3 : 2)  // that share a multiprocessor
#endif

namespace quasar {

template <int WARPS>
struct MapShared {
  static constexpr int TILE = WARPS * PANELS * CHUNK_BYTES;
  uint4 keys[3][TILE / 16], values[2][TILE / 16];
  Prepared chunks[2][WARPS];
};

// One thread's share of a segment's rows, a tile at a time from the last one on: every 4 * WARPS-th
// row, 16 bytes of it. Segments that are not a sequence's last are whole tiles.
template <int WARPS>
struct Tiles {
  static constexpr int STEP = 4 * WARPS;
  const unsigned short* from;  // this thread's first row of the next tile
  i64 stride;                  // of STEP rows

  __device__ __forceinline__ Tiles(const void* x, const i64 (&strides)[3], const Segment& segment,
                                   int head)
      : from((const unsigned short*)x + segment.row * strides[0] + head * strides[2] +
             (segment.begin + segment.tokens - CHUNK * WARPS + (threadIdx.x >> 3)) * strides[1] +
             (threadIdx.x & 7) * 8),
        stride(STEP * strides[1]) {}

  // copy the next tile
  __device__ __forceinline__ void load(u32 to) {
    const unsigned short* at = from;
#pragma unroll
    for (int i = 0; i < 4; ++i, at += stride)
#pragma unroll
      for (int p = 0; p < PANELS; ++p)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :
                     : "r"(to + Rows<WARPS, PANELS>::offset(i) + p * CHUNK_BYTES),
                       "l"(at + p * PANEL)
                     : "memory");
    from -= 4 * stride;
  }
};

// One block a segment, head and panel of rows. Tiles of 16 * WARPS tokens go through three steps,
// each one barrier apart: copied in, prepared (warp w its chunk w), absorbed (every warp all
// chunks, its own rows).
template <Scalar T, int WARPS>
__device__ __forceinline__ void segment_map(const Arguments& arg) {
  constexpr int BLOCKS = 4 / WARPS, TOKENS = WARPS * CHUNK;
  extern __shared__ __align__(1024) uint4 raw[];
  MapShared<WARPS>& shared = *(MapShared<WARPS>*)raw;
  const int unit = blockIdx.x / PANELS, panel = blockIdx.x % PANELS;
  const int head = unit % arg.heads, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Segment segment = find_segment(arg, unit / arg.heads);
  if (segment.is_last) return;  // no segment starts from the state behind a sequence's last one
  const float beta = arg.beta[head];
  const BlockMasks mask(lane);
  Tiles<WARPS> keys(arg.k, arg.k_stride, segment, head);
  Tiles<WARPS> values(arg.v, arg.v_stride, segment, head);
  const u32 place = Rows<WARPS>::place();
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

  // step s handles the tile that is s-th from the end
  auto load = [&](const uint4* tile, Tiles<WARPS>& x, int s) {
    if (s < tiles) x.load(shared_address(tile) + place);
  };
  auto prepare = [&](int s) {
    prepare_chunk<T>(shared_address(shared.keys[s % 3]) + warp * PANELS * CHUNK_BYTES, beta, mask,
                     shared.chunks[s & 1][warp], lane);
  };
  load(shared.keys[0], keys, 0);
  commit_loads();
  load(shared.values[0], values, 0);
  load(shared.keys[1], keys, 1);
  commit_loads();
  wait_loads<1>();
  __syncthreads();
  if (tiles > 0) prepare(0);
  for (int s = 0; s < tiles; ++s) {
    wait_loads<0>();
#if QUASAR_WGMMA
    publish_shared();
#endif
    __syncthreads();
    load(shared.values[(s + 1) & 1], values, s + 1);
    load(shared.keys[(s + 2) % 3], keys, s + 2);
    commit_loads();
    if (s + 1 < tiles) prepare(s + 1);
    const u32 k = shared_address(shared.keys[s % 3]), v = shared_address(shared.values[s & 1]);
#pragma unroll
    for (int i = WARPS - 1; i >= 0; --i)
      absorb_chunk<T, BLOCKS>(G, R, k + i * PANELS * CHUNK_BYTES, v + i * PANELS * CHUNK_BYTES,
                              shared.chunks[s & 1][i], lane);
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
    quasar_segment_map_bf16(const __grid_constant__ quasar::Arguments arg) {
  quasar::segment_map<quasar::Scalar::bf16, QUASAR_MAP_WARPS>(arg);
}
#endif

#ifndef QUASAR_ONLY_BF16
extern "C" __global__ void __launch_bounds__(32 * QUASAR_MAP_WARPS, QUASAR_MAP_BLOCKS)
    quasar_segment_map_fp16(const __grid_constant__ quasar::Arguments arg) {
  quasar::segment_map<quasar::Scalar::fp16, QUASAR_MAP_WARPS>(arg);
}
#endif
