// What CUDA C++ takes from a GPU, on a CPU: the threads of a block are fibers, which meet wherever
// a warp or the block does something together. Copies to shared memory arrive at once, so one that
// comes too early overwrites what others still read. No product is rounded but at its end.

#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#define __CUDA_ARCH__ 800
#define QUASAR_WGMMA 0
#define __device__
#define __forceinline__ inline
#define __global__
#define __constant__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n)
#define __cvta_generic_to_shared(p) ((const char*)(p) - (const char*)quasar::raw)

typedef unsigned int u32;
typedef unsigned short u16;

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

namespace quasar {
alignas(1024) uint4 raw[1 << 14];  // shared memory of the block
}

template <class To, class From>
To bits_as(From x) {
  To out;
  static_assert(sizeof out == sizeof x, "as many bits");
  memcpy(&out, &x, sizeof out);
  return out;
}

inline u32 __float_as_uint(float x) { return bits_as<u32>(x); }
inline float __uint_as_float(u32 x) { return bits_as<float>(x); }
inline u32 max(u32 x, u32 y) { return x > y ? x : y; }
inline int min(int x, int y) { return x < y ? x : y; }

inline u32 __byte_perm(u32 low, u32 high, u32 which) {
  const unsigned long long both = low | (unsigned long long)high << 32;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) out |= (u32)(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}

// ---- threads ----

static struct { int x, y; } threadIdx, blockIdx, gridDim;
static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static int running;

inline void yield() {
  const int self = running;
  swapcontext(&fibers[self], &scheduler);
  threadIdx.x = running = self;
}

// Threads that wait for one another, each with something that it brings along.
struct Meeting {
  int arrived = 0;
  long round = 0;
  void* brought[256];

  // the last one of `size` threads calls act(things that they brought), for all of them
  template <class Thing, class Act>
  void join(int size, int place, Thing& thing, const Act& act) {
    brought[place] = &thing;
    const long own = round;
    if (++arrived < size) {
      while (round == own) yield();
      return;
    }
    arrived = 0;
    act((Thing**)brought);
    ++round;
  }
};

static Meeting warps[8], block;

template <class Thing, class Act>
void with_warp(Thing& thing, const Act& act) {
  warps[running / 32].join(32, running % 32, thing, act);
}

inline int __syncthreads_and(int x) {
  block.join((int)fibers.size(), running, x, [](int** all) {
    int both = 1;
    for (size_t i = 0; i < fibers.size(); ++i) both &= *all[i];
    for (size_t i = 0; i < fibers.size(); ++i) *all[i] = both;
  });
  return x;
}
inline void __syncthreads() { __syncthreads_and(0); }
inline void __syncwarp() {
  int nothing;
  with_warp(nothing, [](int**) {});
}

template <class X>
X __shfl_sync(u32, X x, int from) {
  struct Thing { X x, out; int from; } thing{x, x, from};
  with_warp(thing, [](Thing** all) {
    for (int i = 0; i < 32; ++i) all[i]->out = all[all[i]->from & 31]->x;
  });
  return thing.out;
}
template <class X>
X __shfl_up_sync(u32 lanes, X x, int step) {
  return __shfl_sync(lanes, x, running % 32 < step ? running : running - step);
}

template <class X>
X __shfl_xor_sync(u32 lanes, X x, int other) {
  return __shfl_sync(lanes, x, running ^ other);
}
inline u32 __reduce_max_sync(u32, u32 x) {
  with_warp(x, [](u32** all) {
    u32 most = 0;
    for (int i = 0; i < 32; ++i) most = max(most, *all[i]);
    for (int i = 0; i < 32; ++i) *all[i] = most;
  });
  return x;
}

// Run `kernel` in each thread of one block.
inline void run_block(int threads, const std::function<void()>& kernel) {
  static std::function<void()> body;
  static std::vector<bool> over;
  static std::vector<std::vector<char>> stacks;
  body = kernel;
  over.assign(threads, false);
  stacks.resize(threads, std::vector<char>(1 << 17));
  fibers.assign(threads, {});
  memset(quasar::raw, 0xff, sizeof quasar::raw);  // NaN
  for (int i = 0; i < threads; ++i) {
    getcontext(&fibers[i]);
    fibers[i].uc_stack.ss_sp = stacks[i].data();
    fibers[i].uc_stack.ss_size = stacks[i].size();
    makecontext(&fibers[i], (void (*)()) + [] {
      body();
      over[running] = true;
      swapcontext(&fibers[running], &scheduler);
    }, 0);
  }
  for (int left = threads; left > 0;) {
    left = 0;
    for (int i = 0; i < threads; ++i) {
      if (over[i]) continue;
      threadIdx.x = running = i;
      swapcontext(&scheduler, &fibers[i]);
      left += !over[i];
    }
  }
}

// ---- 16-bit numbers, two of them in a register ----

inline u16 rounded(bool bf16, float x) {
  if (!bf16) return bits_as<u16>((_Float16)x);
  const u32 bits = bits_as<u32>(x);
  return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float widened(bool bf16, u16 x) {
  return bf16 ? bits_as<float>((u32)x << 16) : (float)bits_as<_Float16>(x);
}
inline u32 packed(bool bf16, float low, float high) {
  return rounded(bf16, low) | (u32)rounded(bf16, high) << 16;
}
inline void unpacked(bool bf16, u32 x, float& low, float& high) {
  low = widened(bf16, (u16)x), high = widened(bf16, x >> 16);
}
inline u32 multiplied(bool bf16, u32 a, u32 b) {
  float x, y, z, w;
  unpacked(bf16, a, x, y), unpacked(bf16, b, z, w);
  return packed(bf16, x * z, y * w);
}
inline float saturated(float x) { return x > 65504.f ? 65504.f : x < -65504.f ? -65504.f : x; }

// ---- products: PTX ISA, "Matrix Fragments"; g = lane / 4, c = lane % 4 ----

struct Product {
  float* d;
  float a[4][2], b[2][2];
};

// d [16, 8] += a b: element `a` of a lane's registers is at (row, column) as `place` says
template <int DEPTH, class PlaceA, class PlaceB>
void product(Product& own, const PlaceA& place_a, const PlaceB& place_b) {
  with_warp(own, [&](Product** all) {
    float a[16][DEPTH] = {}, b[DEPTH][8] = {};
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, c = lane % 4;
      for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e) place_a(a, g, c, i, e, all[lane]->a[i][e]);
      for (int i = 0; i < 2; ++i)
        for (int e = 0; e < 2; ++e) place_b(b, g, c, i, e, all[lane]->b[i][e]);
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int e = 0; e < 4; ++e) {
        double sum = all[lane]->d[e];
        for (int k = 0; k < DEPTH; ++k)
          sum += (double)a[lane / 4 + 8 * (e / 2)][k] * b[k][2 * (lane % 4) + e % 2];
        all[lane]->d[e] = (float)sum;
      }
  });
}

// m16n8k16, or with zeros in a2, a3 and b1 m16n8k8
inline void product16(bool bf16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Product own{d, {}, {}};
  for (int i = 0; i < 4; ++i) unpacked(bf16, a[i], own.a[i][0], own.a[i][1]);
  unpacked(bf16, b0, own.b[0][0], own.b[0][1]), unpacked(bf16, b1, own.b[1][0], own.b[1][1]);
  product<16>(
      own,
      [](auto& m, int g, int c, int i, int e, float x) {
        m[g + 8 * (i % 2)][2 * c + e + 8 * (i / 2)] = x;
      },
      [](auto& m, int g, int c, int i, int e, float x) { m[2 * c + e + 8 * i][g] = x; });
}

// m16n8k8 of tf32, to which the hardware truncates; a in the order of an accumulator tile
inline void product_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  auto cut = [](float x) { return bits_as<float>(bits_as<u32>(x) & 0xffffe000u); };
  Product own{d, {{cut(a[0])}, {cut(a[2])}, {cut(a[1])}, {cut(a[3])}}, {{cut(b0)}, {cut(b1)}}};
  product<8>(
      own,
      [](auto& m, int g, int c, int i, int e, float x) {
        if (e == 0) m[g + 8 * (i % 2)][c + 4 * (i / 2)] = x;
      },
      [](auto& m, int g, int c, int i, int e, float x) {
        if (e == 0) m[c + 4 * i][g] = x;
      });
}

// ---- shared memory, by its addresses ----

inline char* shared_at(u32 address) { return (char*)quasar::raw + address; }

// ldmatrix: four 8 x 8 matrices, whose rows' addresses 32 lanes give
inline void load_matrices(u32 (&out)[4], u32 address, bool transposed) {
  struct Thing { u32* out; u32 address; } own{out, address};
  with_warp(own, [=](Thing** all) {
    u16 m[4][8][8];
    for (int lane = 0; lane < 32; ++lane)
      memcpy(m[lane / 8][lane % 8], shared_at(all[lane]->address), 16);
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int g = lane / 4, c = lane % 4;
        const u16 low = transposed ? m[i][2 * c][g] : m[i][g][2 * c];
        const u16 high = transposed ? m[i][2 * c + 1][g] : m[i][g][2 * c + 1];
        all[lane]->out[i] = low | (u32)high << 16;
      }
  });
}
inline void store_word(u32 address, u32 x) { memcpy(shared_at(address), &x, 4); }
inline void copy_piece(u32 to, const void* from, bool inside) {
  if (inside) memcpy(shared_at(to), from, 16);
  else memset(shared_at(to), 0, 16);
}
