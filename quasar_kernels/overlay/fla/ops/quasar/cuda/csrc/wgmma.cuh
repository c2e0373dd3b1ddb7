// Hopper's warpgroup products, where the B operand is read from shared memory once for four warps.
//
// Only code for sm_90a has them (QUASAR_WGMMA is 1 there, unless QUASAR_NO_WGMMA is defined).
// Accumulators and A operands are laid out over each warp as mma.sync's are, so a kernel takes one
// or the other without changing anything else.

#pragma once

#include "fragments.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(QUASAR_NO_WGMMA)
#define QUASAR_WGMMA 1
#else
#define QUASAR_WGMMA 0
#endif

#if QUASAR_WGMMA
namespace quasar {

// A tile of 128-byte rows with permuted pieces (the hardware's 128-byte swizzle), 1024-byte
// aligned: 8 rows after 8 rows; PTX ISA, "Matrix Descriptor Format".
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

// After a wait, for accumulators whose products are done: keeps the compiler from moving their use
// before the wait, which it does not connect with them.
template <int TILES>
__device__ __forceinline__ void settle(float (&d)[TILES][4]) {
#pragma unroll
  for (int m = 0; m < TILES; ++m)
    asm volatile("" : "+f"(d[m][0]), "+f"(d[m][1]), "+f"(d[m][2]), "+f"(d[m][3]) : : "memory");
}

// what ordinary stores and cp.async wrote becomes visible to wgmma; before a barrier
__device__ __forceinline__ void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// OUT is how d is used; KEEP 0 where its old values do not count
#define QUASAR_WGMMA_ROWS(TYPE, OUT, KEEP)                                                      \
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE                      \
               " {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, " KEEP ", 1, 1, 0;"           \
               : OUT(d[0][0]), OUT(d[0][1]), OUT(d[0][2]), OUT(d[0][3]), OUT(d[1][0]),          \
                 OUT(d[1][1]), OUT(d[1][2]), OUT(d[1][3])                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d [64, 16] += a [64, 16] b^T, b 16 columns of 16 rows of a tile
template <Scalar T>
__device__ __forceinline__ void wgmma_rows(float (&d)[2][4], const u32 (&a)[4], u64 b) {
  if (T == Scalar::bf16) {
    QUASAR_WGMMA_ROWS("bf16", "+f", "1");
  } else {
    QUASAR_WGMMA_ROWS("f16", "+f", "1");
  }
}

// d = a b^T
template <Scalar T>
__device__ __forceinline__ void wgmma_first_rows(float (&d)[2][4], const u32 (&a)[4], u64 b) {
  if (T == Scalar::bf16) {
    QUASAR_WGMMA_ROWS("bf16", "=&f", "0");
  } else {
    QUASAR_WGMMA_ROWS("f16", "=&f", "0");
  }
}

#define QUASAR_WGMMA_TWO(TYPE, OUT, KEEP)                                                       \
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE                      \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, "  \
               "%20, " KEEP ", 1, 1, 0;"                                                        \
               : OUT(d[0][0]), OUT(d[0][1]), OUT(d[0][2]), OUT(d[0][3]), OUT(d[1][0]),          \
                 OUT(d[1][1]), OUT(d[1][2]), OUT(d[1][3]), OUT(d[2][0]), OUT(d[2][1]),          \
                 OUT(d[2][2]), OUT(d[2][3]), OUT(d[3][0]), OUT(d[3][1]), OUT(d[3][2]),          \
                 OUT(d[3][3])                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d [64, 32] += a [64, 16] b^T, b 16 columns of 32 rows: two chunks that follow one another
template <Scalar T>
__device__ __forceinline__ void wgmma_rows(float (&d)[4][4], const u32 (&a)[4], u64 b) {
  if (T == Scalar::bf16) {
    QUASAR_WGMMA_TWO("bf16", "+f", "1");
  } else {
    QUASAR_WGMMA_TWO("f16", "+f", "1");
  }
}

// d = a b^T
template <Scalar T>
__device__ __forceinline__ void wgmma_first_rows(float (&d)[4][4], const u32 (&a)[4], u64 b) {
  if (T == Scalar::bf16) {
    QUASAR_WGMMA_TWO("bf16", "=&f", "0");
  } else {
    QUASAR_WGMMA_TWO("f16", "=&f", "0");
  }
}

#define QUASAR_WGMMA_COLUMNS(TYPE, OUT, KEEP, TURNED)                                            \
  asm volatile(                                                                                  \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
      "%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, " KEEP ", 1, 1, " TURNED ";"    \
      : OUT(d[0][0]), OUT(d[0][1]), OUT(d[0][2]), OUT(d[0][3]), OUT(d[1][0]), OUT(d[1][1]),      \
        OUT(d[1][2]), OUT(d[1][3]), OUT(d[2][0]), OUT(d[2][1]), OUT(d[2][2]), OUT(d[2][3]),      \
        OUT(d[3][0]), OUT(d[3][1]), OUT(d[3][2]), OUT(d[3][3]), OUT(d[4][0]), OUT(d[4][1]),      \
        OUT(d[4][2]), OUT(d[4][3]), OUT(d[5][0]), OUT(d[5][1]), OUT(d[5][2]), OUT(d[5][3]),      \
        OUT(d[6][0]), OUT(d[6][1]), OUT(d[6][2]), OUT(d[6][3]), OUT(d[7][0]), OUT(d[7][1]),      \
        OUT(d[7][2]), OUT(d[7][3])                                                               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d [64, 64] += a [64, 16] b, b 16 rows of a tile
template <Scalar T>
__device__ __forceinline__ void wgmma_columns(float (&d)[8][4], const u32 (&a)[4], u64 b) {
  if (T == Scalar::bf16) {
    QUASAR_WGMMA_COLUMNS("bf16", "+f", "1", "1");
  } else {
    QUASAR_WGMMA_COLUMNS("f16", "+f", "1", "1");
  }
}

// d [64, 64] += a [64, 16] b^T, b 16 columns of a tile's 64 rows; d = a b^T if FIRST
template <Scalar T, bool FIRST>
__device__ __forceinline__ void wgmma_tile_rows(float (&d)[8][4], const u32 (&a)[4], u64 b) {
  if (T == Scalar::bf16 && FIRST) {
    QUASAR_WGMMA_COLUMNS("bf16", "=&f", "0", "0");
  } else if (T == Scalar::bf16) {
    QUASAR_WGMMA_COLUMNS("bf16", "+f", "1", "0");
  } else if (FIRST) {
    QUASAR_WGMMA_COLUMNS("f16", "=&f", "0", "0");
  } else {
    QUASAR_WGMMA_COLUMNS("f16", "+f", "1", "0");
  }
}

#undef QUASAR_WGMMA_ROWS
#undef QUASAR_WGMMA_TWO
#undef QUASAR_WGMMA_COLUMNS

}  // namespace quasar
#endif
