// WKV6's gradients, token by token from the last to the first, in fp32.
//
// Grid: (sequences * heads, V / COLUMNS). A lane holds LANE_COLUMNS columns of one row of the
// state's gradient. It holds the same columns of the states before each of CHECKPOINT tokens. It
// recomputes these states from the checkpoint that the forward kernel stored. The gradients of r,
// k and w are sums over columns. Each lane adds its columns, the warps' sums are added through
// shared memory, and the host adds the blocks' sums. The gradient of v is a sum over rows.
//
// Shared memory: two cp.async stages of TOKENS tokens, one stage's tokens converted to fp32, and
// the warps' partial sums.

#include "walk.cuh"

namespace quasar::wkv6::gradients {

constexpr int LANE_COLUMNS = 8, ROW_WARPS = KEYS / 32;  // a lane's columns; warps across the rows
constexpr int COLUMN_WARPS = KEYS == 128 ? 2 : 4;       // warps across the columns
constexpr int COLUMNS = LANE_COLUMNS * COLUMN_WARPS;    // of a block
constexpr int THREADS = 32 * ROW_WARPS * COLUMN_WARPS, TOKENS = CHECKPOINT;

typedef Stage<TOKENS, COLUMNS, true> Staged;

struct Shared {
  Staged staged;
  float partial[3][COLUMN_WARPS][TOKENS * KEYS];  // of dr, dk and dw
  float dv[ROW_WARPS][TOKENS * COLUMNS];
};

// Return to lane i the sum of x[i / 4] over all lanes of the warp, in 9 exchanges.
__device__ __forceinline__ float sum_of_lanes(const float (&x)[LANE_COLUMNS], int lane) {
  float four[4], two[2];
  const bool a = lane & 16, b = lane & 8, c = lane & 4;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    four[i] = (a ? x[4 + i] : x[i]) + __shfl_xor_sync(ALL, a ? x[i] : x[4 + i], 16);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    two[i] = (b ? four[2 + i] : four[i]) + __shfl_xor_sync(ALL, b ? four[i] : four[2 + i], 8);
  float one = (c ? two[1] : two[0]) + __shfl_xor_sync(ALL, c ? two[0] : two[1], 4);
  one += __shfl_xor_sync(ALL, one, 2);
  return one + __shfl_xor_sync(ALL, one, 1);
}

__device__ __forceinline__ void load8(float (&to)[LANE_COLUMNS], const float* from) {
  load4(to, from);
  load4(to + 4, from + 4);
}

__device__ __forceinline__ void wkv6_backward(const Arguments& arg) {
  extern __shared__ __align__(1024) uint4 raw[];
  Shared& shared = *(Shared*)raw;
  Staged& staged = shared.staged;
  const Chain chain = find_chain(arg);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row_warp = warp % ROW_WARPS, column_warp = warp / ROW_WARPS, row = 32 * row_warp + lane;
  const int first_column = blockIdx.y * COLUMNS, own = column_warp * LANE_COLUMNS;
  const i64 checkpoint_offset = (i64)row * arg.values + first_column + own;
  const i64 state_offset = (i64)blockIdx.x * KEYS * arg.values + checkpoint_offset;
  const i64 sequences = gridDim.x / arg.heads, all = arg.bounds ? arg.T : arg.T * sequences;
  const float bonus = arg.u[chain.head * KEYS + row];

  float d_state[LANE_COLUMNS] = {}, d_bonus = 0.f;
  if (arg.d_final) load8(d_state, arg.d_final + state_offset);

  const int tiles = (chain.tokens + TOKENS - 1) / TOKENS;
  auto copy = [&](int tile) {
    const int first = tile * TOKENS, tokens = tile < 0 ? 0 : min(TOKENS, chain.tokens - first);
    staged.copy<THREADS>(arg, chain, first, tokens, first_column, tile & 1);
  };
  copy(tiles - 1);
  for (int tile = tiles - 1; tile >= 0; --tile) {
    const int first = tile * TOKENS, tokens = min(TOKENS, chain.tokens - first);
    copy(tile - 1);
    float state[TOKENS][LANE_COLUMNS];  // before each token
    const i64 cell = (chain.cell + tile) * arg.heads + chain.head;
    load8(state[0], arg.checkpoints + cell * KEYS * arg.values + checkpoint_offset);
    wait_loads<1>();
    __syncthreads();
    staged.convert<THREADS>(tokens, tile & 1);
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TOKENS - 1; ++t) {
      if (t + 1 >= tokens) continue;
      float v[LANE_COLUMNS];
      load8(v, staged.v + t * COLUMNS + own);
      const float k = staged.k[t * KEYS + row], decay = staged.decay[t * KEYS + row];
#pragma unroll
      for (int c = 0; c < LANE_COLUMNS; ++c) state[t + 1][c] = state[t][c] * decay + k * v[c];
    }
#pragma unroll
    for (int t = TOKENS - 1; t >= 0; --t) {
      if (t >= tokens) continue;
      float v[LANE_COLUMNS], dout[LANE_COLUMNS], dv[LANE_COLUMNS];
      load8(v, staged.v + t * COLUMNS + own);
      load8(dout, staged.dout + t * COLUMNS + own);
      const float r = staged.r[t * KEYS + row], k = staged.k[t * KEYS + row],
                  decay = staged.decay[t * KEYS + row];
      float dr = 0.f, dk = 0.f, dw = 0.f, own_value = 0.f;
#pragma unroll
      for (int c = 0; c < LANE_COLUMNS; ++c) {
        dr += state[t][c] * dout[c];
        dk += d_state[c] * v[c];
        dw += state[t][c] * d_state[c];
        own_value += dout[c] * v[c];
        dv[c] = k * (d_state[c] + bonus * r * dout[c]);
        d_state[c] = d_state[c] * decay + r * dout[c];
      }
      d_bonus += r * k * own_value;
      shared.partial[0][column_warp][t * KEYS + row] = dr + bonus * k * own_value;
      shared.partial[1][column_warp][t * KEYS + row] = dk + bonus * r * own_value;
      shared.partial[2][column_warp][t * KEYS + row] = dw * decay;
      const float sum = sum_of_lanes(dv, lane);
      if (lane % 4 == 0) shared.dv[row_warp][t * COLUMNS + own + lane / 4] = sum;
    }
    __syncthreads();
    const i64 token = chain.begin + first;
    for (int p = threadIdx.x; p < tokens * KEYS; p += THREADS) {
      const i64 at = ((blockIdx.y * all + token + p / KEYS) * arg.heads + chain.head) * KEYS;
      float* const to[3] = {arg.dr, arg.dk, arg.dw};
#pragma unroll
      for (int q = 0; q < 3; ++q) {
        float sum = 0.f;
#pragma unroll
        for (int b = 0; b < COLUMN_WARPS; ++b) sum += shared.partial[q][b][p];
        to[q][at + p % KEYS] = sum;
      }
    }
    for (int p = threadIdx.x; p < tokens * COLUMNS; p += THREADS) {
      float sum = 0.f;
#pragma unroll
      for (int d = 0; d < ROW_WARPS; ++d) sum += shared.dv[d][p];
      const i64 at = (token + p / COLUMNS) * arg.heads + chain.head;
      ((Element*)arg.dv)[at * arg.values + first_column + p % COLUMNS] = narrowed(sum);
    }
  }
  if (arg.d_initial) {
#pragma unroll
    for (int c = 0; c < LANE_COLUMNS; ++c) arg.d_initial[state_offset + c] = d_state[c];
  }
  __syncthreads();
  shared.partial[0][column_warp][row] = d_bonus;
  __syncthreads();
  for (int i = threadIdx.x; i < KEYS; i += THREADS) {
    float sum = 0.f;
#pragma unroll
    for (int b = 0; b < COLUMN_WARPS; ++b) sum += shared.partial[0][b][i];
    arg.du[(blockIdx.y * (i64)gridDim.x + blockIdx.x) * KEYS + i] = sum;
  }
}

QUASAR_LAUNCH(wkv6_backward, THREADS, sizeof(Shared), Arguments)
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    quasar_wkv6_backward(const __grid_constant__ Arguments arg) {
  wkv6_backward(arg);
}

}  // namespace quasar::wkv6::gradients
