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

// One thread's share of a tensor's rows: every 4 * WARPS-th row, 16 bytes of it.
template <int WARPS>
struct Rows {
  static constexpr int STEP = 4 * WARPS;
  const unsigned short* from;  // of the segment's first row that is this thread's
  i64 stride;

  __device__ __forceinline__ Rows(const void* x, const i64 (&strides)[3], const Segment& segment,
                                  int head)
      : from((const unsigned short*)x + segment.row * strides[0] + head * strides[2] +
             (segment.begin + (threadIdx.x >> 3)) * strides[1] + (threadIdx.x & 7) * 8),
        stride(strides[1]) {}

  // this thread's place in a tile, in bytes; the same in every STEP-th row
  static __device__ __forceinline__ u32 place() {
    const u32 row = threadIdx.x >> 3;
    return row * ROW_BYTES + (((threadIdx.x ^ row) & 7) << 4);
  }

  // Copy rows first .. first + 16 * WARPS - 1 into a tile; rows from `tokens` on become zero.
  __device__ __forceinline__ void load(const uint4* tile, int first, int tokens) const {
    const u32 to = shared_address(tile) + place();
    const unsigned short* at = from + first * stride;
    const int left = tokens - first - (int)(threadIdx.x >> 3);
#pragma unroll
    for (int i = 0; i < 4; ++i)  // with size 0 nothing is read from the address
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                   :
                   : "r"(to + i * STEP * ROW_BYTES), "l"(at + i * STEP * stride),
                     "r"(i * STEP < left ? 16 : 0)
                   : "memory");
  }

  // Copy a tile to rows first .. first + 16 * WARPS - 1, of which there are up to `tokens`.
  __device__ __forceinline__ void store(const uint4* tile, int first, int tokens) const {
    unsigned short* at = (unsigned short*)from + first * stride;
    const uint4* own = tile + place() / 16;
    const int left = tokens - first - (int)(threadIdx.x >> 3);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i * STEP < left) *(uint4*)(at + i * STEP * stride) = own[i * STEP * 8];
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
