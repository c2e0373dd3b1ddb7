// Hopper's warpgroup products (wgmma): four warps read the B operand from shared memory once.
//
// QUASAR_WGMMA is 1 in code for sm_90a, unless QUASAR_NO_WGMMA is defined, and 0 elsewhere.
// Accumulators and A operands have the layout of mma.sync in each warp, so a kernel can use either
// instruction and keep everything else.

#pragma once

#include "fragments.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(QUASAR_NO_WGMMA)
#define QUASAR_WGMMA 1
#else
#define QUASAR_WGMMA 0
#endif

#if QUASAR_WGMMA
namespace quasar {

// A tile of 128-byte rows with the 128-byte swizzle, 1024-byte aligned, in groups of 8 rows; PTX
// ISA, "Matrix Descriptor Format".
__device__ __forceinline__ u64 tile_descriptor(u32 address) {
  const u64 groups = 8 * ROW_BYTES;
  return (address & 0x3ffffu) >> 4 | (u64)1 << 16 | groups >> 4 << 32 | (u64)1 << 62;
}

// the same tile from columns 16 t on
__device__ __forceinline__ u64 at_columns(u64 descriptor, int t) { return descriptor + 2 * t; }

__device__ __forceinline__ void warpgroup_arrive() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(PENDING) : "memory");
}

// Call after warpgroup_wait on the finished products' accumulators. The compiler knows of no
// dependency between the wait and the accumulators, and could move their use before it.
template <int TILES>
__device__ __forceinline__ void warpgroup_fence_operand(float (&d)[TILES][4]) {
#pragma unroll
  for (int m = 0; m < TILES; ++m)
    asm volatile("" : "+f"(d[m][0]), "+f"(d[m][1]), "+f"(d[m][2]), "+f"(d[m][3]) : : "memory");
}

// Makes data of ordinary stores and cp.async visible to wgmma; call before a barrier.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- products over 16 inputs; with FIRST, d is overwritten, otherwise accumulated ----

// d's registers as operands with the constraint OUT, and their names in the instruction
#define QUASAR_OUT_2(OUT, m)                                                                  \
  OUT(d[m][0]), OUT(d[m][1]), OUT(d[m][2]), OUT(d[m][3]), OUT(d[m + 1][0]), OUT(d[m + 1][1]), \
      OUT(d[m + 1][2]), OUT(d[m + 1][3])
#define QUASAR_OUT_4(OUT, m) QUASAR_OUT_2(OUT, m), QUASAR_OUT_2(OUT, m + 2)
#define QUASAR_OUT_8(OUT, m) QUASAR_OUT_4(OUT, m), QUASAR_OUT_4(OUT, m + 4)
#define QUASAR_OUT_16(OUT, m) QUASAR_OUT_8(OUT, m), QUASAR_OUT_8(OUT, m + 8)
#define QUASAR_OUT_32(OUT, m) QUASAR_OUT_16(OUT, m), QUASAR_OUT_16(OUT, m + 16)
#define QUASAR_D_2 "%0,%1,%2,%3,%4,%5,%6,%7"
#define QUASAR_D_4 QUASAR_D_2 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define QUASAR_D_8 QUASAR_D_4 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define QUASAR_D_16                                                           \
  QUASAR_D_8                                                                  \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49," \
  "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define QUASAR_D_32                                                              \
  QUASAR_D_16                                                                    \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"             \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"             \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define QUASAR_PRODUCT_OF(TYPE, OUT, KEEP, TILES, COLUMNS, OPERANDS, MAJOR, ...)    \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE \
               " {" QUASAR_D_##TILES "}, " OPERANDS ", " KEEP ", 1, 1, " MAJOR ";"  \
               : QUASAR_OUT_##TILES(OUT, 0)                                         \
               : __VA_ARGS__)

// d has TILES tiles of 8 columns; OPERANDS are A and B, MAJOR their order in memory
#define QUASAR_PRODUCT(...)                             \
  if constexpr (T == Scalar::bf16 && FIRST)             \
    QUASAR_PRODUCT_OF("bf16", "=&f", "0", __VA_ARGS__); \
  else if constexpr (T == Scalar::bf16)                 \
    QUASAR_PRODUCT_OF("bf16", "+f", "1", __VA_ARGS__);  \
  else if constexpr (FIRST)                             \
    QUASAR_PRODUCT_OF("f16", "=&f", "0", __VA_ARGS__);  \
  else                                                  \
    QUASAR_PRODUCT_OF("f16", "+f", "1", __VA_ARGS__)
#define QUASAR_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// d [64, 8 TILES] += a [64, 16] b^T, b 16 columns of as many rows as d has columns
template <Scalar T, bool FIRST = false>
__device__ __forceinline__ void wgmma_rows(float (&d)[2][4], const u32 (&a)[4], u64 b) {
  QUASAR_PRODUCT(2, "16", "{%8,%9,%10,%11}, %12", "0", QUASAR_A, "l"(b));
}

template <Scalar T, bool FIRST = false>
__device__ __forceinline__ void wgmma_rows(float (&d)[4][4], const u32 (&a)[4], u64 b) {
  QUASAR_PRODUCT(4, "32", "{%16,%17,%18,%19}, %20", "0", QUASAR_A, "l"(b));
}

template <Scalar T, bool FIRST = false>
__device__ __forceinline__ void wgmma_rows(float (&d)[8][4], const u32 (&a)[4], u64 b) {
  QUASAR_PRODUCT(8, "64", "{%32,%33,%34,%35}, %36", "0", QUASAR_A, "l"(b));
}

template <Scalar T, bool FIRST = false>
__device__ __forceinline__ void wgmma_rows(float (&d)[16][4], const u32 (&a)[4], u64 b) {
  QUASAR_PRODUCT(16, "128", "{%64,%65,%66,%67}, %68", "0", QUASAR_A, "l"(b));
}

// d [64, 64] += a [64, 16] b, b 16 rows of a tile
template <Scalar T, bool FIRST = false>
__device__ __forceinline__ void wgmma_columns(float (&d)[8][4], const u32 (&a)[4], u64 b) {
  QUASAR_PRODUCT(8, "64", "{%32,%33,%34,%35}, %36", "1", QUASAR_A, "l"(b));
}

// d += a b^T, a [64, 16] in shared memory, in 16 columns of a tile
template <Scalar T, bool FIRST = false>
__device__ __forceinline__ void wgmma_tile(float (&d)[8][4], u64 a, u64 b) {
  QUASAR_PRODUCT(8, "64", "%32, %33", "0, 0", "l"(a), "l"(b));
}

template <Scalar T, bool FIRST = false>
__device__ __forceinline__ void wgmma_tile(float (&d)[16][4], u64 a, u64 b) {
  QUASAR_PRODUCT(16, "128", "%64, %65", "0, 0", "l"(a), "l"(b));
}

template <Scalar T, bool FIRST = false>
__device__ __forceinline__ void wgmma_tile(float (&d)[32][4], u64 a, u64 b) {
  QUASAR_PRODUCT(32, "256", "%128, %129", "0, 0", "l"(a), "l"(b));
}

// d += a b, a as above, b 16 rows of a tile
template <Scalar T, bool FIRST = false>
__device__ __forceinline__ void wgmma_tile_columns(float (&d)[8][4], u64 a, u64 b) {
  QUASAR_PRODUCT(8, "64", "%32, %33", "0, 1", "l"(a), "l"(b));
}

#undef QUASAR_OUT_2
#undef QUASAR_OUT_4
#undef QUASAR_OUT_8
#undef QUASAR_OUT_16
#undef QUASAR_OUT_32
#undef QUASAR_D_2
#undef QUASAR_D_4
#undef QUASAR_D_8
#undef QUASAR_D_16
#undef QUASAR_D_32
#undef QUASAR_PRODUCT_OF
#undef QUASAR_PRODUCT
#undef QUASAR_A

}  // namespace quasar
#endif

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
