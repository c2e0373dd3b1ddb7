// Products of 64 tokens a warpgroup with weights that stream through shared memory, on Hopper.
//
// A block has a feeding warpgroup and two workers, warpgroups that keep 64 tokens each in registers
// as A operands. Both multiply the same images, tiles of weights that the feeder copies into a ring
// of stages; two blocks, a cluster, fetch half of each image and send it to both.
//
// An image holds up to 128 output channels (rows) x 64 inputs: rows of 128 bytes, whose 16-byte
// pieces are permuted by the row's number (tile_descriptor in wgmma.cuh). Within 16 inputs, places
// 2c, 2c+1, 2c+8, 2c+9 hold channels 4c .. 4c+3, so that a thread's part of an A operand is four
// neighbours in memory (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16").

#pragma once

#include "barriers.cuh"

#if QUASAR_WGMMA
namespace quasar {

constexpr int WORKERS = 2;           // warpgroups of a block that multiply
constexpr int BLOCK_THREADS = 128 * (WORKERS + 1);
constexpr int PEERS = 2;             // blocks of a cluster
constexpr int TILE_TOKENS = 64;      // that a worker holds
constexpr int IMAGE_ROWS = 128, IMAGE_INPUTS = 64;
constexpr u32 IMAGE_BYTES = IMAGE_ROWS * ROW_BYTES;

// ---- registers: the feeder gives up what the workers take; all four warps of each call it ----

template <int REGISTERS>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}

// ---- clusters ----

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// every thread of both blocks; threads of a warp may come one by one
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// the same place in the shared memory of block `rank` of the cluster
__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// ---- named barriers of a block; `threads` are all who come, to wait or not ----

__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

// the 128 threads of one worker
__device__ __forceinline__ void worker_sync(int worker) { named_sync(worker + 1, 128); }

// ---- barriers ----

// One arrival at a barrier of either block, by an address from in_block. It orders nothing in the
// other block, which would take a fence of all memory; products have read by then (warpgroup_wait).
__device__ __forceinline__ void arrive_in_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" : : "r"(barrier) : "memory");
}

// ---- bulk copies: addresses and sizes are multiples of 16 bytes ----

// to the same place in both blocks, whose barriers at `barrier` are told
__device__ __forceinline__ void copy_to_both(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1], %2, [%3], %4;"
      :
      : "r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((unsigned short)3)
      : "memory");
}

__device__ __forceinline__ void prefetch_to_l2(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(from), "r"(bytes) : "memory");
}

// ---- the ring of images ----

// first in a block's shared memory, 1024-byte aligned
template <int STAGES>
struct RingShared {
  uint4 image[STAGES][IMAGE_BYTES / 16];
  u64 full[STAGES], empty[STAGES];
};

// One thread of each block, before cluster_sync. A stage is empty when every warp of the workers of
// both blocks has released it.
template <int STAGES>
__device__ __forceinline__ void init_ring(RingShared<STAGES>& ring) {
  for (int i = 0; i < STAGES; ++i) {
    init_barrier(shared_address(&ring.full[i]), 1);
    init_barrier(shared_address(&ring.empty[i]), PEERS * WORKERS * 4);
  }
  publish_barriers();
}

// Walks the stages; `parity` is that of the phases of its round.
template <int STAGES>
struct Place {
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The feeder's side: one thread of each block, which feed the same images in the same order.
template <int STAGES>
struct Feeder {
  u32 image, full, empty, rank;
  Place<STAGES> place;

  __device__ __forceinline__ explicit Feeder(const RingShared<STAGES>& ring)
      : image(shared_address(ring.image)),
        full(shared_address(ring.full)),
        empty(shared_address(ring.empty)),
        rank(cluster_rank()) {}

  // the next image, of `bytes` (a multiple of 32); returns once its copy is on the way
  __device__ __forceinline__ void feed(const void* from, u32 bytes) {
    const u32 half = bytes / PEERS, barrier = full + 8 * place.stage;
    wait_barrier(empty + 8 * place.stage, place.parity ^ 1);  // a fresh barrier is past parity 1
    arrive_expecting(barrier, bytes);
    copy_to_both(image + place.stage * IMAGE_BYTES + rank * half, (const char*)from + rank * half,
                 half, barrier);
    place.advance();
  }
};

// A worker's side; all its threads.
template <int STAGES>
struct Stream {
  u64 descriptor;  // of stage 0
  u32 full, empty; // empty: in the block to which this lane reports, of lanes 0 and 1
  bool reports;
  int held = 0;    // the oldest stage not released
  Place<STAGES> place;

  __device__ __forceinline__ explicit Stream(const RingShared<STAGES>& ring)
      : descriptor(tile_descriptor(shared_address(ring.image))),
        full(shared_address(ring.full)),
        reports((threadIdx.x & 31) < PEERS) {
    empty = in_block(shared_address(ring.empty), threadIdx.x & (PEERS - 1));
  }

  // Wait for the next image; returns its descriptor.
  __device__ __forceinline__ u64 next() {
    wait_barrier(full + 8 * place.stage, place.parity);
    const u64 image = descriptor + place.stage * (IMAGE_BYTES / 16);
    place.advance();
    return image;
  }

  // The oldest image that this warp holds may be overwritten: its products are waited for.
  __device__ __forceinline__ void release() {
    if (reports) arrive_in_cluster(empty + 8 * held);
    if (++held == STAGES) held = 0;
  }

  // Pass an image by that the other worker alone needs.
  __device__ __forceinline__ void skip() {
    next();
    __syncwarp();
    release();
  }
};

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

// a [64, 16] in shared memory, in 16 columns of a tile
template <Scalar T>
__device__ __forceinline__ void multiply_tile(float (&d)[16][4], u64 a, u64 b) {
  if constexpr (T == Scalar::bf16)
    QUASAR_WGMMA_128("bf16", "+f", "%64, %65", "1", "0, 0", "l"(a), "l"(b));
  else
    QUASAR_WGMMA_128("f16", "+f", "%64, %65", "1", "0, 0", "l"(a), "l"(b));
}

template <Scalar T>
__device__ __forceinline__ void multiply_tile(float (&d)[8][4], u64 a, u64 b) {
  if constexpr (T == Scalar::bf16)
    QUASAR_WGMMA_64("bf16", "+f", "%32, %33", "1", "0, 0", "l"(a), "l"(b));
  else
    QUASAR_WGMMA_64("f16", "+f", "%32, %33", "1", "0, 0", "l"(a), "l"(b));
}

#undef QUASAR_OUT_4
#undef QUASAR_WGMMA_128
#undef QUASAR_WGMMA_64
#undef QUASAR_REGISTERS
#undef QUASAR_WIDE
#undef QUASAR_NARROW

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

}  // namespace quasar
#endif
