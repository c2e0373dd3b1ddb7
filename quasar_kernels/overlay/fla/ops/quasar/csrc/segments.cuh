// What a block of the segmented scan is given: its arguments and its run of tokens.

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

}  // namespace quasar
