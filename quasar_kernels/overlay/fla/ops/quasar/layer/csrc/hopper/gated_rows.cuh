// The gated output's arguments and shared memory, and the producer warps that copy rows of narrow
// and o for the consumers.

#pragma once

#include "warpgroup_product.cuh"

#if QUASAR_WGMMA
namespace quasar::layer {

constexpr int HEADS = 8, WIDTH = HEADS * S;          // channels of o
constexpr int GATE_WEIGHT_TILES = HEADS / 2;         // a weight tile holds two heads
constexpr int WEIGHT_STAGES = 9, CHUNKS = 4;         // the most that fits in shared memory
constexpr int ROWS_BYTES = TILE_TOKENS * ROW_BYTES;  // of a chunk

// Arguments of the gated output; mirrored by hopper.py.
struct OutputArguments {
  const void *o, *narrow, *gate_weights, *out_weights;
  const float* bias;     // [WIDTH]
  void* y;               // [T, 128 * tiles]
  i64 T, narrow_stride;  // elements
  int tiles, row_tiles;  // tiles of 128 outputs; tiles of one grid row
  int steps;             // tiles of 64 tokens of each consumer
  float eps;
};

struct OutputShared {
  uint4 narrow[CONSUMERS][ROWS_BYTES / 16];  // these tiles are 1024-byte aligned
  uint4 chunks[CONSUMERS][CHUNKS][ROWS_BYTES / 16];
  PipelineShared<WEIGHT_STAGES> pipeline;
  float bias[WIDTH];  // halved
  u64 narrow_full[CONSUMERS], narrow_empty[CONSUMERS];
  u64 full[CONSUMERS][CHUNKS], empty[CONSUMERS][CHUNKS];
};

// ---- rows of narrow and o, copied by one producer warp for each consumer ----

// One warp copies 128 bytes of each of 64 rows, `pitch` bytes apart. Rows after `last` repeat it.
__device__ __forceinline__ void copy_rows(u32 to, const char* from, int pitch, int last) {
  const int lane = threadIdx.x & 31, first = lane >> 3, piece = lane & 7;
  from += 16 * piece;
  to += first * ROW_BYTES + ((piece ^ first) << 4);  // the swizzle repeats after 8 rows
#pragma unroll 2
  for (int row = first; row < TILE_TOKENS; row += 8) {
    copy16(to, from + min(row, last) * pitch);
    copy16((to ^ 64) + 4 * ROW_BYTES, from + min(row + 4, last) * pitch);
    to += 8 * ROW_BYTES;
  }
}

// One warp copies the rows of its consumer's tiles.
__device__ __forceinline__ void produce_rows(const OutputArguments& arg, OutputShared& shared,
                                             int consumer) {
  const int pitch = 2 * (int)arg.narrow_stride;
  PipelineState<CHUNKS> state;
  i64 row = ((i64)blockIdx.x * CONSUMERS + consumer) * TILE_TOKENS;
  for (int step = 0; step < arg.steps; ++step) {
    const i64 from = row < arg.T ? row : arg.T - 1;  // rows past the end are not used
    const int last = (int)min(arg.T - 1 - from, (i64)TILE_TOKENS - 1);
    wait_barrier(shared_address(&shared.narrow_empty[consumer]), (step & 1) ^ 1);
    copy_rows(shared_address(shared.narrow[consumer]), (const char*)arg.narrow + from * pitch,
              pitch, last);
    asm volatile("cp.async.wait_all;" ::: "memory");
    fence_proxy_async();
    arrive(shared_address(&shared.narrow_full[consumer]));
    const char* o = (const char*)arg.o + from * (2 * WIDTH);
    for (int h = 0; h < HEADS; ++h) {
      wait_barrier(shared_address(&shared.empty[consumer][state.stage]), state.parity ^ 1);
      copy_rows(shared_address(shared.chunks[consumer][state.stage]), o + h * ROW_BYTES, 2 * WIDTH,
                last);
      arrive_after_copies(shared_address(&shared.full[consumer][state.stage]));
      state.advance();
    }
    row += (i64)gridDim.x * CONSUMERS * TILE_TOKENS;
  }
}

}  // namespace quasar::layer
#endif

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
