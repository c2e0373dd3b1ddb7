// Copies of chunks, 16 tokens x 64 channels, and of tiles, 64 tokens x 64 channels, between a
// segment's tensors and shared memory.
//
// On Hopper one lane asks for a bulk copy by a tensor map (CUtensorMap, made by cuda_driver.py), and
// barriers tell what has arrived. Elsewhere all lanes copy 16 bytes at a time (cp.async), and groups
// of copies arrive in the order in which they were closed. Kernels are written for both: they name
// a group's stage, for the barriers, and how many groups they closed since.

#pragma once

#include "../../csrc/barriers.cuh"
#include "segments.cuh"

namespace quasar::scan {

struct alignas(64) TensorMap {
  u64 opaque[16];
};

// the kernels' second argument; filled for Hopper alone. q and k in chunks, the others in tiles.
struct TensorMaps {
  TensorMap q, k, k_tiles, v, o;
};

// A segment's rows of one head, of which a lane takes 16 bytes of every fourth.
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

  // Copy the chunk at `token` of the segment; rows behind its end become zero.
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

  // Copy back what lies before the segment's end.
  __device__ __forceinline__ void store(u32 from, int token, int channel) const {
    unsigned short* to = at + token * stride + channel;
    uint4 x[4];  // loaded first: four latencies in one
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

// true in one lane of a warp; the compiler knows that it is one, and copies need no loop over lanes
__device__ __forceinline__ bool elect_lane() {
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected != 0;
}

// When groups of copies have arrived: a barrier for each stage, on which every warp arrives that
// copies a part.
template <int STAGES>
struct Arrivals {
  u32 barriers;

  // one thread of the block, before a barrier of the block
  __device__ __forceinline__ void init(int warps) const {
    for (int i = 0; i < STAGES; ++i) init_barrier(barriers + 8 * i, warps);
    publish_barriers();
  }

  // before this warp's copies of a group, of so many bytes
  __device__ __forceinline__ void open(int stage, u32 bytes) const {
    if (elect_lane()) arrive_expecting(barriers + 8 * stage, bytes);
  }
  __device__ __forceinline__ void close() const {}

  // until all warps' copies of the group have arrived; `parity` is that of its round
  template <int NEWER>
  __device__ __forceinline__ void wait(int stage, u32 parity) const {
    wait_barrier(barriers + 8 * stage, parity);
  }
};

// A segment's chunks or tiles of one head, whichever `map` has. Copies run over the segment's end,
// where the next sequence may begin.
struct Copies {
  static constexpr bool RUN_OVER = true;
  const TensorMap& map;
  int head, row, begin;

  __device__ __forceinline__ Copies(const TensorMap& map, const Segment& segment, int head)
      : map(map), head(head), row((int)segment.row), begin((int)segment.begin) {}

  template <int STAGES>
  __device__ __forceinline__ void load(u32 to, int token, int channel,
                                       const Arrivals<STAGES>& arrivals, int stage) const {
    if (elect_lane())
      asm volatile(
          "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
          " [%0], [%1, {%2, %3, %4, %5}], [%6];"
          :
          : "r"(to), "l"(&map), "r"(channel), "r"(head), "r"(begin + token), "r"(row),
            "r"(arrivals.barriers + 8 * stage)
          : "memory");
  }

  // Stores run behind this; finish_stores waits until they have read shared memory.
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

  // whether a warp takes part in the copies, and calls the functions above
  static __device__ __forceinline__ bool copied_by(int warp) { return warp == 0; }
};

#else

template <int STAGES>
struct Arrivals {
  u32 barriers;

  __device__ __forceinline__ void init(int) const {}
  __device__ __forceinline__ void open(int, u32) const {}
  __device__ __forceinline__ void close() const { commit_loads(); }

  // until this thread's copies of a group have arrived; NEWER groups were closed behind it
  template <int NEWER>
  __device__ __forceinline__ void wait(int, u32) const {
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
  __device__ __forceinline__ void load(u32 to, int token, int channel, const Arrivals<STAGES>&,
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
  __device__ __forceinline__ void load(u32 to, int token, int channel, const Arrivals<STAGES>&,
                                       int) const {
    rows.load(to + warp * CHUNK_BYTES, token + warp * CHUNK, channel);
  }
  __device__ __forceinline__ void store(u32 from, int token, int channel) const {
    rows.store(from + warp * CHUNK_BYTES, token + warp * CHUNK, channel);
  }
  __device__ __forceinline__ void finish_stores() const {}
};

__device__ __forceinline__ void publish_shared() {}  // only bulk copies and wgmma need it

#endif

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
