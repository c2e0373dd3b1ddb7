// Products of 64 tokens a warpgroup, in registers as A operands, with weights that stream past
// (weight_stream.cuh), on Hopper.

#pragma once

#include "weight_stream.cuh"

#if QUASAR_WGMMA
namespace quasar::layer {

// ---- products: d [64, 8 * TILES] = a [64, 64 * IMAGES] (images)^T ----

#define QUASAR_OUT_4(OUT, m)                                                               \
  OUT(d[m][0]), OUT(d[m][1]), OUT(d[m][2]), OUT(d[m][3]), OUT(d[m + 1][0]), OUT(d[m + 1][1]), \
      OUT(d[m + 1][2]), OUT(d[m + 1][3]), OUT(d[m + 2][0]), OUT(d[m + 2][1]),              \
      OUT(d[m + 2][2]), OUT(d[m + 2][3]), OUT(d[m + 3][0]), OUT(d[m + 3][1]),              \
      OUT(d[m + 3][2]), OUT(d[m + 3][3])

// A and B are given as OPERANDS; MAJOR is how they lie in shared memory
#define QUASAR_WGMMA_128(TYPE, OUT, OPERANDS, KEEP, MAJOR, ...)                                  \
  asm volatile(                                                                                  \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                               \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
      "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,"     \
      "%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"            \
      " " OPERANDS ", " KEEP ", 1, 1, " MAJOR ";"                                                \
      : QUASAR_OUT_4(OUT, 0), QUASAR_OUT_4(OUT, 4), QUASAR_OUT_4(OUT, 8), QUASAR_OUT_4(OUT, 12)  \
      : __VA_ARGS__)

#define QUASAR_WGMMA_64(TYPE, OUT, OPERANDS, KEEP, MAJOR, ...)                                   \
  asm volatile(                                                                                  \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
      "%24,%25,%26,%27,%28,%29,%30,%31}, " OPERANDS ", " KEEP ", 1, 1, " MAJOR ";"               \
      : QUASAR_OUT_4(OUT, 0), QUASAR_OUT_4(OUT, 4)                                               \
      : __VA_ARGS__)

#define QUASAR_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
#define QUASAR_WIDE(TYPE, OUT, KEEP) \
  QUASAR_WGMMA_128(TYPE, OUT, "{%64,%65,%66,%67}, %68", KEEP, "0", QUASAR_REGISTERS)
#define QUASAR_NARROW(TYPE, OUT, KEEP) \
  QUASAR_WGMMA_64(TYPE, OUT, "{%32,%33,%34,%35}, %36", KEEP, "0", QUASAR_REGISTERS)

// 16 inputs; with FIRST, d's old values do not count
template <Scalar T, bool FIRST>
__device__ __forceinline__ void multiply(float (&d)[16][4], const u32 (&a)[4], u64 b) {
  if constexpr (FIRST) {
    if constexpr (T == Scalar::bf16)
      QUASAR_WIDE("bf16", "=&f", "0");
    else
      QUASAR_WIDE("f16", "=&f", "0");
  } else {
    if constexpr (T == Scalar::bf16)
      QUASAR_WIDE("bf16", "+f", "1");
    else
      QUASAR_WIDE("f16", "+f", "1");
  }
}

template <Scalar T, bool FIRST>
__device__ __forceinline__ void multiply(float (&d)[8][4], const u32 (&a)[4], u64 b) {
  if constexpr (FIRST) {
    if constexpr (T == Scalar::bf16)
      QUASAR_NARROW("bf16", "=&f", "0");
    else
      QUASAR_NARROW("f16", "=&f", "0");
  } else {
    if constexpr (T == Scalar::bf16)
      QUASAR_NARROW("bf16", "+f", "1");
    else
      QUASAR_NARROW("f16", "+f", "1");
  }
}

// a [64, 16] in shared memory, in 16 columns of a tile; d's old values count but with FIRST
template <Scalar T>
__device__ __forceinline__ void multiply_tile(float (&d)[16][4], u64 a, u64 b) {
  if constexpr (T == Scalar::bf16)
    QUASAR_WGMMA_128("bf16", "+f", "%64, %65", "1", "0, 0", "l"(a), "l"(b));
  else
    QUASAR_WGMMA_128("f16", "+f", "%64, %65", "1", "0, 0", "l"(a), "l"(b));
}

#define QUASAR_NARROW_TILE(TYPE, OUT, KEEP) \
  QUASAR_WGMMA_64(TYPE, OUT, "%32, %33", KEEP, "0, 0", "l"(a), "l"(b))

template <Scalar T, bool FIRST = false>
__device__ __forceinline__ void multiply_tile(float (&d)[8][4], u64 a, u64 b) {
  if constexpr (FIRST) {
    if constexpr (T == Scalar::bf16)
      QUASAR_NARROW_TILE("bf16", "=&f", "0");
    else
      QUASAR_NARROW_TILE("f16", "=&f", "0");
  } else {
    if constexpr (T == Scalar::bf16)
      QUASAR_NARROW_TILE("bf16", "+f", "1");
    else
      QUASAR_NARROW_TILE("f16", "+f", "1");
  }
}

#undef QUASAR_OUT_4
#undef QUASAR_WGMMA_128
#undef QUASAR_WGMMA_64
#undef QUASAR_REGISTERS
#undef QUASAR_WIDE
#undef QUASAR_NARROW
#undef QUASAR_NARROW_TILE

// Multiply by the stream's next images, one for each 64 inputs (4 operands) of a; TILES is 16 for
// images of 128 rows and 8 for images of 64. An image is released while the next is multiplied.
// A ring of as many stages as images is always at stage 0 here. Where a lacks the last 64 inputs,
// `last` is the descriptor of the tile that holds them.
template <Scalar T, int TILES, int OPERANDS, int STAGES, class... Last>
__device__ __forceinline__ void product(float (&d)[TILES][4], const u32 (&a)[OPERANDS][4],
                                        Stream<STAGES>& weights, Last... last) {
  constexpr int INPUTS = OPERANDS + 4 * sizeof...(Last);
  if (4 * STAGES == INPUTS) weights.held = weights.place.stage = 0;  // makes stages constants
#pragma unroll
  for (int t = 0; t < INPUTS; t += 4) {
    const u64 b = weights.next();
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (t + i == 0)
        multiply<T, true>(d, a[0], b);
      else if (t < OPERANDS)
        multiply<T, false>(d, a[t < OPERANDS ? t + i : 0], at_columns(b, i));
      else
        (multiply_tile<T>(d, at_columns(last, i), at_columns(b, i)), ...);
    }
    warpgroup_commit();
    if (t) {
      warpgroup_wait<1>();
      weights.release();
    }
  }
  warpgroup_wait<0>();
  weights.release();
  settle(d);
}

// ---- results ----

__device__ __forceinline__ float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// to 16 bits; what is out of range becomes the largest number, NaN stays
template <Scalar T>
__device__ __forceinline__ u32 pack_finite(float low, float high) {
  u32 out;
  if (T == Scalar::bf16) {
    asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  }
  return out;
}

// Write an accumulator [64, 8 * TILES], by pack_finite, to shared memory, in rows of `pitch` bytes.
// The pitch is an odd number of 16-byte pieces, so that rows lie in different banks.
template <Scalar T, int TILES>
__device__ __forceinline__ void store_tiles(u32 to, u32 pitch, const float (&d)[TILES][4]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const u32 at = to + (16 * warp + (lane & 15)) * pitch + (lane >> 4) * 16;
#pragma unroll
  for (int m = 0; m < TILES; m += 2)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 :
                 : "r"(at + 16 * m), "r"(pack_finite<T>(d[m][0], d[m][1])),
                   "r"(pack_finite<T>(d[m][2], d[m][3])),
                   "r"(pack_finite<T>(d[m + 1][0], d[m + 1][1])),
                   "r"(pack_finite<T>(d[m + 1][2], d[m + 1][3]))
                 : "memory");
}

}  // namespace quasar::layer
#endif
