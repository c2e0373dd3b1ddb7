// Asynchronous copies between a segment's tensors and shared memory, and the pipeline that tracks
// them. A chunk is 16 tokens x 64 channels, a tile 64 tokens x 64 channels.
//
// On Hopper one lane issues a bulk copy (TMA) with a tensor map, made by driver.py, and one
// mbarrier for each pipeline stage counts the bytes. Other GPUs use cp.async: every lane copies 16
// bytes at a time, and groups of copies complete in the order of their commits. The kernels' code
// serves both: a wait names the stage, for the mbarriers, and the number of newer groups, for
// cp.async.

#pragma once

#include "../../csrc/barriers.cuh"
#include "segments.cuh"

namespace quasar::scan {

// The kernels' second argument, filled for Hopper only. q and k have tensor maps of chunks, the
// others of tiles.
struct TensorMaps {
  TensorMap q, k, k_tiles, v, o;
};

// A segment's rows of one head; a lane copies 16 bytes of every fourth row.
struct Rows {
  unsigned short* at;
  i64 stride;
  int tokens;  // of the segment, from this lane's first row on
  u32 place;   // of that row's bytes in a chunk in shared memory

  __device__ __forceinline__ Rows(const void* x, const i64 (&strides)[3], const Segment& segment,
                                  int head, int lane)
      : at((unsigned short*)x + segment.row * strides[0] + head * strides[2] +
           (segment.begin + (lane >> 3)) * strides[1] + (lane & 7) * 8),
        stride(strides[1]),
        tokens(segment.tokens - (lane >> 3)),
        place((lane >> 3) * ROW_BYTES + (((lane ^ lane >> 3) & 7) << 4)) {}

  __device__ __forceinline__ u32 offset(int i) const {
    return (i & 1 ? place ^ 64 : place) + 4 * i * ROW_BYTES;
  }

  // Copies the chunk at `token` of the segment; rows after the segment's end become zero.
  __device__ __forceinline__ void load(u32 to, int token, int channel) const {
    const unsigned short* from = at + token * stride + channel;
#pragma unroll
    for (int i = 0; i < 4; ++i)  // with size 0 nothing is read from the address
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                   :
                   : "r"(to + offset(i)), "l"(from + 4 * i * stride),
                     "r"(token + 4 * i < tokens ? 16 : 0)
                   : "memory");
  }

  // Copies a chunk back to device memory, only the rows before the segment's end.
  __device__ __forceinline__ void store(u32 from, int token, int channel) const {
    unsigned short* to = at + token * stride + channel;
    uint4 x[4];  // all four are loaded before the first store, so that their latencies overlap
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(x[i].x), "=r"(x[i].y), "=r"(x[i].z), "=r"(x[i].w)
                   : "r"(from + offset(i))
                   : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (token + 4 * i < tokens) *(uint4*)(to + 4 * i * stride) = x[i];
  }
};

// Zero a chunk's rows from the `tokens`-th on.
__device__ __forceinline__ void clear_rows(u32 chunk, int tokens, int lane) {
  for (int row = lane >> 3; row < CHUNK; row += 4)
    if (row >= tokens)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};"
                   :
                   : "r"(chunk + row * ROW_BYTES + (lane & 7) * 16), "r"(0)
                   : "memory");
}

#if QUASAR_WGMMA

// True in one lane of a warp. The compiler knows that it is one lane, so copies need no loop over
// lanes.
__device__ __forceinline__ bool elect_lane() {
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected != 0;
}

// A pipeline of STAGES stages of copies: one mbarrier for each stage, on which every warp arrives
// that copies a part. Blocks synchronize before they refill a stage, so there are no `empty`
// barriers.
template <int STAGES>
struct Pipeline {
  u32 barriers;

  // one thread of the block must call it, before a barrier of the block
  __device__ __forceinline__ void init(int warps) const {
    for (int i = 0; i < STAGES; ++i) init_barrier(barriers + 8 * i, warps);
    fence_barrier_init();
  }

  // call before this warp's copies to a stage; `bytes` is their total
  __device__ __forceinline__ void producer_expect(int stage, u32 bytes) const {
    if (elect_lane()) arrive_expecting(barriers + 8 * stage, bytes);
  }
  __device__ __forceinline__ void producer_commit() const {}

  // waits for all warps' copies to a stage; `parity` is that of the stage's round
  template <int NEWER>
  __device__ __forceinline__ void consumer_wait(int stage, u32 parity) const {
    wait_barrier(barriers + 8 * stage, parity);
  }
};

// Bulk copies of a segment's chunks or tiles of one head; `map` has their size. At a segment's end
// they also copy tokens of the next sequence.
struct Copies {
  static constexpr bool RUN_OVER = true;
  const TensorMap& map;
  int head, row, begin;

  __device__ __forceinline__ Copies(const TensorMap& map, const Segment& segment, int head)
      : map(map), head(head), row((int)segment.row), begin((int)segment.begin) {}

  template <int STAGES>
  __device__ __forceinline__ void load(u32 to, int token, int channel,
                                       const Pipeline<STAGES>& pipeline, int stage) const {
    if (elect_lane())
      asm volatile(
          "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
          " [%0], [%1, {%2, %3, %4, %5}], [%6];"
          :
          : "r"(to), "l"(&map), "r"(channel), "r"(head), "r"(begin + token), "r"(row),
            "r"(pipeline.barriers + 8 * stage)
          : "memory");
  }

  // Stores are asynchronous; finish_stores waits until they have read shared memory.
  __device__ __forceinline__ void store(u32 from, int token, int channel) const {
    if (elect_lane())
      asm volatile(
          "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group"
          " [%0, {%1, %2, %3, %4}], [%5];\n"
          "cp.async.bulk.commit_group;"
          :
          : "l"(&map), "r"(channel), "r"(head), "r"(begin + token), "r"(row), "r"(from)
          : "memory");
  }
  __device__ __forceinline__ void finish_stores() const {
    if (elect_lane()) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
};

struct Chunks : Copies {
  __device__ __forceinline__ Chunks(const TensorMap& map, const void*, const i64 (&)[3],
                                    const Segment& segment, int head, int)
      : Copies(map, segment, head) {}
};

struct Tiles : Copies {
  __device__ __forceinline__ Tiles(const TensorMap& map, const void*, const i64 (&)[3],
                                   const Segment& segment, int head, int, int)
      : Copies(map, segment, head) {}

  // whether a warp issues copies
  static __device__ __forceinline__ bool copied_by(int warp) { return warp == 0; }
};

#else

template <int STAGES>
struct Pipeline {
  u32 barriers;

  __device__ __forceinline__ void init(int) const {}
  __device__ __forceinline__ void producer_expect(int, u32) const {}
  __device__ __forceinline__ void producer_commit() const { commit_loads(); }

  // waits for this thread's copies of a group, after which NEWER groups were committed
  template <int NEWER>
  __device__ __forceinline__ void consumer_wait(int, u32) const {
    wait_loads<NEWER>();
  }
};

struct Chunks {
  static constexpr bool RUN_OVER = false;
  Rows rows;

  __device__ __forceinline__ Chunks(const TensorMap&, const void* x, const i64 (&strides)[3],
                                    const Segment& segment, int head, int lane)
      : rows(x, strides, segment, head, lane) {}

  template <int STAGES>
  __device__ __forceinline__ void load(u32 to, int token, int channel, const Pipeline<STAGES>&,
                                       int) const {
    rows.load(to, token, channel);
  }
};

// every warp copies its chunk of a tile
struct Tiles : Chunks {
  int warp;

  __device__ __forceinline__ Tiles(const TensorMap& map, const void* x, const i64 (&strides)[3],
                                   const Segment& segment, int head, int warp, int lane)
      : Chunks(map, x, strides, segment, head, lane), warp(warp) {}

  static __device__ __forceinline__ bool copied_by(int) { return true; }

  template <int STAGES>
  __device__ __forceinline__ void load(u32 to, int token, int channel, const Pipeline<STAGES>&,
                                       int) const {
    rows.load(to + warp * CHUNK_BYTES, token + warp * CHUNK, channel);
  }
  __device__ __forceinline__ void store(u32 from, int token, int channel) const {
    rows.store(from + warp * CHUNK_BYTES, token + warp * CHUNK, channel);
  }
  __device__ __forceinline__ void finish_stores() const {}
};

__device__ __forceinline__ void fence_proxy_async() {}  // only bulk copies and wgmma need it

#endif

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
