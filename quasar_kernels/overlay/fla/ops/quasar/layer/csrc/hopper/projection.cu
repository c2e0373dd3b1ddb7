// The layer's projections in one kernel: q, k, v = silu(conv(x W^T)), and the gate's low-rank input
// `narrow`.
//
// Grid: (an even number of blocks, rows), at most CYCLE rows, in clusters of two blocks along x. A
// block computes one run of tokens. Rows of the grid divide the products among them, so that few
// tokens still fill the GPU. Runs overlap by three tokens, so that no block needs another's rows.
//
// Warps of a block: two consumer warpgroups, one epilogue warpgroup and one producer warpgroup.
// - Producer: one thread copies swizzled weight tiles (pack_weights.cu) into the pipeline, for both
//   blocks of the cluster, and prefetches the consumers' next tokens into L2.
// - Consumers: each takes every other tile of 64 tokens. It reads x in fp32, rounds it, keeps all
//   but the last inputs in registers (the rest in shared memory) and multiplies it by all weight
//   tiles. Each result of 128 channels goes to shared memory as fp16.
// - Epilogue: convolves and stores one consumer's result while both consumers compute the next ones
//   (convolution.cuh). The last three rows of a result stay in shared memory for the next 64
//   tokens, which belong to the other consumer.
// Results are fp16 for any output dtype, because bf16 has three bits less. They saturate at 65504.
//
// Shared memory: the weight pipeline, the consumers' last inputs, one result for each consumer, the
// last rows of all results, the taps.

#include "convolution.cuh"

#if QUASAR_WGMMA

namespace quasar::layer {

constexpr int HIDDEN = 512;
constexpr int OPERANDS = HIDDEN / 16, WEIGHT_TILES = HIDDEN / WEIGHT_TILE_INPUTS;
constexpr int KEPT = OPERANDS - 4;  // operands in registers: with a result they fill 208 registers
constexpr int PRODUCTS = CHANNELS / WEIGHT_TILE_ROWS,
              CYCLE = PRODUCTS + 1;  // one more for `narrow`
constexpr int PROJECTION_STAGES = WEIGHT_TILES;
constexpr int AHEAD = 3;  // products between prefetching x into L2 and loading it into registers
constexpr int THREADS = 128 * (CONSUMERS + 2);
constexpr int EPILOGUE = CONSUMERS, PRODUCER = CONSUMERS + 1;  // indices of these warpgroups
constexpr int FULL = 3, FREE = 5;  // barriers of consumer 0's result; those of consumer 1's follow
constexpr int ZEROED = 7;          // barrier of the epilogue warpgroup

// Mirrored by hopper.py.
struct ProjectionArguments {
  const float *x, *taps;     // [T, 512]; [4, 1536], halved
  const void* weight_tiles;  // 8 of 128 rows for each product, and 8 of 64 rows for `narrow`
  void *qkv, *narrow;        // [T, 1536], [T, 64]
  i64 T;
  int steps;  // tiles of 64 tokens that each consumer takes
  int lag;    // consumer 1 begins so many products later; fewer than a row of the grid has
};

struct ProjectionShared {
  uint4 inputs[CONSUMERS][TILE_TOKENS * ROW_BYTES / 16];  // tiles of the last 64; 1024-byte aligned
  PipelineShared<PROJECTION_STAGES> pipeline;
  uint4 result[CONSUMERS][TILE_TOKENS * RESULT_PITCH / 16];
  uint4 last_rows[CONSUMERS][PRODUCTS][BEFORE][RESULT_ROW / 16];  // of each one's latest tile
  uint2 taps[TAPS][CHANNELS / 4];
};

// The products of a block. The rows of the grid divide all products evenly.
struct ProductRange {
  int first, count;

  __device__ __forceinline__ ProductRange()
      : first(CYCLE * (int)blockIdx.y / (int)gridDim.y),
        count(CYCLE * ((int)blockIdx.y + 1) / (int)gridDim.y - first) {}
};

// A consumer's tile. It starts at token `first`; its rows begin .. end - 1 are stored.
struct Tile {
  i64 first;
  int begin, end;

  __device__ __forceinline__ Tile(const ProjectionArguments& arg, int consumer, int step) {
    const int tile = CONSUMERS * step + consumer;
    first = (i64)blockIdx.x * (TILE_TOKENS * CONSUMERS * arg.steps - BEFORE) + TILE_TOKENS * tile;
    begin = blockIdx.x > 0 && tile == 0 ? BEFORE : 0;
    const i64 left = arg.T - first;
    end = left < TILE_TOKENS ? (int)left : TILE_TOKENS;  // negative where there are none
  }
};

__device__ __forceinline__ float4 load_once(const float* from) {
  float4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from));
  return v;
}

// Loads the tile as A operands, the last ones into `inputs`; rows after the last token repeat it.
template <Scalar T>
__device__ __forceinline__ void load_tokens(u32 (&a)[KEPT][4], u32 inputs,
                                            const ProjectionArguments& arg, const Tile& tile) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const i64 token = tile.first + 16 * warp + (lane >> 2), last = arg.T - 1;
  const float* upper = arg.x + (token < last ? token : last) * HIDDEN + 4 * (lane & 3);
  const float* lower = arg.x + (token + 8 < last ? token + 8 : last) * HIDDEN + 4 * (lane & 3);
  const u32 chunk = inputs + warp * CHUNK_BYTES;
  constexpr int FLIGHT = 8;  // operands that are loaded at the same time
#pragma unroll
  for (int t = 0; t < OPERANDS; t += FLIGHT) {
    float4 u[FLIGHT], l[FLIGHT];
#pragma unroll
    for (int i = 0; i < FLIGHT; ++i) {
      u[i] = load_once(upper + 16 * (t + i));
      l[i] = load_once(lower + 16 * (t + i));
    }
#pragma unroll
    for (int i = 0; i < FLIGHT; ++i) {
      const u32 x[4] = {pack<T>(u[i].x, u[i].y), pack<T>(l[i].x, l[i].y), pack<T>(u[i].z, u[i].w),
                        pack<T>(l[i].z, l[i].w)};
      const int rest = t + i - KEPT;
      if (rest < 0)
#pragma unroll
        for (int e = 0; e < 4; ++e) a[rest < 0 ? t + i : 0][e] = x[e];
      else
        store_rows(x, row_address(chunk, lane) ^ 32 * rest, chunk, rest, lane);
    }
  }
}

// Stores a result [64, 64] without the epilogue. The rows of its weight tile are permuted so that
// tiles 4i .. 4i + 3 of an accumulator hold 8 adjacent elements of a row in each thread.
template <Scalar T>
__device__ __forceinline__ void store_narrow(const float (&d)[8][4], const ProjectionArguments& arg,
                                             const Tile& tile) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = 16 * warp + (lane >> 2) + 8 * h;
    unsigned short* to = (unsigned short*)arg.narrow + (tile.first + row) * S + 8 * (lane & 3);
    if (row >= tile.begin && row < tile.end)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto& m = *(const float (*)[4][4])(d + 4 * i);
        *(uint4*)(to + 32 * i) = make_uint4(
            pack<T>(m[0][2 * h], m[0][2 * h + 1]), pack<T>(m[1][2 * h], m[1][2 * h + 1]),
            pack<T>(m[2][2 * h], m[2][2 * h + 1]), pack<T>(m[3][2 * h], m[3][2 * h + 1]));
      }
  }
}

// The producer thread: copies weight tiles, and prefetches the consumers' next tokens into L2.
__device__ __forceinline__ void produce_weights(const ProjectionArguments& arg,
                                                const ProjectionShared& shared) {
  constexpr int PART = (TILE_TOKENS + AHEAD - 1) / AHEAD;  // rows
  PipelineProducer<PROJECTION_STAGES> producer(shared.pipeline);
  const ProductRange range;
  for (int i = 0; i < range.count * arg.steps + arg.lag; ++i) {
    for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
      const int own = i - consumer * arg.lag, step = own / range.count + 1;
      const int row = (own + AHEAD - step * range.count) * PART;
      const Tile next(arg, consumer, step);
      const int rows = (next.end < row + PART ? next.end : row + PART) - row;
      if (own >= 0 && step < arg.steps && row >= 0 && rows > 0)
        prefetch_to_l2(arg.x + (next.first + row) * HIDDEN, rows * HIDDEN * 4);
    }
    const int product = range.first + i % range.count;
    const u32 bytes = product < PRODUCTS ? WEIGHT_TILE_BYTES : WEIGHT_TILE_BYTES / 2;
    const char* weight_tiles =
        (const char*)arg.weight_tiles + product * WEIGHT_TILES * WEIGHT_TILE_BYTES;
    for (int k = 0; k < WEIGHT_TILES; ++k) producer.load(weight_tiles + k * bytes, bytes);
  }
}

// A consumer warpgroup: multiplies its tokens by the weights of all its products.
template <Scalar T>
__device__ __forceinline__ void project(const ProjectionArguments& arg, ProjectionShared& shared,
                                        int consumer) {
  PipelineConsumer<PROJECTION_STAGES> weights(shared.pipeline);
  const u32 result = shared_address(shared.result[consumer]);
  const u32 inputs = shared_address(shared.inputs[consumer]);
  const ProductRange range;
  const int end = range.first + range.count;
  int index = range.first + consumer * arg.lag;
  for (int i = 0; i < consumer * arg.lag * WEIGHT_TILES; ++i) weights.skip();
  for (int step = 0; step < arg.steps; ++step) {
    const Tile tile(arg, consumer, step);
    u32 a[KEPT][4];
    consumer_sync(consumer);  // all products with the previous inputs are done
    load_tokens<T>(a, inputs, arg, tile);
    fence_proxy_async();
    consumer_sync(consumer);
    for (int i = 0; i < range.count; ++i) {
      if (index < PRODUCTS) {
        float d[16][4];
        product<T>(d, a, weights, tile_descriptor(inputs));
        named_barrier_sync(FREE + consumer, RESULT_THREADS);
        store_tiles<Scalar::fp16>(result, RESULT_PITCH, d);
        named_barrier_arrive(FULL + consumer, RESULT_THREADS);
      } else {
        float d[8][4];
        product<T>(d, a, weights, tile_descriptor(inputs));
        store_narrow<T>(d, arg, tile);
      }
      if (++index == end) index = range.first;
    }
  }
  if (consumer == 0)
    for (int i = 0; i < arg.lag * WEIGHT_TILES; ++i) weights.skip();
  named_barrier_sync(FREE + consumer, RESULT_THREADS);  // completes the barrier's last phase
}

// The epilogue warpgroup: convolves both consumers' results. Tiles of one product are in order.
template <Scalar T>
__device__ __forceinline__ void run_epilogue(const ProjectionArguments& arg,
                                             ProjectionShared& shared) {
  const u32 result = shared_address(shared.result), last_rows = shared_address(shared.last_rows);
  const u32 taps = shared_address(shared.taps);
  for (u32 at = 8 * (threadIdx.x & 127); at < sizeof(shared.last_rows); at += 8 * 128)
    store_shared(last_rows + at, make_uint2(0, 0));  // nothing precedes the first token
  for (int consumer = 0; consumer < CONSUMERS; ++consumer)
    named_barrier_arrive(FREE + consumer, RESULT_THREADS);
  named_barrier_sync(ZEROED, 128);
  const ProductRange range;
  for (int i = 0; i < range.count * arg.steps + arg.lag; ++i) {
    const int product = range.first + i % range.count;
    if (product == PRODUCTS) continue;
#pragma unroll 1
    for (int place = 0; place < CONSUMERS; ++place) {
      // consumer 1 begins a tile with product `lag`: earlier products belong to the tile before
      // consumer 0's
      const int consumer = product - range.first < arg.lag ? 1 - place : place;
      const int own = i - consumer * arg.lag;
      if (own < 0 || own >= range.count * arg.steps) continue;
      const Tile tile(arg, consumer, own / range.count);
      const auto last = [&](int of) {
        return last_rows + (of * PRODUCTS + product) * BEFORE * RESULT_ROW;
      };
      const Result of = {result + consumer * (u32)sizeof(shared.result[0]),
                         last(1 - consumer),
                         last(consumer),
                         taps + product * RESULT_ROW,
                         FULL + consumer,
                         FREE + consumer};
      convolve<T>((unsigned short*)arg.qkv + tile.first * CHANNELS + product * WEIGHT_TILE_ROWS,
                  tile.begin, tile.end, of);
    }
  }
}

template <Scalar T>
__device__ __forceinline__ void projection(const ProjectionArguments& arg) {
  extern __shared__ __align__(1024) uint4 raw[];
  ProjectionShared& shared = *(ProjectionShared*)raw;
  if (threadIdx.x == 0) init_pipeline(shared.pipeline);
  for (int i = threadIdx.x; i < TAPS * CHANNELS / 4; i += THREADS) {
    const float4 w = ((const float4*)arg.taps)[i];
    shared.taps[0][i] =
        make_uint2(pack_finite<Scalar::fp16>(w.x, w.y), pack_finite<Scalar::fp16>(w.z, w.w));
  }
  cluster_sync();
  const int group = __shfl_sync(ALL, threadIdx.x >> 7, 0);  // uniform to the compiler
  if (group == PRODUCER) {
    warpgroup_reg_dealloc<24>();
    if (threadIdx.x == 128 * PRODUCER) produce_weights(arg, shared);
  } else if (group == EPILOGUE) {
    warpgroup_reg_dealloc<72>();
    run_epilogue<T>(arg, shared);
  } else {
    warpgroup_reg_alloc<208>();
    project<T>(arg, shared, group);
  }
  cluster_sync();  // a block must not exit while the other may signal it
}

QUASAR_LAUNCH(projection, THREADS, sizeof(ProjectionShared), ProjectionArguments)
QUASAR_KERNEL(projection, __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1),
              (const __grid_constant__ ProjectionArguments arg), (arg))

}  // namespace quasar::layer

#endif

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
