// Pass 2 of the segmented scan: walk each segment from the state that enters it, and write o.
// output_chunk.cuh has the algebra.

#include "output_chunk.cuh"
#include "segments.cuh"

#ifndef QUASAR_OUTPUT_WARPS
#if QUASAR_WGMMA
#define QUASAR_OUTPUT_WARPS 4
#define QUASAR_OUTPUT_BLOCKS (QUASAR_HEAD == 64 ? 4 : 2)  // blocks that share a multiprocessor
#else
#define QUASAR_OUTPUT_WARPS 2
#define QUASAR_OUTPUT_BLOCKS (QUASAR_HEAD == 64 ? 6 : 4)
#endif
#endif

namespace quasar {

template <int WARPS>
struct OutputShared {
  uint4 keys_queries[2][WARPS * KeysQueries::BYTES / 16];
  uint4 values[2][WARPS * CHUNK_BYTES / 16];  // o takes v's place
  Triangle mix[WARPS];                        // -A diag(a)
  Triangle scores[WARPS];                     // tril(Q K^T)
};

// One block a segment, head and panel of values. Tiles of 16 * WARPS tokens are copied in while
// the one before is prepared (warp w its chunk w), then walked (every warp all chunks, its own
// columns).
template <Scalar T, int WARPS>
__device__ __forceinline__ void segment_output(const Arguments& arg) {
  constexpr int BLOCKS = 4 / WARPS, TOKENS = WARPS * CHUNK;
  extern __shared__ __align__(1024) uint4 raw[];
  OutputShared<WARPS>& shared = *(OutputShared<WARPS>*)raw;
  const int unit = blockIdx.x / PANELS, panel = blockIdx.x % PANELS;
  const int head = unit % arg.heads, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Segment segment = find_segment(arg, unit / arg.heads);
  const float beta = arg.beta[head];
  const BlockMasks mask(lane);
  const int tiles = (segment.tokens + TOKENS - 1) / TOKENS;

  typedef Rows<WARPS, 2 * PANELS> Wide;
  typedef Rows<WARPS> Narrow;
  Wide keys(arg.k, arg.k_stride, segment, head), queries(arg.q, arg.q_stride, segment, head);
  Narrow values(arg.v, arg.v_stride, segment, head, panel);
  Narrow outputs(arg.o, arg.o_stride, segment, head, panel);
  const u32 wide_place = shared_address(shared.keys_queries[0]) + Wide::place();
  const u32 narrow_place = shared_address(shared.values[0]) + Narrow::place();
  constexpr u32 WIDE_STAGE = sizeof(shared.keys_queries[0]), STAGE = sizeof(shared.values[0]);
  const int own_tokens = segment.tokens - (threadIdx.x >> 3);  // from this thread's first row on

  // each is called for one tile after another
  auto load_keys_queries = [&](int s) {
    if (s >= tiles) return;
    const u32 to = wide_place + (s & 1) * WIDE_STAGE;
#pragma unroll
    for (int p = 0; p < PANELS; ++p) {
      keys.load(to + 2 * p * CHUNK_BYTES, own_tokens - s * TOKENS, p);
      queries.load(to + (2 * p + 1) * CHUNK_BYTES, own_tokens - s * TOKENS, p);
    }
    keys.advance();
    queries.advance();
  };
  auto load_values = [&](int s) {
    if (s < tiles) {
      values.load(narrow_place + (s & 1) * STAGE, own_tokens - s * TOKENS);
      values.advance();
    }
    commit_loads();
  };
  auto store_output = [&](int s) {
    if (s < 0) return;
    outputs.store(narrow_place + (s & 1) * STAGE, own_tokens - s * TOKENS);
    outputs.advance();
  };
  load_keys_queries(0);
  load_values(0);

  StateColumns state[BLOCKS];
  const i64 own = (segment.sequence * arg.heads + head) * S * S;
  const float* enter = segment.is_first ? (arg.initial_state ? arg.initial_state + own : nullptr)
                                        : arg.states + ((i64)unit - arg.heads) * S * S;
  auto place = [&](int b, int p, int m, int e) {
    const int column = panel * PANEL + (warp * BLOCKS + b) * 16 + (lane >> 2) + 8 * (e >> 1);
    return (p * PANEL + 8 * m + 2 * (lane & 3) + (e & 1)) * S + column;
  };
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
#pragma unroll
      for (int m = 0; m < 8; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          state[b][p][m][e] = enter ? -enter[place(b, p, m, e)] : 0.f;

  const u32 own_values = row_address(shared_address(shared.values[0]), lane) ^ 32 * warp * BLOCKS;
  for (int s = 0; s < tiles; ++s) {
    wait_loads<0>();
#if QUASAR_WGMMA
    publish_shared();
#endif
    __syncthreads();
    store_output(s - 1);
    load_keys_queries(s + 1);
    const u32 chunks = shared_address(shared.keys_queries[s & 1]);
    prepare_chunk<T>({chunks + warp * KeysQueries::BYTES}, beta, mask, shared.mix[warp],
                     shared.scores[warp], lane);
    __syncthreads();
    load_values(s + 1);  // where the output before was
#pragma unroll
    for (int i = 0; i < WARPS; ++i)
      walk_chunk<T, BLOCKS>(state, {chunks + i * KeysQueries::BYTES},
                            own_values + (s & 1) * STAGE + i * CHUNK_BYTES, shared.mix[i],
                            shared.scores[i], arg.scale, lane);
    finish_state<BLOCKS>(state);
  }
  __syncthreads();
  store_output(tiles - 1);
  if (!segment.is_last || !arg.final_state) return;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
#pragma unroll
      for (int m = 0; m < 8; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) arg.final_state[own + place(b, p, m, e)] = -state[b][p][m][e];
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
