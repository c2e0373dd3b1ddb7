// PTX instructions of shared memory on a CPU, and the launch of a kernel.
//
// Copies from device memory (cp.async) arrive immediately, so that a copy that starts too early
// overwrites data that are still needed. If `late`, they arrive when their thread waits for their
// group, so that a missing wait shows.

#pragma once

#include "threads.h"

namespace quasar {
alignas(1024) static uint4 raw[1 << 14];  // shared memory of the block
}

#define __cvta_generic_to_shared(p) ((const char*)(p) - (const char*)quasar::raw)

static u32 shared_bytes;  // of the launch
static bool late;

inline char* shared_at(u32 address, u32 bytes) {
  if (address <= shared_bytes && bytes <= shared_bytes - address && address % bytes == 0)
    return (char*)quasar::raw + address;
  problem = "an address lies outside of the block's shared memory, or is not aligned";
  return (char*)quasar::raw;
}

// ---- loads and stores ----

inline void store_word(u32 to, u32 x) { memcpy(shared_at(to, 4), &x, 4); }
inline void store_four(u32 to, u32 x) {
  const u32 four[4] = {x, x, x, x};
  memcpy(shared_at(to, 16), four, 16);
}
inline void load_four(u32& x, u32& y, u32& z, u32& w, u32 from) {
  const u32* at = (const u32*)shared_at(from, 16);
  x = at[0], y = at[1], z = at[2], w = at[3];
}
inline void load_two(float& x, float& y, u32 from) {
  const float* at = (const float*)shared_at(from, 8);
  x = at[0], y = at[1];
}

template <class X>
void load_device(X& x, X& y, X& z, X& w, const void* from) {
  const X* at = (const X*)from;
  x = at[0], y = at[1], z = at[2], w = at[3];
}
inline void prefetch(const void*) {}

// ldmatrix: four 8 x 8 matrices; each of the 32 lanes has the address of a row
template <bool TRANSPOSED>
void load_matrices(u32& x, u32& y, u32& z, u32& w, u32 address) {
  struct Thing { u32* out[4]; u32 address; } own{{&x, &y, &z, &w}, address};
  with_warp(own, [](Thing** all) {
    u16 m[4][8][8];
    for (int lane = 0; lane < 32; ++lane)
      memcpy(m[lane / 8][lane % 8], shared_at(all[lane]->address, 16), 16);
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int g = lane / 4, c = lane % 4;
        const u16 low = TRANSPOSED ? m[i][2 * c][g] : m[i][g][2 * c];
        const u16 high = TRANSPOSED ? m[i][2 * c + 1][g] : m[i][g][2 * c + 1];
        *all[lane]->out[i] = low | (u32)high << 16;
      }
  });
}

// movmatrix: an 8 x 8 matrix in registers
inline void transpose_matrix(u32& out, u32 x) {
  struct Thing { u32* out; u32 x; } own{&out, x};
  with_warp(own, [](Thing** all) {
    u16 m[8][8];
    for (int lane = 0; lane < 32; ++lane)
      for (int e = 0; e < 2; ++e) m[lane / 4][2 * (lane % 4) + e] = all[lane]->x >> 16 * e;
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, c = lane % 4;
      *all[lane]->out = m[2 * c][g] | (u32)m[2 * c + 1][g] << 16;
    }
  });
}

// ---- copies ----

struct Copy {
  u32 to;
  const void* from;
  int bytes, group;  // bytes: 16, or 0 to write zeros

  void arrive() const {
    char* at = shared_at(to, 16);
    if (bytes) memcpy(at, from, 16);
    else memset(at, 0, 16);
  }
};

// A thread's pending copies, in the order of their groups.
struct Queue {
  static constexpr int MOST = 512;
  Copy copies[MOST];
  int begin, end, groups;  // groups: the number of committed ones
};
static Queue queues[MOST_THREADS];

inline void copy_piece(u32 to, const void* from, int bytes = 16) {
  Queue& queue = queues[running];
  const Copy copy{to, from, bytes, queue.groups};
  if (!late) copy.arrive();
  else if (queue.end - queue.begin == Queue::MOST) problem = "too many copies are pending";
  else queue.copies[queue.end++ % Queue::MOST] = copy;
}
inline void close_group() { ++queues[running].groups; }
inline void wait_groups(int pending) {
  Queue& queue = queues[running];
  for (; queue.begin < queue.end; ++queue.begin) {
    const Copy& copy = queue.copies[queue.begin % Queue::MOST];
    if (copy.group >= queue.groups - pending) return;
    copy.arrive();
  }
}

// ---- launches ----

// Runs a kernel's blocks one after the other. Returns null or an error message. `addresses` are those
// of the kernel's `count` parameters, one or two.
extern "C" const char* launch_on_cpu(void (*launched)(const void*, const void*),
                                     const void* const* addresses, int count, int x, int y,
                                     int size, int shared, bool as_late) {
  kernel = launched, parameters[0] = addresses[0];
  parameters[1] = count > 1 ? addresses[1] : nullptr;
  gridDim = {x, y}, threads = size, shared_bytes = shared, late = as_late, problem = nullptr;
  for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x)
    for (blockIdx.y = 0; blockIdx.y < y && !problem; ++blockIdx.y) {
      memset(quasar::raw, 0xff, sizeof quasar::raw);  // NaN
      for (Queue& queue : queues) queue.begin = queue.end = queue.groups = 0;
      run_block(late);
    }
  return problem;
}
