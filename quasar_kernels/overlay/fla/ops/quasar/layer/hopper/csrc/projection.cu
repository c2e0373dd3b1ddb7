// The layer's first product in one kernel: q, k, v = silu(conv(x W^T)) and the gate's narrow half.
//
// A block has two workers, warpgroups that multiply, one that convolves for both, and one that
// feeds weights. A block takes a run of tokens, of which its workers take 64 in turn: a worker reads
// x in fp32, keeps it rounded, all but the last inputs in registers, and multiplies it by the images
// of all weights. Each result of 128 channels goes to shared memory, where the convolution takes it
// up while the worker multiplies on; its last three rows wait there for the next 64, which are the
// other worker's. There they are fp16, whatever the outputs are: bf16 would lose three bits more,
// and 65504, where they saturate, is far. Runs overlap by three tokens, so that none needs another's
// rows.
//
// Grid: (an even number of blocks, rows), at most CYCLE rows. Rows share out the products: of few
// tokens each block then takes fewer products.

#include "convolution.cuh"

#if QUASAR_WGMMA

namespace quasar::layer {

constexpr int HIDDEN = 512;
constexpr int OPERANDS = HIDDEN / 16, IMAGES = HIDDEN / IMAGE_INPUTS;
constexpr int KEPT = OPERANDS - 4;  // that fit into 208 registers beside a result
constexpr int PRODUCTS = CHANNELS / IMAGE_ROWS, CYCLE = PRODUCTS + 1;  // one more for `narrow`
constexpr int PROJECTION_STAGES = IMAGES;
constexpr int AHEAD = 3;  // products between reading x into L2 and into registers
constexpr int THREADS = 128 * (WORKERS + 2);
constexpr int CONVOLVER = WORKERS, FEEDER = WORKERS + 1;  // warpgroups behind the workers
constexpr int FULL = 3, FREE = 5;  // barriers of worker 0's result; those of worker 1's follow
constexpr int ZEROED = 7;          // barrier of those who convolve

// Mirrored by projection.py.
struct ProjectionArguments {
  const float *x, *taps;  // [T, 512]; [4, 1536], halved
  const void* images;     // 8 of 128 rows for each product, and 8 of 64 rows for `narrow`
  void *qkv, *narrow;     // [T, 1536], [T, 64]
  i64 T;
  int steps;  // tiles of 64 tokens that each worker takes
  int lag;    // products that worker 1 begins after worker 0; less than a row of the grid has
};

struct ProjectionShared {
  uint4 inputs[WORKERS][TILE_TOKENS * ROW_BYTES / 16];  // tiles of the last 64; 1024-byte aligned
  RingShared<PROJECTION_STAGES> ring;
  uint4 result[WORKERS][TILE_TOKENS * RESULT_PITCH / 16];
  uint4 last_rows[WORKERS][PRODUCTS][BEFORE][RESULT_ROW / 16];  // of each one's latest tile
  uint2 taps[TAPS][CHANNELS / 4];
};

// The products of a block: those of its row of the grid, which shares them out evenly.
struct Share {
  int first, count;

  __device__ __forceinline__ Share()
      : first(CYCLE * (int)blockIdx.y / (int)gridDim.y),
        count(CYCLE * ((int)blockIdx.y + 1) / (int)gridDim.y - first) {}
};

// A worker's tokens: rows begin .. end - 1 of the tile that starts at `first` are its own.
struct Tile {
  i64 first;
  int begin, end;

  __device__ __forceinline__ Tile(const ProjectionArguments& arg, int worker, int step) {
    const int tile = WORKERS * step + worker;
    first = (i64)blockIdx.x * (TILE_TOKENS * WORKERS * arg.steps - BEFORE) + TILE_TOKENS * tile;
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

// The tile as A operands, the last of them to `inputs`; rows after the last token repeat it.
template <Scalar T>
__device__ __forceinline__ void load_tokens(u32 (&a)[KEPT][4], u32 inputs,
                                            const ProjectionArguments& arg, const Tile& tile) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const i64 token = tile.first + 16 * warp + (lane >> 2), last = arg.T - 1;
  const float* upper = arg.x + (token < last ? token : last) * HIDDEN + 4 * (lane & 3);
  const float* lower = arg.x + (token + 8 < last ? token + 8 : last) * HIDDEN + 4 * (lane & 3);
  const u32 chunk = inputs + warp * CHUNK_BYTES;
  constexpr int FLIGHT = 8;  // operands whose loads are on the way together
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

// Store a result [64, 64] as it is: its image's rows are permuted so that tiles 4i .. 4i + 3 of an
// accumulator hold 8 neighbours of a row in each thread.
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

// One thread: feeds the images, and has the workers' next tokens brought to L2.
__device__ __forceinline__ void feed_images(const ProjectionArguments& arg,
                                            const ProjectionShared& shared) {
  constexpr int PART = (TILE_TOKENS + AHEAD - 1) / AHEAD;  // rows
  Feeder<PROJECTION_STAGES> feeder(shared.ring);
  const Share share;
  for (int i = 0; i < share.count * arg.steps + arg.lag; ++i) {
    for (int worker = 0; worker < WORKERS; ++worker) {
      const int own = i - worker * arg.lag, step = own / share.count + 1;
      const int row = (own + AHEAD - step * share.count) * PART;
      const Tile next(arg, worker, step);
      const int rows = (next.end < row + PART ? next.end : row + PART) - row;
      if (own >= 0 && step < arg.steps && row >= 0 && rows > 0)
        prefetch_to_l2(arg.x + (next.first + row) * HIDDEN, rows * HIDDEN * 4);
    }
    const int product = share.first + i % share.count;
    const u32 bytes = product < PRODUCTS ? IMAGE_BYTES : IMAGE_BYTES / 2;
    const char* images = (const char*)arg.images + product * IMAGES * IMAGE_BYTES;
    for (int k = 0; k < IMAGES; ++k) feeder.feed(images + k * bytes, bytes);
  }
}

// A worker: multiplies its run's tokens by all weights of its products.
template <Scalar T>
__device__ __forceinline__ void project(const ProjectionArguments& arg, ProjectionShared& shared,
                                        int worker) {
  Stream<PROJECTION_STAGES> weights(shared.ring);
  const u32 result = shared_address(shared.result[worker]);
  const u32 inputs = shared_address(shared.inputs[worker]);
  const Share share;
  const int end = share.first + share.count;
  int index = share.first + worker * arg.lag;
  for (int i = 0; i < worker * arg.lag * IMAGES; ++i) weights.skip();
  for (int step = 0; step < arg.steps; ++step) {
    const Tile tile(arg, worker, step);
    u32 a[KEPT][4];
    worker_sync(worker);  // everybody's products have read the inputs before
    load_tokens<T>(a, inputs, arg, tile);
    publish_shared();
    worker_sync(worker);
    for (int i = 0; i < share.count; ++i) {
      if (index < PRODUCTS) {
        float d[16][4];
        product<T>(d, a, weights, tile_descriptor(inputs));
        named_sync(FREE + worker, RESULT_THREADS);
        store_tiles<Scalar::fp16>(result, RESULT_PITCH, d);
        named_arrive(FULL + worker, RESULT_THREADS);
      } else {
        float d[8][4];
        product<T>(d, a, weights, tile_descriptor(inputs));
        store_narrow<T>(d, arg, tile);
      }
      if (++index == end) index = share.first;
    }
  }
  if (worker == 0)
    for (int i = 0; i < arg.lag * IMAGES; ++i) weights.skip();
  named_sync(FREE + worker, RESULT_THREADS);  // leaves the barrier as it was found
}

// One warpgroup: convolves both workers' results, those of one product in the order of their tiles.
template <Scalar T>
__device__ __forceinline__ void convolve_all(const ProjectionArguments& arg,
                                             ProjectionShared& shared) {
  const u32 result = shared_address(shared.result), last_rows = shared_address(shared.last_rows);
  const u32 taps = shared_address(shared.taps);
  for (u32 at = 8 * (threadIdx.x & 127); at < sizeof(shared.last_rows); at += 8 * 128)
    store_shared(last_rows + at, make_uint2(0, 0));  // nothing precedes the first token
  for (int worker = 0; worker < WORKERS; ++worker) named_arrive(FREE + worker, RESULT_THREADS);
  named_sync(ZEROED, 128);
  const Share share;
  for (int i = 0; i < share.count * arg.steps + arg.lag; ++i) {
    const int product = share.first + i % share.count;
    if (product == PRODUCTS) continue;
#pragma unroll 1
    for (int place = 0; place < WORKERS; ++place) {
      // worker 1 begins a tile with product `lag`: those before it are of the tile before worker 0's
      const int worker = product - share.first < arg.lag ? 1 - place : place;
      const int own = i - worker * arg.lag;
      if (own < 0 || own >= share.count * arg.steps) continue;
      const Tile tile(arg, worker, own / share.count);
      const auto last = [&](int of) {
        return last_rows + (of * PRODUCTS + product) * BEFORE * RESULT_ROW;
      };
      const Result of = {result + worker * (u32)sizeof(shared.result[0]),
                         last(1 - worker),
                         last(worker),
                         taps + product * RESULT_ROW,
                         FULL + worker,
                         FREE + worker};
      convolve<T>((unsigned short*)arg.qkv + tile.first * CHANNELS + product * IMAGE_ROWS,
                  tile.begin, tile.end, of);
    }
  }
}

template <Scalar T>
__device__ __forceinline__ void projection(const ProjectionArguments& arg) {
  extern __shared__ __align__(1024) uint4 raw[];
  ProjectionShared& shared = *(ProjectionShared*)raw;
  if (threadIdx.x == 0) init_ring(shared.ring);
  for (int i = threadIdx.x; i < TAPS * CHANNELS / 4; i += THREADS) {
    const float4 w = ((const float4*)arg.taps)[i];
    shared.taps[0][i] =
        make_uint2(pack_finite<Scalar::fp16>(w.x, w.y), pack_finite<Scalar::fp16>(w.z, w.w));
  }
  cluster_sync();
  const int group = __shfl_sync(ALL, threadIdx.x >> 7, 0);  // uniform to the compiler
  if (group == FEEDER) {
    shrink_registers<24>();
    if (threadIdx.x == 128 * FEEDER) feed_images(arg, shared);
  } else if (group == CONVOLVER) {
    shrink_registers<72>();
    convolve_all<T>(arg, shared);
  } else {
    grow_registers<208>();
    project<T>(arg, shared, group);
  }
  cluster_sync();  // neither block leaves while the other may signal it
}

QUASAR_LAUNCH(projection, THREADS, sizeof(ProjectionShared), ProjectionArguments)
QUASAR_KERNEL(projection, __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1),
              (const __grid_constant__ ProjectionArguments arg), (arg))

}  // namespace quasar::layer

#endif

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
