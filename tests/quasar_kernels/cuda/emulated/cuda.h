// CUDA C++ on a CPU: qualifiers, types, and functions of one thread. This folder's headers include no
// C++ headers, which take longer to compile than a kernel.

#pragma once

#include <float.h>
#include <string.h>

extern "C" float expf(float), exp2f(float), sqrtf(float), tanhf(float), fabsf(float), fminf(float, float),
    fmaxf(float, float);

#define __CUDA_ARCH__ 800
#define QUASAR_WGMMA 0
#define __device__
#define __forceinline__ inline
#define __global__
#define __constant__
#define __shared__
#define __launch_bounds__(...)
#define __align__(n)

typedef unsigned int u32;
typedef unsigned short u16;

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

template <class To, class From>
To bits_as(From x) {
  To out;
  static_assert(sizeof out == sizeof x, "as many bits");
  memcpy(&out, &x, sizeof out);
  return out;
}

inline u32 __float_as_uint(float x) { return bits_as<u32>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline float __uint_as_float(u32 x) { return bits_as<float>(x); }
inline u32 max(u32 x, u32 y) { return x > y ? x : y; }
inline u32 min(u32 x, u32 y) { return x < y ? x : y; }
inline int min(int x, int y) { return x < y ? x : y; }
extern "C" float log1pf(float);
inline float __expf(float x) { return expf(x); }

inline u32 __byte_perm(u32 low, u32 high, u32 which) {
  const unsigned long long both = low | (unsigned long long)high << 32;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) out |= (u32)(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}
