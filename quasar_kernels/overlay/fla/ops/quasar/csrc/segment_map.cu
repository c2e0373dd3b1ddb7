// Pass 1 of the segmented scan: each segment's affine map of the state, S_out = G S_in + R.
// map_chunk.cuh has the algebra.

#include "map_chunk.cuh"
#include "segments.cuh"

#ifndef QUASAR_MAP_WARPS
#define QUASAR_MAP_WARPS 4
#define QUASAR_MAP_BLOCKS 4  // blocks that share a multiprocessor: 128 registers a thread
#endif

namespace quasar {

template <int WARPS>
struct MapShared {
  static constexpr int TILE = WARPS * CHUNK_BYTES;
  uint4 keys[3][TILE / 16], values[2][TILE / 16];
  float4 mix[2][WARPS][2][32];    // fragments of -(A diag(a))^T between scaled keys
  float unscale[2][WARPS][CHUNK]; // -2^-e of keys that are scaled by 2^-e
};

// One block a segment and head. Tiles of 16 * WARPS tokens go through three steps, each one barrier
// apart: copied in, prepared (warp w its chunk w), absorbed (every warp all chunks, its own rows).
template <Scalar T, int WARPS>
__device__ __forceinline__ void segment_map(const Arguments& arg) {
  constexpr int BLOCKS = 4 / WARPS, TOKENS = WARPS * CHUNK;
  extern __shared__ __align__(1024) uint4 raw[];
  MapShared<WARPS>& shared = *(MapShared<WARPS>*)raw;
  const int head = blockIdx.x % arg.heads, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Segment segment = find_segment(arg, blockIdx.x / arg.heads);
  if (segment.is_last) return;  // no segment starts from the state behind a sequence's last one
  const float beta = arg.beta[head];
  const BlockMasks mask(lane);
  const Rows<WARPS> keys(arg.k, arg.k_stride, segment, head);
  const Rows<WARPS> values(arg.v, arg.v_stride, segment, head);
  const int tiles = (segment.tokens + TOKENS - 1) / TOKENS;

  float G[BLOCKS][8][4], R[BLOCKS][8][4] = {};
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = (warp * BLOCKS + b) * 16 + (lane >> 2) + 8 * (e >> 1);
        G[b][m][e] = row == 8 * m + 2 * (lane & 3) + (e & 1) ? 1.f : 0.f;
      }

  // step s handles the tile that is s-th from the end
  auto load = [&](const uint4* tile, const Rows<WARPS>& x, int s) {
    if (s < tiles) x.load(tile, (tiles - 1 - s) * TOKENS, segment.tokens);
  };
  auto prepare = [&](int s) {
    prepare_chunk<T>(shared_address(shared.keys[s % 3]) + warp * CHUNK_BYTES, beta, mask,
                     shared.mix[s & 1][warp], shared.unscale[s & 1][warp], lane);
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
      absorb_chunk<T, BLOCKS>(G, R, k + i * CHUNK_BYTES, v + i * CHUNK_BYTES, shared.mix[s & 1][i],
                              shared.unscale[s & 1][i], lane);
#if QUASAR_WGMMA
    if constexpr (BLOCKS == 1) {
      warpgroup_wait<0>();
      settle(R[0]);
    }
#endif
  }

  const i64 own = (i64)blockIdx.x * S * S;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = (warp * BLOCKS + b) * 16 + (lane >> 2) + 8 * r;
        const i64 at = own + row * S + 8 * m + 2 * (lane & 3);
        *(float2*)(arg.maps + at) =
            make_float2(round_tf32(G[b][m][2 * r]), round_tf32(G[b][m][2 * r + 1]));
        *(float2*)(arg.states + at) = make_float2(R[b][m][2 * r], R[b][m][2 * r + 1]);
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
