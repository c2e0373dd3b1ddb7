// The kernels around the exchange between the ranks of a process group: the map of a rank's slice,
// the fold of the maps of several ranks, and the states within a slice that follow from it.

#include "scan_maps.cuh"

namespace quasar::scan {

// The map of whole segments, state -> G state + R, of one sequence; mirrored by slice_forward.py.
struct SliceArguments {
  const float* maps;      // [steps, heads, S, S]: each segment's G
  float* states;          // each segment's R; with `keep` replaced by the state after the segment
  float* prefixes;        // the same shape: receives the products of all G so far; may be null
  const float* start;     // [heads, S, S]: the state from which R starts; null: zero
  float* map;             // [2 heads S S + heads]: G, R, and 1 for each marked head
  const int* unfinished;  // [heads]; see is_skipped
  int steps, heads, keep, repeat;
};

// Grid: (heads, 2 S / COLUMNS); the blocks of the first half compute R, the others G. With `repeat`
// only marked heads are computed.
__device__ __forceinline__ void slice_map(const SliceArguments& arg) {
  const int head = blockIdx.x, block = blockIdx.y;
  if (arg.repeat && !arg.unfinished[head]) return;
  constexpr int BLOCKS = S / COLUMNS;
  const bool of_R = block < BLOCKS;
  const int first_column = block % BLOCKS * COLUMNS;
  const i64 stride = (i64)arg.heads * S * S, at = (i64)head * S * S;
  float* result = arg.map + (of_R ? stride : 0) + at + first_column;
  float* each = of_R ? arg.keep ? arg.states : nullptr : arg.prefixes;
  if (each) each += at + first_column;
  auto start = [&](int row, int column) {
    if (!of_R) return row == first_column + column ? 1.f : 0.f;
    return arg.start ? arg.start[at + row * S + first_column + column] : 0.f;
  };
  auto write = [](float* out, const float (&x)[4]) {
    *(float2*)out = make_float2(x[0], x[1]);
    *(float2*)(out + 8 * S) = make_float2(x[2], x[3]);
  };
  if (block == 0 && threadIdx.x == 0) arg.map[2 * stride + head] = arg.repeat ? 1.f : 0.f;
  if (arg.steps == 0)
    for (int e = threadIdx.x; e < S * COLUMNS; e += SCAN_THREADS)
      result[e / COLUMNS * S + e % COLUMNS] = start(e / COLUMNS, e % COLUMNS);
  scan_maps(arg.maps + at, arg.states + at + first_column, stride, arg.steps, of_R, start,
            [&](int n, int row, int column, const float (&x)[4]) {
              if (each) write(each + n * stride + row * S + column, x);
              if (n == arg.steps - 1) write(result + row * S + column, x);
            });
}

QUASAR_LAUNCH(slice_map, SCAN_THREADS, sizeof(ScanShared), SliceArguments)
extern "C" __global__ void __launch_bounds__(SCAN_THREADS)
    quasar_slice_map(const __grid_constant__ SliceArguments arg) {
  slice_map(arg);
}

// The fold of `count` affine maps, x <- G[n] x + R[n] from x = R[0]; mirrored by slice_forward.py.
struct FoldArguments {
  const float *G, *R;      // G of n = 1 and R of n = 0, [heads, S, S] each
  float* state;            // [heads, S, S]: the result
  const float* marks;      // [heads] of n = 0; those of n and n + 1 are R_stride apart; may be null
  int* unfinished;         // [heads]: becomes 1 where any mark is not 0
  i64 G_stride, R_stride;  // between n and n + 1, in elements; may be negative
  int count, transposed;   // transposed: whether to multiply by G[n]^T instead
};

constexpr int FOLD_THREADS = 256, FOLD_GROUPS = FOLD_THREADS / S, FOLD_OWN = COLUMNS / FOLD_GROUPS;

struct FoldShared {
  double state[2][S][COLUMNS];
  float map[S][S + 1];
};

// Grid: (heads, S / COLUMNS). The products are fp64, so that a chain of ranks adds no error.
__device__ __forceinline__ void fold_maps(const FoldArguments& arg) {
  extern __shared__ __align__(1024) uint4 raw[];
  FoldShared& shared = *(FoldShared*)raw;
  const int tid = threadIdx.x, row = tid % S, column = tid / S * FOLD_OWN;
  const int first_column = blockIdx.y * COLUMNS;
  const i64 head = (i64)blockIdx.x * S * S, at = head + row * S + first_column + column;
  double x[FOLD_OWN];
#pragma unroll
  for (int j = 0; j < FOLD_OWN; ++j) x[j] = arg.R[at + j];
  for (int n = 1; n < arg.count; ++n) {
    const float* G = arg.G + (n - 1) * arg.G_stride + head;
    const float* R = arg.R + n * arg.R_stride + at;
#pragma unroll
    for (int j = 0; j < FOLD_OWN; ++j) shared.state[n & 1][row][column + j] = x[j], x[j] = R[j];
    if (n > 1) __syncthreads();  // the map of the step before has been read
    for (int e = tid; e < S * S; e += FOLD_THREADS) shared.map[e / S][e % S] = G[e];
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < S; ++k) {
      const double factor = arg.transposed ? shared.map[k][row] : shared.map[row][k];
#pragma unroll
      for (int j = 0; j < FOLD_OWN; ++j) x[j] += factor * shared.state[n & 1][k][column + j];
    }
  }
#pragma unroll
  for (int j = 0; j < FOLD_OWN; ++j) arg.state[at + j] = (float)x[j];
  if (arg.marks && blockIdx.y == 0 && tid == 0)
    for (int n = 0; n < arg.count; ++n)
      if (arg.marks[n * arg.R_stride + blockIdx.x] != 0.f) arg.unfinished[blockIdx.x] = 1;
}

QUASAR_LAUNCH(fold_maps, FOLD_THREADS, sizeof(FoldShared), FoldArguments)
extern "C" __global__ void __launch_bounds__(FOLD_THREADS)
    quasar_fold_maps(const __grid_constant__ FoldArguments arg) {
  fold_maps(arg);
}

// states[n] += prefixes[n] * entering, both [steps, heads, S, S]; mirrored by slice_forward.py.
struct EnterArguments {
  const float* prefixes;
  float* states;
  const float* entering;  // [heads, S, S]
  int heads;
};

constexpr int ENTER_THREADS = 256;

struct EnterShared {
  float prefix[PANEL][PANEL + 4];
  float entering[PANEL][PANEL];
};

// Grid: (steps * heads, PANELS * PANELS): a block computes 64 rows of 64 columns, each thread 4 of
// 4, in fp32.
__device__ __forceinline__ void enter_states(const EnterArguments& arg) {
  extern __shared__ __align__(1024) uint4 raw[];
  EnterShared& shared = *(EnterShared*)raw;
  const int tid = threadIdx.x, row = tid / 16 * 4, column = tid % 16 * 4;
  const int first_row = blockIdx.y / PANELS * PANEL, first_column = blockIdx.y % PANELS * PANEL;
  const float* prefix = arg.prefixes + (i64)blockIdx.x * S * S + first_row * S;
  const float* entering = arg.entering + (i64)(blockIdx.x % arg.heads) * S * S + first_column;
  float* states =
      arg.states + (i64)blockIdx.x * S * S + (first_row + row) * S + first_column + column;
  float x[4][4] = {};
  for (int panel = 0; panel < PANELS; ++panel) {
    if (panel > 0) __syncthreads();
    for (int e = tid * 4; e < PANEL * PANEL; e += ENTER_THREADS * 4) {
      const int r = e / PANEL, c = e % PANEL;
      *(float4*)&shared.prefix[r][c] = *(const float4*)(prefix + r * S + panel * PANEL + c);
      *(float4*)&shared.entering[r][c] = *(const float4*)(entering + (panel * PANEL + r) * S + c);
    }
    __syncthreads();
#pragma unroll 2
    for (int k = 0; k < PANEL; k += 4) {
      float left[4][4], right[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *(float4*)left[i] = *(const float4*)&shared.prefix[row + i][k];
        *(float4*)right[i] = *(const float4*)&shared.entering[k + i][column];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) x[i][c] += left[i][j] * right[j][c];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float4 state = *(const float4*)(states + i * S);
    state.x += x[i][0], state.y += x[i][1], state.z += x[i][2], state.w += x[i][3];
    *(float4*)(states + i * S) = state;
  }
}

QUASAR_LAUNCH(enter_states, ENTER_THREADS, sizeof(EnterShared), EnterArguments)
extern "C" __global__ void __launch_bounds__(ENTER_THREADS)
    quasar_enter_states(const __grid_constant__ EnterArguments arg) {
  enter_states(arg);
}

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
