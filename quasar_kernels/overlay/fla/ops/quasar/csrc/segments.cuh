// What a block of the segmented scan is given: its arguments, its run of tokens, its rows in
// memory.

#pragma once

#include "fragments.cuh"

namespace quasar {

// Arguments of every kernel of the scan; mirrored by cuda_scan.py. Strides count elements.
struct Arguments {
  const void *q, *k, *v;
  void* o;
  const float *beta, *initial_state;  // initial_state may be null
  float *final_state, *maps, *states; // any may be null where a launch does not use it
  const i64 *table, *first;           // packed sequences; else null
  i64 T, length, q_stride[3], k_stride[3], v_stride[3], o_stride[3];  // batch, token, head
  int per_sequence, heads;
  float scale;
};

// The run of tokens that one block walks.
struct Segment {
  i64 row, sequence, begin;
  int tokens;
  bool is_first, is_last;
};

__device__ __forceinline__ Segment find_segment(const Arguments& arg, int index) {
  if (arg.table) {
    const i64* entry = arg.table + 4 * (i64)index;
    const int place = (int)entry[3];
    return {0, entry[0], entry[1], (int)entry[2], (place & 1) != 0, (place & 2) != 0};
  }
  const i64 sequence = index / arg.per_sequence;
  const int place = index % arg.per_sequence;
  const i64 begin = place * arg.length, rest = arg.T - begin;
  return {sequence, sequence, begin, (int)(rest < arg.length ? rest : arg.length), place == 0,
          place == arg.per_sequence - 1};
}

// One thread's share of a tensor's rows, a tile of WARPS chunks at a time: every 4 * WARPS-th row,
// 16 bytes of each of its panels. In shared memory a chunk's panel takes every GAP-th place.
template <int WARPS, int GAP = 1>
struct Rows {
  static constexpr int STEP = 4 * WARPS;
  const unsigned short* at;  // this thread's first row of the tile
  i64 step;                  // to its next one

  __device__ __forceinline__ Rows(const void* x, const i64 (&strides)[3], const Segment& segment,
                                  int head, int panel = 0)
      : at((const unsigned short*)x + segment.row * strides[0] + head * strides[2] +
           (segment.begin + (threadIdx.x >> 3)) * strides[1] + (threadIdx.x & 7) * 8 +
           panel * PANEL),
        step(STEP * strides[1]) {}

  __device__ __forceinline__ void advance() { at += 4 * step; }

  // this thread's place in a tile, in bytes; the same in every STEP-th row
  static __device__ __forceinline__ u32 place() {
    const u32 row = threadIdx.x >> 3;
    return row * ROW_BYTES + (((threadIdx.x ^ row) & 7) << 4);
  }

  // from there to its i-th row's
  static __device__ __forceinline__ constexpr int offset(int i) {
    return i * STEP / CHUNK * (GAP - 1) * CHUNK_BYTES + i * STEP * ROW_BYTES;
  }

  // Copy a panel of the tile to shared memory, to its place() there. Of this thread's rows those
  // before `left`, counted in rows of the tensor, are copied; the others become zero.
  __device__ __forceinline__ void load(u32 to, int left, int panel = 0) const {
    const unsigned short* from = at + panel * PANEL;
#pragma unroll
    for (int i = 0; i < 4; ++i)  // with size 0 nothing is read from the address
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                   :
                   : "r"(to + offset(i)), "l"(from + i * step), "r"(i * STEP < left ? 16 : 0)
                   : "memory");
  }

  // Copy a tile in shared memory, from its place() on, to these rows.
  __device__ __forceinline__ void store(u32 from, int left) const {
    uint4 x[4];  // loaded first: four latencies in one
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(x[i].x), "=r"(x[i].y), "=r"(x[i].z), "=r"(x[i].w)
                   : "r"(from + offset(i))
                   : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i * STEP < left) *(uint4*)(at + i * step) = x[i];
  }
};

__device__ __forceinline__ void commit_loads() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wait_loads() {
  asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}

}  // namespace quasar
