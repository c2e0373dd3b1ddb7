// Pass 2 of the segmented scan: walk each segment from the state that enters it, and write o.
// output_chunk.cuh has the algebra.

#include "output_chunk.cuh"
#include "segments.cuh"

#ifndef QUASAR_OUTPUT_WARPS
#if QUASAR_WGMMA
#define QUASAR_OUTPUT_WARPS 4
#define QUASAR_OUTPUT_BLOCKS 4  // blocks that share a multiprocessor: 128 registers a thread
#else
#define QUASAR_OUTPUT_WARPS 2
#define QUASAR_OUTPUT_BLOCKS 6
#endif
#endif

namespace quasar {

template <int WARPS>
struct OutputShared {
  static constexpr int TILE = WARPS * CHUNK_BYTES;
  uint4 keys[2][TILE / 16], queries[2][TILE / 16], values[2][TILE / 16];  // o takes v's place
  float4 mix[WARPS][2][32];    // fragments of -A diag(a)
  uint4 scores[WARPS][2][32];  // fragments of tril(Q K^T), and of what rounding took from it
};

// One block a segment and head. Tiles of 16 * WARPS tokens are copied in while the one before is
// prepared (warp w its chunk w), then walked (every warp all chunks, its own columns).
template <Scalar T, int WARPS>
__device__ __forceinline__ void segment_output(const Arguments& arg) {
  constexpr int BLOCKS = 4 / WARPS, TOKENS = WARPS * CHUNK;
  extern __shared__ __align__(1024) uint4 raw[];
  OutputShared<WARPS>& shared = *(OutputShared<WARPS>*)raw;
  const int head = blockIdx.x % arg.heads, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Segment segment = find_segment(arg, blockIdx.x / arg.heads);
  const float beta = arg.beta[head];
  const BlockMasks mask(lane);
  const Rows<WARPS> queries(arg.q, arg.q_stride, segment, head);
  const Rows<WARPS> keys(arg.k, arg.k_stride, segment, head);
  const Rows<WARPS> values(arg.v, arg.v_stride, segment, head);
  const Rows<WARPS> outputs(arg.o, arg.o_stride, segment, head);
  const int tiles = (segment.tokens + TOKENS - 1) / TOKENS;

  auto load_keys_queries = [&](int s) {
    if (s >= tiles) return;
    keys.load(shared.keys[s & 1], s * TOKENS, segment.tokens);
    queries.load(shared.queries[s & 1], s * TOKENS, segment.tokens);
  };
  auto load_values = [&](int s) {
    if (s < tiles) values.load(shared.values[s & 1], s * TOKENS, segment.tokens);
    commit_loads();
  };
  auto store_output = [&](int s) {
    if (s >= 0) outputs.store(shared.values[s & 1], s * TOKENS, segment.tokens);
  };
  load_keys_queries(0);
  load_values(0);

  // S^T: row = value column, column = key
  float state[BLOCKS][8][4];
  const i64 own = (segment.sequence * arg.heads + head) * S * S;
  const float* enter = segment.is_first ? (arg.initial_state ? arg.initial_state + own : nullptr)
                                        : arg.states + ((i64)blockIdx.x - arg.heads) * S * S;
  auto place = [&](int b, int m, int e) {
    const int column = (warp * BLOCKS + b) * 16 + (lane >> 2) + 8 * (e >> 1);
    return (8 * m + 2 * (lane & 3) + (e & 1)) * S + column;
  };
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[b][m][e] = enter ? enter[place(b, m, e)] : 0.f;

  for (int s = 0; s < tiles; ++s) {
    wait_loads<0>();
#if QUASAR_WGMMA
    publish_shared();
#endif
    __syncthreads();
    store_output(s - 1);
    load_keys_queries(s + 1);
    const u32 k = shared_address(shared.keys[s & 1]), v = shared_address(shared.values[s & 1]);
    const u32 q = shared_address(shared.queries[s & 1]);
    prepare_chunk<T>(k + warp * CHUNK_BYTES, q + warp * CHUNK_BYTES, beta, mask, shared.mix[warp],
                     shared.scores[warp], lane);
    __syncthreads();
    load_values(s + 1);  // where the output before was
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      float out[BLOCKS][2][4];
      const u32 own_values = v + i * CHUNK_BYTES;
      walk_chunk<T, BLOCKS>(state, out, k + i * CHUNK_BYTES, q + i * CHUNK_BYTES, own_values,
                            shared.mix[i], shared.scores[i], warp * BLOCKS, lane);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
        keep_output<T>(row_address(own_values, lane) ^ 32 * (warp * BLOCKS + b), arg.scale, out[b],
                       lane);
    }
    finish_state<BLOCKS>(state);
  }
  __syncthreads();
  store_output(tiles - 1);
  if (!segment.is_last || !arg.final_state) return;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) arg.final_state[own + place(b, m, e)] = state[b][m][e];
}

}  // namespace quasar

// threads and shared bytes of a block, for whoever launches it
extern "C" __constant__ int quasar_segment_output_launch[2] = {
    32 * QUASAR_OUTPUT_WARPS, sizeof(quasar::OutputShared<QUASAR_OUTPUT_WARPS>)};

#ifndef QUASAR_ONLY_FP16
extern "C" __global__ void __launch_bounds__(32 * QUASAR_OUTPUT_WARPS, QUASAR_OUTPUT_BLOCKS)
    quasar_segment_output_bf16(const __grid_constant__ quasar::Arguments arg) {
  quasar::segment_output<quasar::Scalar::bf16, QUASAR_OUTPUT_WARPS>(arg);
}
#endif

#ifndef QUASAR_ONLY_BF16
extern "C" __global__ void __launch_bounds__(32 * QUASAR_OUTPUT_WARPS, QUASAR_OUTPUT_BLOCKS)
    quasar_segment_output_fp16(const __grid_constant__ quasar::Arguments arg) {
  quasar::segment_output<quasar::Scalar::fp16, QUASAR_OUTPUT_WARPS>(arg);
}
#endif
