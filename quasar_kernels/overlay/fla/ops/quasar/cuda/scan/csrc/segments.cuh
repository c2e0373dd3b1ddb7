// The segmented scan's kernel arguments, the run of tokens of one block, and the early-stop rule.

#pragma once

#include "../../csrc/fragments.cuh"

// Compile-time switches. QUASAR_READ_STEP: step sizes are read from `beta` [batch, T, heads];
// otherwise they are computed from |k|^2 and `beta` [heads]. QUASAR_DECAY: before each token the
// state is scaled by e^decay, with `decay` [batch, T, heads].
#ifndef QUASAR_DECAY
#define QUASAR_DECAY 0
#endif
#ifndef QUASAR_READ_STEP
#define QUASAR_READ_STEP QUASAR_DECAY
#endif

namespace quasar::scan {

constexpr bool DECAY = QUASAR_DECAY, READ_STEP = QUASAR_READ_STEP;

// The type A if USE_A, otherwise B; it selects the policies of other files.
template <bool USE_A, class A, class B>
struct Choose {
  typedef A type;
};
template <class A, class B>
struct Choose<false, A, B> {
  typedef B type;
};
template <bool USE_A, class A, class B>
using Select = typename Choose<USE_A, A, B>::type;

// Arguments of every kernel of the scan; mirrored by scan_forward.py. Strides count elements.
struct Arguments {
  const void *q, *k, *v;
  void* o;
  const float *beta, *initial_state;   // initial_state may be null
  float *final_state, *maps, *states;  // any may be null where a launch does not use it
  const i64 *table, *first;            // of packed sequences (cu_seqlens), otherwise null
  int *stops, *unfinished;             // see is_skipped; null: pass 1 never stops
  i64 T, length, q_stride[3], k_stride[3], v_stride[3], o_stride[3];  // batch, token, head
  int per_sequence, heads, repeat;
  float scale;
  // used only with READ_STEP
  const float* decay;
  int group;  // heads that share one of q and k
};

// The head of q and k that a head reads; grouped heads exist only where step sizes are read.
template <class Args>
__device__ __forceinline__ int key_head(const Args& arg, int head) {
  return READ_STEP ? head / arg.group : head;
}

// Pass 1 may stop within a segment once its map is negligible, and skip the tokens before that
// point; each block stores their number in `stops`. Pass 2 has the true state at that point, and
// sets `unfinished` [sequences * heads] where the state was too large to neglect. The three kernels
// are launched a second time with `repeat`, which computes only those heads, without stops.
__device__ __forceinline__ bool is_skipped(const Arguments& arg, i64 chain) {
  return arg.repeat && !arg.unfinished[chain];
}

// A map is negligible if the magnitudes in each of its rows sum to less than NEGLIGIBLE. A skipped
// state may then be STATE_RATIO times as large as the state after the segment, and the error is at
// most one rounding to 16 bits. With decays, the skipped state may be larger by the factor by which
// the decays alone shrink the map below NEGLIGIBLE. Otherwise, small values after large ones that
// the decays have removed would set `unfinished`.
template <Scalar T>
constexpr float NEGLIGIBLE = T == Scalar::bf16 ? 0x1p-11f : 0x1p-14f;
constexpr float STATE_RATIO = 4.f;
// Bound on the sum of magnitudes in a row of a map without decays: the squares of the S entries sum
// to at most 1, so the magnitudes sum to at most sqrt(S).
constexpr float MAP_ROW_BOUND = 16.f;

// The run of tokens that one block processes.
struct Segment {
  i64 row, sequence, begin;
  int tokens;
  bool is_first, is_last;
};

// the index-th segment, from the arguments of either pass
template <class Args>
__device__ __forceinline__ Segment find_segment(const Args& arg, int index) {
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

// the index of a segment's token in [batch, T, heads]
template <class Args>
__device__ __forceinline__ i64 entry_of(const Args& arg, const Segment& segment, int head,
                                        int token) {
  return (segment.row * arg.T + segment.begin + token) * arg.heads + head;
}

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
