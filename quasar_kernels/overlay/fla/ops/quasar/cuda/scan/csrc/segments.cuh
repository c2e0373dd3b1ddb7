// What a block of the segmented scan is given: its arguments and its run of tokens.

#pragma once

#include "../../csrc/fragments.cuh"

// Where step sizes come from. QUASAR_READ_STEP: `beta` holds them, [batch, T, heads]; else they
// follow from |k|^2 and `beta`, one a head. QUASAR_DECAY: `decay` holds log decays likewise, by which
// the state shrinks before a token.
#ifndef QUASAR_DECAY
#define QUASAR_DECAY 0
#endif
#ifndef QUASAR_READ_STEP
#define QUASAR_READ_STEP QUASAR_DECAY
#endif

namespace quasar::scan {

// Arguments of every kernel of the scan; mirrored by forward.py. Strides count elements.
struct Arguments {
  const void *q, *k, *v;
  void* o;
  const float *beta, *initial_state;   // initial_state may be null
  float *final_state, *maps, *states;  // any may be null where a launch does not use it
  const i64 *table, *first;            // packed sequences; else null
  int *stops, *unfinished;             // see is_idle; null: pass 1 never stops
  i64 T, length, q_stride[3], k_stride[3], v_stride[3], o_stride[3];  // batch, token, head
  int per_sequence, heads, repeat;
  float scale;
  // where step sizes are read
  const float* decay;
  int group;  // heads that share one of q and k
};

// The head of q and k that a head reads; step sizes of the kernels' own are of one head of each.
template <class Given>
__device__ __forceinline__ int key_head(const Given& arg, int head) {
  return QUASAR_READ_STEP ? head / arg.group : head;
}

// Pass 1 may stop within a segment where its map has decayed to next to nothing, and leave out what
// lies before; in `stops` each of its blocks notes how many tokens that are. Pass 2 comes by the
// state there, and sets `unfinished` [sequences * heads] where it was too large to leave out. The
// three kernels are launched a second time with `repeat`, for those heads alone and without stops.
__device__ __forceinline__ bool is_idle(const Arguments& arg, i64 chain) {
  return arg.repeat && !arg.unfinished[chain];
}

// A map is next to nothing if the magnitudes in each of its rows sum to less than NOTHING. The
// state that it takes may then be TIMES as large as the one behind the segment, and what that lacks
// is no more than a rounding to 16 bits. With decays it may be larger by as much as these alone make
// the map smaller: what a strong decay leaves of a token says nothing of those before it, and a small
// step after a large one would be taken for something left out.
template <Scalar T>
constexpr float NOTHING = T == Scalar::bf16 ? 0x1p-11f : 0x1p-14f;
constexpr float TIMES = 4.f;
// Magnitudes in a row of a map without its decay sum to no more: S entries whose squares sum to 1.
constexpr float MOST_OF_ROW = 16.f;

// The run of tokens that one block walks.
struct Segment {
  i64 row, sequence, begin;
  int tokens;
  bool is_first, is_last;
};

// of the forward pass's arguments or the backward pass's
template <class Given>
__device__ __forceinline__ Segment find_segment(const Given& arg, int index) {
  if (arg.table) {
    const i64* entry = arg.table + 4 * (i64)index;
    const int place = (int)entry[3];
    return {0, entry[0], entry[1], (int)entry[2], (place & 1) != 0, (place & 2) != 0};
  }
  const i64 sequence = index / arg.per_sequence;
  const int place = index % arg.per_sequence;
  const i64 begin = place * arg.length, rest = arg.T - begin;
  return {sequence,   sequence,
          begin,      (int)(rest < arg.length ? rest : arg.length),
          place == 0, place == arg.per_sequence - 1};
}

// where a token of a segment has its entry in [batch, T, heads]
template <class Given>
__device__ __forceinline__ i64 entry_of(const Given& arg, const Segment& segment, int head,
                                        int token) {
  return (segment.row * arg.T + segment.begin + token) * arg.heads + head;
}

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
