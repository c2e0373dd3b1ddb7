// The scan between the passes: states[n] <- maps[n] * state + states[n], which replaces each
// segment's R by the state after that segment.

#include "scan_maps.cuh"

namespace quasar::scan {

// Grid: (sequences * heads, S / COLUMNS).
__device__ __forceinline__ void segment_scan(const Arguments& arg) {
  if (is_skipped(arg, blockIdx.x)) return;
  const i64 sequence = blockIdx.x / arg.heads, head = blockIdx.x % arg.heads;
  const i64 begin = arg.first ? arg.first[sequence] : sequence * arg.per_sequence;
  const i64 end = arg.first ? arg.first[sequence + 1] : begin + arg.per_sequence;
  const int steps = (int)(end - begin) - 1, first_column = blockIdx.y * COLUMNS;
  const i64 stride = (i64)arg.heads * S * S;
  const float* maps = arg.maps + (begin * arg.heads + head) * S * S;
  float* states = arg.states + (begin * arg.heads + head) * S * S + first_column;
  const i64 initial = (i64)blockIdx.x * S * S + first_column;

  scan_maps(
      maps, states, stride, steps, true,
      [&](int row, int column) {
        return arg.initial_state ? arg.initial_state[initial + row * S + column] : 0.f;
      },
      [&](int n, int row, int column, const float (&x)[4]) {
        float* out = states + n * stride + row * S + column;
        *(float2*)out = make_float2(x[0], x[1]);
        *(float2*)(out + 8 * S) = make_float2(x[2], x[3]);
      });
}

QUASAR_LAUNCH(segment_scan, SCAN_THREADS, sizeof(ScanShared), Arguments)
extern "C" __global__ void __launch_bounds__(SCAN_THREADS)
    quasar_segment_scan(const __grid_constant__ Arguments arg) {
  segment_scan(arg);
}

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
