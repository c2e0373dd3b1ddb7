// The scan over segment maps, from one state on: x <- G[n] x + R[n] for n = 0, 1, ..., in fp32.
//
// A block keeps COLUMNS columns of the state in shared memory and runs through all segments of its
// sequence. Each warp owns 16 rows. The loop is sequential and its steps are short, so the latency
// of a step is its cost. A cp.async pipeline of STAGES stages prefetches the maps (for heads of 128
// in PARTS of columns). The products use tensor cores in tf32, to which pass 1 has already rounded
// the maps; the state enters them as the sum of two tf32 operands.

#pragma once

#include "segments.cuh"

namespace quasar::scan {

constexpr int COLUMNS = 8, STAGES = 4, SCAN_WARPS = S / 16, SCAN_THREADS = 32 * SCAN_WARPS;
constexpr int PARTS = PANELS * PANELS, WIDTH = S / PARTS;  // a map's parts; columns of a part

struct ScanShared {
  float map[STAGES][S][WIDTH];  // 32-byte pieces, swizzled by the row's last 2 bits
  float offset[STAGES][S][COLUMNS];
  float state[2][COLUMNS][S + 8];  // transposed
};

// Scans `steps` segments. Their maps G, and the block's COLUMNS columns of their offsets R, are
// `stride` apart. start(row, column) returns an element of the first state.
// store(n, row, column, x) receives in x the elements (row, column), (row, column + 1),
// (row + 8, column) and (row + 8, column + 1) of the state after segment n. Columns count from the
// block's first one. Without `with_offsets`, R is zero.
template <class Start, class Store>
__device__ __forceinline__ void scan_maps(const float* maps, const float* offsets, i64 stride,
                                          int steps, bool with_offsets, const Start& start,
                                          const Store& store) {
  extern __shared__ __align__(1024) uint4 raw[];
  ScanShared& shared = *(ScanShared*)raw;
  const int tid = threadIdx.x, lane = tid & 31, g = lane >> 2, c = lane & 3;
  const int row = (tid >> 5) * 16 + g;  // this lane's rows are row and row + 8

  constexpr int ROW_THREADS = WIDTH / 4,
                COPY_ROWS = SCAN_THREADS / ROW_THREADS;  // threads of a copy
  const int copied = tid / ROW_THREADS * S + tid % ROW_THREADS * 4,
            offset_copied = tid / 2 * S + tid % 2 * 4;
  const u32 map_to = shared_address(shared.map[0][tid / ROW_THREADS]) +
                     ((tid % ROW_THREADS * 4) ^ (tid / ROW_THREADS & 3) << 3) * 4;
  const u32 offset_to = shared_address(&shared.offset[0][tid / 2][tid % 2 * 4]);
  auto load = [&](int n) {
    if (n < steps * PARTS) {
      const u32 stage = n % STAGES;
      const float* from = maps + n / PARTS * stride + n % PARTS * WIDTH + copied;
#pragma unroll
      for (int i = 0; i < S / COPY_ROWS; ++i)  // the swizzle repeats after COPY_ROWS rows
        copy16(map_to + stage * sizeof(shared.map[0]) + i * COPY_ROWS * WIDTH * 4,
               from + i * COPY_ROWS * S);
      if (n % PARTS == 0)
        copy16(offset_to + n / PARTS % STAGES * sizeof(shared.offset[0]),
               offsets + n / PARTS * stride + offset_copied);
    }
    commit_loads();
  };
#pragma unroll
  for (int n = 0; n < STAGES - 1; ++n) load(n);

  // the state, at (row + 8 r, 2 c + j) in element e = 2 r + j
  auto store_state = [&](int step, int e, float x) {
    shared.state[step & 1][2 * c + (e & 1)][row + 8 * (e >> 1)] = x;
  };
#pragma unroll
  for (int e = 0; e < 4; ++e) store_state(0, e, start(row + 8 * (e >> 1), 2 * c + (e & 1)));
  // columns 8 t + 2 c of this lane's rows, which have the same swizzle
  const float* place[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) place[t] = &shared.map[0][row][2 * c + ((t ^ (row & 3)) << 3)];

  for (int n = 0; n < steps; ++n) {
    float x[4] = {}, y[4] = {};
    const float* state = &shared.state[n & 1][g][2 * c];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int copy = n * PARTS + part, stage = copy % STAGES;
      wait_loads<STAGES - 2>();
      __syncthreads();
      load(copy + STAGES - 1);  // before the products: stores of the state would queue behind it
#pragma unroll
      for (int t = 0; t < WIDTH / 8; ++t) {
        const float* at = place[t & 3] + stage * (S * WIDTH) + (t & 4) * 8;
        const float2 upper = *(const float2*)at, lower = *(const float2*)(at + 8 * WIDTH);
        const float map[4] = {upper.x, upper.y, lower.x, lower.y};
        const float2 s = *(const float2*)(state + part * WIDTH + 8 * t);
        const float high[2] = {round_tf32(s.x), round_tf32(s.y)};
        mma_tf32(x, map, high[0], high[1]);  // two independent chains of products
        mma_tf32(y, map, s.x - high[0], s.y - high[1]);
      }
    }
    if (with_offsets) {
      const float2 upper = *(const float2*)&shared.offset[n % STAGES][row][2 * c];
      const float2 lower = *(const float2*)&shared.offset[n % STAGES][row + 8][2 * c];
      y[0] += upper.x, y[1] += upper.y, y[2] += lower.x, y[3] += lower.y;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) store_state(n + 1, e, x[e] += y[e]);
    store(n, row, 2 * c, x);
  }
}

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
