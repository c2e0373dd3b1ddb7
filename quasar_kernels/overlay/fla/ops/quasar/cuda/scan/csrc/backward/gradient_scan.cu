// The scan of the backward pass, from a sequence's last segment to its first, in fp32:
//     d_states[n] <- maps[n]^T d_states[n + 1] + d_states[n].
// It replaces a segment's addition to the state's gradient by the gradient before that segment.
//
// Grid: (sequences * heads, S / COLUMNS), as in segment_scan.cu. A block keeps COLUMNS columns in
// shared memory, and each warp owns 16 rows. A cp.async pipeline prefetches the maps (for heads of
// 128 in PARTS of rows). The maps have the precision of tf32. The gradient enters the products as
// the sum of two tf32 operands. One operand would drop low digits of a large gradient, and a small
// gradient in an earlier segment may consist of just these digits.

#include "gradients.cuh"

namespace quasar::scan {

constexpr int COLUMNS = 8, STAGES = 4, SCAN_WARPS = S / 16, SCAN_THREADS = 32 * SCAN_WARPS;
constexpr int PARTS = PANELS * PANELS, HEIGHT = S / PARTS;  // a map's parts; rows of a part

struct GradientScanShared {
  float map[STAGES][HEIGHT][S];  // 32-byte pieces, swizzled by row / 2
  float offset[STAGES][S][COLUMNS];
  float state[2][COLUMNS][S + 8];  // transposed
};

__device__ __forceinline__ void gradient_scan(const GradientArguments& arg) {
  extern __shared__ __align__(1024) uint4 raw[];
  GradientScanShared& shared = *(GradientScanShared*)raw;
  const int tid = threadIdx.x, lane = tid & 31, g = lane >> 2, c = lane & 3;
  const int row = (tid >> 5) * 16 + g;  // this lane's rows are row and row + 8
  const i64 sequence = blockIdx.x / arg.heads, head = blockIdx.x % arg.heads;
  const i64 begin = arg.first ? arg.first[sequence] : sequence * arg.per_sequence;
  const i64 end = arg.first ? arg.first[sequence + 1] : begin + arg.per_sequence;
  const int steps = (int)(end - begin) - 2, column = blockIdx.y * COLUMNS;
  if (steps <= 0)
    return;  // the last segment's gradient is complete, and the first segment's is not used
  const i64 stride = (i64)arg.heads * S * S;
  const float* maps = arg.maps + ((end - 2) * arg.heads + head) * S * S;
  float* states = arg.d_states + ((end - 2) * arg.heads + head) * S * S + column;

  constexpr int ROW_THREADS = S / 4, COPY_ROWS = SCAN_THREADS / ROW_THREADS;  // threads of a copy
  const int from_row = tid / ROW_THREADS, from_column = tid % ROW_THREADS * 4;
  const u32 map_to =
      shared_address(shared.map[0][from_row]) + (from_column ^ (from_row >> 1 & 3) << 3) * 4;
  const u32 offset_to = shared_address(&shared.offset[0][tid / 2][tid % 2 * 4]);
  auto load = [&](int n) {
    if (n < steps * PARTS) {
      const float* from =
          maps - n / PARTS * stride + (n % PARTS * HEIGHT + from_row) * S + from_column;
#pragma unroll
      for (int i = 0; i < HEIGHT / COPY_ROWS; ++i)  // the swizzle repeats after COPY_ROWS rows
        copy16(map_to + n % STAGES * sizeof(shared.map[0]) + i * COPY_ROWS * S * 4,
               from + i * COPY_ROWS * S);
      if (n % PARTS == 0)
        copy16(offset_to + n / PARTS % STAGES * sizeof(shared.offset[0]),
               states - n / PARTS * stride + tid / 2 * S + tid % 2 * 4);
    }
    commit_loads();
  };
#pragma unroll
  for (int n = 0; n < STAGES - 1; ++n) load(n);

  auto store_state = [&](int step, const float (&x)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) shared.state[step & 1][2 * c + (e & 1)][row + 8 * (e >> 1)] = x[e];
  };
  float* out = states + row * S + 2 * c;
  const float2 upper = *(const float2*)(out + stride);
  const float2 lower = *(const float2*)(out + stride + 8 * S);
  const float entering[4] = {upper.x, upper.y, lower.x, lower.y};
  store_state(0, entering);

  // rows 2 c and 2 c + 1 of every 8 have the same swizzle
  const float* place = &shared.map[0][2 * c][row ^ c << 3];
  const float* place_below = &shared.map[0][2 * c][(row + 8) ^ c << 3];
  for (int n = 0; n < steps; ++n) {
    float x[4] = {}, y[4] = {};
    const float* state = &shared.state[n & 1][g][2 * c];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int copy = n * PARTS + part, stage = copy % STAGES;
      wait_loads<STAGES - 2>();
      __syncthreads();
      load(copy + STAGES - 1);
#pragma unroll
      for (int t = 0; t < HEIGHT / 8; ++t) {
        const int at = (stage * HEIGHT + 8 * t) * S;
        const float map[4] = {place[at], place[at + S], place_below[at], place_below[at + S]};
        const float2 s = *(const float2*)(state + part * HEIGHT + 8 * t);
        const float high[2] = {round_tf32(s.x), round_tf32(s.y)};
        mma_tf32(x, map, high[0], high[1]);  // two independent chains of products
        mma_tf32(y, map, s.x - high[0], s.y - high[1]);
      }
    }
    const float2 above = *(const float2*)&shared.offset[n % STAGES][row][2 * c];
    const float2 below = *(const float2*)&shared.offset[n % STAGES][row + 8][2 * c];
    x[0] += y[0] + above.x, x[1] += y[1] + above.y;
    x[2] += y[2] + below.x, x[3] += y[3] + below.y;
    store_state(n + 1, x);
    *(float2*)out = make_float2(x[0], x[1]);
    *(float2*)(out + 8 * S) = make_float2(x[2], x[3]);
    out -= stride;
  }
}

QUASAR_LAUNCH(gradient_scan, SCAN_THREADS, sizeof(GradientScanShared), GradientArguments)
extern "C" __global__ void __launch_bounds__(SCAN_THREADS)
    quasar_gradient_scan(const __grid_constant__ GradientArguments arg) {
  gradient_scan(arg);
}

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
