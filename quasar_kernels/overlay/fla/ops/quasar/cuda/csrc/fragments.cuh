// Tensor-core fragments and products (mma.sync), and swizzled tiles in shared memory.
//
// Nothing in csrc includes a header of the toolkit, so that NVRTC needs none.
//
// Fragments follow mma.sync.m16n8k16 (PTX ISA, "Matrix Fragments"). With g = lane / 4 and c = lane
// & 3, an accumulator tile [16, 8] holds (g, 2c), (g, 2c+1), (g+8, 2c), (g+8, 2c+1) in elements
// 0..3. Two neighbouring accumulator tiles, converted to 16 bits, form an A operand [16, 16]
// without any exchange between lanes. As B operands, they represent the transpose. The same holds
// for fp32 accumulators and tf32's m16n8k8 if both operands order k as 0 2 4 6 1 3 5 7.
// Chains of products therefore stay in registers and need no shared memory between two products.
//
// Tiles in shared memory have rows of 128 bytes with the 128-byte swizzle of TMA and wgmma: piece j
// (16 bytes) of row r is stored at piece j ^ (r & 7).

#pragma once

#include "entry.cuh"

namespace quasar {

typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

enum class Scalar { bf16, fp16 };

#ifndef QUASAR_HEAD
#define QUASAR_HEAD 64
#endif

constexpr int S = QUASAR_HEAD;  // channels of a head, for keys and values: 64 or 128
constexpr int PANEL = 64;       // channels of a tile; wider rows are several tiles
constexpr int PANELS = S / PANEL;
constexpr int CHUNK = 16;             // tokens of a chunk
constexpr int ROW_BYTES = 2 * PANEL;  // one token's row of a tile
constexpr int CHUNK_BYTES = CHUNK * ROW_BYTES;
constexpr u32 ALL = 0xffffffffu;

// 16 rows of a matrix, or 16 columns of it transposed, in accumulators: tile m of panel p holds
// channels from 64 p + 8 m on
typedef float Accumulators[PANELS][8][4];

// calls f(p, m, e) for each element of Accumulators
template <class F>
__device__ __forceinline__ void for_each_element(const F& f) {
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(p, m, e);
}

template <int COUNT>
__device__ __forceinline__ void clear(float (&tiles)[COUNT][4]) {
#pragma unroll
  for (int n = 0; n < COUNT; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) tiles[n][e] = 0.f;
}

// ---- arithmetic ----

// 2^x
__device__ __forceinline__ float exp2_of(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// products of two pairs of numbers
__device__ __forceinline__ u32 multiply_fp16(u32 a, u32 b) {
  asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}

__device__ __forceinline__ u32 multiply_bf16(u32 a, u32 b) {
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(a) : "r"(b), "r"(0x80008000u));  // + -0
  return a;
}

// ---- conversions ----

template <Scalar T>
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 out;
  if (T == Scalar::bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  }
  return out;
}

// Both dtypes saturate. NaN stays NaN.
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

// fp16 saturates, so that no value overflows to infinity. NaN stays NaN.
template <Scalar T>
__device__ __forceinline__ u32 pack_saturated(float low, float high) {
  return T == Scalar::fp16 ? pack_finite<T>(low, high) : pack<T>(low, high);
}

template <Scalar T>
__device__ __forceinline__ void unpack(u32 x, float& low, float& high) {
  if (T == Scalar::bf16) {
    low = __uint_as_float(x << 16);
    high = __uint_as_float(x & 0xffff0000u);
  } else {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(low), "=f"(high)
        : "r"(x));
  }
}

// two adjacent accumulator tiles as an A operand
template <Scalar T>
__device__ __forceinline__ void pack_tiles(u32 (&out)[4], const float (&left)[4],
                                           const float (&right)[4]) {
  out[0] = pack_saturated<T>(left[0], left[1]);
  out[1] = pack_saturated<T>(left[2], left[3]);
  out[2] = pack_saturated<T>(right[0], right[1]);
  out[3] = pack_saturated<T>(right[2], right[3]);
}

// Converts 16 columns of a chunk, from load_columns, to two accumulator tiles of their transpose.
template <Scalar T>
__device__ __forceinline__ void unpack_columns(const u32 (&x)[4], float (&out)[2][4]) {
  unpack<T>(x[0], out[0][0], out[0][1]);
  unpack<T>(x[1], out[1][0], out[1][1]);
  unpack<T>(x[2], out[0][2], out[0][3]);
  unpack<T>(x[3], out[1][2], out[1][3]);
}

// The bits of x, with half a unit of tf32's last place added to its magnitude. The minimum keeps a
// GPU's NaN (0x7fffffff): the addition alone would carry into its sign and make it a zero.
__device__ __forceinline__ u32 add_half_unit_of_tf32(float x) {
  return (u32)(min(__float_as_int(x), 0x7fffefff) + 0x1000);
}

// The tensor core truncates to tf32. This addition turns the truncation into rounding. cvt.rna.tf32
// would take a dozen instructions.
__device__ __forceinline__ float to_tf32(float x) {
  return __uint_as_float(add_half_unit_of_tf32(x));
}

__device__ __forceinline__ float round_tf32(float x) {
  return __uint_as_float(add_half_unit_of_tf32(x) & 0xffffe000u);
}

// ---- products: d += a b ----

template <Scalar T>
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (T == Scalar::bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// d [16, 8] += a [16, 8] b [8, 8], a in two registers
template <Scalar T>
__device__ __forceinline__ void mma_half(float (&d)[4], u32 a0, u32 a1, u32 b) {
  if (T == Scalar::bf16) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5},{%6},"
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
  } else {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},"
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
  }
}

// d[0..1] += an fp16 product [8, 8] x [8, 8], computed as the upper rows of an m16n8k8
__device__ __forceinline__ void mma_8x8(float (&d)[4], u32 a, u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a), "r"(0), "r"(b));
}

// a is an accumulator tile [16, 8]; b0, b1 are elements (g, 2c), (g, 2c+1) of another one. The
// hardware reads the upper 19 bits, which truncates operands that to_tf32 has not rounded.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[1])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// ---- tiles in shared memory: rows of 128 bytes with the 128-byte swizzle ----

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

// The address of a lane's row for the loads below, from a chunk's address (a multiple of 128).
// Columns 16 t .. 16 t + 15 start at row_address ^ 32 t.
__device__ __forceinline__ u32 row_address(u32 chunk, int lane) {
  return chunk + (lane & 15) * ROW_BYTES + (((lane >> 4) ^ (lane & 7)) << 4);
}

__device__ __forceinline__ u32 pair_address(u32 chunk, int lane) {
  return chunk + ((lane & 7) + 8 * (lane >> 4)) * ROW_BYTES +
         ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
}

// With row_address: 16 columns of a chunk as an A operand [16 tokens, 16]. With pair_address: the
// transpose as B operands, tokens 0..7 in elements 0, 1 and the others in 2, 3.
__device__ __forceinline__ void load_rows(u32 (&out)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// The inverse of load_rows; `address` is row_address ^ 32 t of a chunk.
__device__ __forceinline__ void store_rows(const u32 (&x)[4], u32 address, u32 chunk, int t,
                                           int lane) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               :
               : "r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
#else
  const u32 own = chunk + (lane >> 2) * ROW_BYTES + ((lane >> 2) << 4) + 4 * (lane & 3);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 to = (own ^ (2 * t + (i >> 1)) << 4) + (i & 1) * 8 * ROW_BYTES;
    asm volatile("st.shared.u32 [%0], %1;" : : "r"(to), "r"(x[i]) : "memory");
  }
#endif
}

// With row_address, loads each 8 x 8 block transposed: two B operands [16 tokens, 8 columns], in
// elements 0, 1 and 2, 3.
__device__ __forceinline__ void load_columns(u32 (&out)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// Starts an asynchronous copy of 16 bytes from device to shared memory (cp.async).
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void commit_loads() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wait_loads() {
  asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}

}  // namespace quasar

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
