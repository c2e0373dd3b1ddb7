// WKV6 forward, token by token: outputs, the final state, and state checkpoints for the gradients.
//
// Grid: (sequences * heads, V / COLUMNS). The state stays in registers, in fp32: each lane holds
// ROWS rows of one column. A lane therefore does few multiplications per token, and the sum over
// rows takes few shuffles between the lanes of a column. The next token's products do not have to
// wait for these shuffles.
//
// Shared memory: two cp.async stages of TOKENS tokens, and one stage's tokens converted to fp32.

#include "walk.cuh"

namespace quasar::wkv6 {

constexpr int ROWS = 8, LANES = KEYS / ROWS;            // rows of a lane; lanes of a column
constexpr int WARPS = 4, COLUMNS = WARPS * 32 / LANES;  // warps and columns of a block
constexpr int THREADS = 32 * WARPS, TOKENS = 16;

typedef Stage<TOKENS, COLUMNS, false> Staged;

__device__ __forceinline__ void wkv6_forward(const Arguments& arg) {
  extern __shared__ __align__(1024) uint4 raw[];
  Staged& shared = *(Staged*)raw;
  const Chain chain = find_chain(arg);
  const int group = threadIdx.x % LANES, own = threadIdx.x / LANES;
  const int first_column = blockIdx.y * COLUMNS, column = first_column + own;
  const i64 state_offset = (i64)blockIdx.x * KEYS * arg.values + column;
  // adjacent lanes read adjacent pieces of 16 bytes
  auto row = [&](int i) { return i / 4 * (KEYS / 2) + 4 * group + i % 4; };

  auto tokens_from = [&](int first) { return min(TOKENS, chain.tokens - first); };
  shared.copy<THREADS>(arg, chain, 0, tokens_from(0), first_column, 0);
  float state[ROWS], bonus[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const i64 at = state_offset + (i64)row(i) * arg.values;
    state[i] = arg.initial_state ? arg.initial_state[at] : 0.f;
    bonus[i] = arg.u[chain.head * KEYS + row(i)];
  }
  const i64 step = (i64)arg.heads * arg.values;
  Element* out = (Element*)arg.o + (chain.begin * arg.heads + chain.head) * arg.values + column;

  for (int first = 0, part = 0; first < chain.tokens; first += TOKENS, part ^= 1) {
    const int tokens = tokens_from(first);
    shared.copy<THREADS>(arg, chain, first + TOKENS, tokens_from(first + TOKENS), first_column,
                         part ^ 1);
    wait_loads<1>();
    __syncthreads();
    shared.convert<THREADS>(tokens, part);
    __syncthreads();
#pragma unroll 4
    for (int t = 0; t < tokens; ++t) {
      if (arg.checkpoints && t % CHECKPOINT == 0) {
        const i64 cell = chain.cell + (first + t) / CHECKPOINT;
        float* to = arg.checkpoints + (cell * arg.heads + chain.head) * KEYS * arg.values + column;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) to[(i64)row(i) * arg.values] = state[i];
      }
      float r[ROWS], k[ROWS], decay[ROWS], sum = 0.f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = half * (KEYS / 2) + 4 * group;
        load4(r + 4 * half, shared.r + t * KEYS + at);
        load4(k + 4 * half, shared.k + t * KEYS + at);
        load4(decay + 4 * half, shared.decay + t * KEYS + at);
      }
      const float v = shared.v[t * COLUMNS + own];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const float written = k[i] * v;
        sum += r[i] * (state[i] + bonus[i] * written);
        state[i] = state[i] * decay[i] + written;
      }
#pragma unroll
      for (int other = 1; other < LANES; other *= 2) sum += __shfl_xor_sync(ALL, sum, other);
      if (group == 0) *out = narrowed(sum);
      out += step;
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
    arg.final_state[state_offset + (i64)row(i) * arg.values] = state[i];
}

QUASAR_LAUNCH(wkv6_forward, THREADS, sizeof(Staged), Arguments)
extern "C" __global__ void __launch_bounds__(THREADS)
    quasar_wkv6_forward(const __grid_constant__ Arguments arg) {
  wkv6_forward(arg);
}

}  // namespace quasar::wkv6
