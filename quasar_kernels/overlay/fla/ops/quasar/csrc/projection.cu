// The layer's first product in one kernel: q, k, v = silu(conv(x W^T)) and the gate's narrow half.
//
// A worker takes a run of tokens, 64 at a time: reads x in fp32, keeps it rounded in registers, and
// multiplies it by the images of all weights. Each result of 128 channels passes through shared
// memory, where the convolution finds a token's rows; the last three wait there for the next 64.
// There they are fp16, whatever the outputs are: bf16 would lose three bits more, and 65504, where
// they saturate, is far. Runs overlap by three tokens, so that none needs another's rows.

#include "warpgroup_product.cuh"

#if QUASAR_WGMMA

namespace quasar {

constexpr int HIDDEN = 512;
constexpr int OPERANDS = HIDDEN / 16, IMAGES = HIDDEN / IMAGE_INPUTS;
constexpr int CHANNELS = 3 * 512;    // q, k and v
constexpr int PRODUCTS = CHANNELS / IMAGE_ROWS, CYCLE = PRODUCTS + 1;  // one more for `narrow`
constexpr int TAPS = 4, BEFORE = TAPS - 1;
constexpr u32 RESULT_ROW = 2 * IMAGE_ROWS, RESULT_PITCH = RESULT_ROW + 16;
constexpr int PROJECTION_STAGES = IMAGES;
constexpr int AHEAD = 3;  // products between reading x into L2 and into registers

// Mirrored by projection.py.
struct ProjectionArguments {
  const float *x, *taps;  // [T, 512]; [4, 1536], halved
  const void* images;     // 8 of 128 rows for each product, and 8 of 64 rows for `narrow`
  void *qkv, *narrow;     // [T, 1536], [T, 64]
  i64 T;
  int steps;              // tiles of 64 tokens in a run
  int lag;                // products that worker 1 begins after worker 0
};

struct ProjectionShared {
  RingShared<PROJECTION_STAGES> ring;
  uint4 result[WORKERS][TILE_TOKENS * RESULT_PITCH / 16];
  uint4 before[WORKERS][PRODUCTS][BEFORE][RESULT_ROW / 16];
  float4 taps[TAPS][CHANNELS / 4];
};

// A worker's tokens: rows begin .. end - 1 of the tile that starts at `first` are its own.
struct Tile {
  i64 first;
  int begin, end;

  __device__ __forceinline__ Tile(const ProjectionArguments& arg, int worker, int step) {
    const i64 run = (i64)blockIdx.x * WORKERS + worker;
    first = run * (TILE_TOKENS * arg.steps - BEFORE) + TILE_TOKENS * step;
    begin = run > 0 && step == 0 ? BEFORE : 0;
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

// The tile as A operands; rows after the last token repeat it.
template <Scalar T>
__device__ __forceinline__ void load_tokens(u32 (&a)[OPERANDS][4], const ProjectionArguments& arg,
                                            const Tile& tile) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const i64 token = tile.first + 16 * warp + (lane >> 2), last = arg.T - 1;
  const float* upper = arg.x + (token < last ? token : last) * HIDDEN + 4 * (lane & 3);
  const float* lower = arg.x + (token + 8 < last ? token + 8 : last) * HIDDEN + 4 * (lane & 3);
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
      a[t + i][0] = pack<T>(u[i].x, u[i].y);
      a[t + i][1] = pack<T>(l[i].x, l[i].y);
      a[t + i][2] = pack<T>(u[i].z, u[i].w);
      a[t + i][3] = pack<T>(l[i].z, l[i].w);
    }
  }
}

// silu(2 h)
__device__ __forceinline__ float silu_of_half(float h) {
  return h * tanh_fast(h) + h;
}

__device__ __forceinline__ uint2 load_shared(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(u32 address, const uint2& v) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" : : "r"(address), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void load_taps(float (&weight)[4], u32 address) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(weight[0]), "=f"(weight[1]), "=f"(weight[2]), "=f"(weight[3])
               : "r"(address));
}

__device__ __forceinline__ void unpack_4(float (&out)[4], const uint2& v) {
  unpack<Scalar::fp16>(v.x, out[0], out[1]);
  unpack<Scalar::fp16>(v.y, out[2], out[3]);
}

// Convolve and store one result [64, 128], a product's accumulator. A thread owns 4 channels of its
// warp's 16 rows. `before` is where the last rows of the tile before wait, and are replaced.
template <Scalar T>
__device__ __forceinline__ void convolve(const float (&d)[16][4], const ProjectionArguments& arg,
                                         const Tile& tile, int product, u32 result, u32 before,
                                         u32 taps, int worker) {
  constexpr int ROWS = 16, BLOCK = 4;  // rows of a warp, and rows computed together
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const u32 own = result + ROWS * warp * RESULT_PITCH + 8 * lane, kept = before + 8 * lane;
  worker_sync(worker);  // everybody has read the result before
  store_tiles<Scalar::fp16>(result, RESULT_PITCH, d);
  uint2 old[BEFORE], row[2][BLOCK];
  if (warp == 0)
#pragma unroll
    for (int i = 0; i < BEFORE; ++i) old[i] = load_shared(kept + i * RESULT_ROW);
  float weight[TAPS][4];
#pragma unroll
  for (int i = 0; i < TAPS; ++i) load_taps(weight[i], taps + 4 * CHANNELS * i + 16 * lane);
  worker_sync(worker);
  if (warp != 0)
#pragma unroll
    for (int i = 0; i < BEFORE; ++i) old[i] = load_shared(own + (i - BEFORE) * RESULT_PITCH);
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) row[0][i] = load_shared(own + i * RESULT_PITCH);

  float x[BEFORE + BLOCK][4];  // a block of rows and those before it
#pragma unroll
  for (int i = 0; i < BEFORE; ++i) unpack_4(x[i], old[i]);
  unsigned short* to = (unsigned short*)arg.qkv + (tile.first + ROWS * warp) * CHANNELS +
                       product * IMAGE_ROWS + 4 * lane;
  const int begin = tile.begin - ROWS * warp, end = tile.end - ROWS * warp;
#pragma unroll
  for (int b = 0; b < ROWS / BLOCK; ++b) {
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
      unpack_4(x[BEFORE + i], row[b & 1][i]);
      if (b + 1 < ROWS / BLOCK)
        row[~b & 1][i] = load_shared(own + (BLOCK * (b + 1) + i) * RESULT_PITCH);
    }
    float y[BLOCK][4];
#pragma unroll
    for (int i = 0; i < BLOCK; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float h = weight[0][e] * x[i][e];
#pragma unroll
        for (int j = 1; j < TAPS; ++j) h += weight[j][e] * x[i + j][e];
        y[i][e] = silu_of_half(h);
      }
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
      const int r = BLOCK * b + i;
      if (r >= begin && r < end)
        *(uint2*)(to + r * CHANNELS) =
            make_uint2(pack<T>(y[i][0], y[i][1]), pack<T>(y[i][2], y[i][3]));
    }
#pragma unroll
    for (int i = 0; i < BEFORE; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = x[BLOCK + i][e];
  }
  if (warp == 3)
#pragma unroll
    for (int i = 0; i < BEFORE; ++i)
      store_shared(kept + i * RESULT_ROW, row[(ROWS / BLOCK - 1) & 1][BLOCK - BEFORE + i]);
}

// Store a result [64, 64] as it is: its image's rows are permuted so that tiles 4i .. 4i + 3 of an
// accumulator hold 8 neighbours of a row in each thread.
template <Scalar T>
__device__ __forceinline__ void store_narrow(const float (&d)[8][4],
                                             const ProjectionArguments& arg, const Tile& tile) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = 16 * warp + (lane >> 2) + 8 * h;
    unsigned short* to = (unsigned short*)arg.narrow + (tile.first + row) * S + 8 * (lane & 3);
    if (row >= tile.begin && row < tile.end)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto& m = *(const float(*)[4][4])(d + 4 * i);
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
  for (int i = 0; i < CYCLE * arg.steps + arg.lag; ++i) {
    for (int worker = 0; worker < WORKERS; ++worker) {
      const int own = i - worker * arg.lag, step = own / CYCLE + 1;
      const int row = (own + AHEAD - step * CYCLE) * PART;
      const Tile next(arg, worker, step);
      const int rows = (next.end < row + PART ? next.end : row + PART) - row;
      if (own >= 0 && step < arg.steps && row >= 0 && rows > 0)
        prefetch_to_l2(arg.x + (next.first + row) * HIDDEN, rows * HIDDEN * 4);
    }
    const int product = i % CYCLE;
    const u32 bytes = product < PRODUCTS ? IMAGE_BYTES : IMAGE_BYTES / 2;
    const char* images = (const char*)arg.images + product * IMAGES * IMAGE_BYTES;
    for (int k = 0; k < IMAGES; ++k) feeder.feed(images + k * bytes, bytes);
  }
}

template <Scalar T>
__device__ __forceinline__ void project(const ProjectionArguments& arg, ProjectionShared& shared,
                                        int worker) {
  Stream<PROJECTION_STAGES> weights(shared.ring);
  const u32 result = shared_address(shared.result[worker]);
  const u32 before = shared_address(shared.before[worker]);
  const u32 taps = shared_address(shared.taps);
  for (u32 at = 8 * (threadIdx.x & 127); at < sizeof(shared.before[0]); at += 8 * 128)
    store_shared(before + at, make_uint2(0, 0));  // nothing precedes the first token
  int index = worker * arg.lag;
  for (int i = 0; i < index * IMAGES; ++i) weights.skip();
  for (int step = 0; step < arg.steps; ++step) {
    const Tile tile(arg, worker, step);
    u32 a[OPERANDS][4];
    load_tokens<T>(a, arg, tile);
    for (int i = 0; i < CYCLE; ++i) {
      if (index < PRODUCTS) {
        float d[16][4];
        product<T>(d, a, weights);
        convolve<T>(d, arg, tile, index, result, before + index * BEFORE * RESULT_ROW,
                    taps + index * IMAGE_ROWS * 4, worker);
        ++index;
      } else {
        float d[8][4];
        product<T>(d, a, weights);
        store_narrow<T>(d, arg, tile);
        index = 0;
      }
    }
  }
  if (worker == 0)
    for (int i = 0; i < arg.lag * IMAGES; ++i) weights.skip();
}

template <Scalar T>
__device__ __forceinline__ void projection(const ProjectionArguments& arg) {
  extern __shared__ __align__(1024) uint4 raw[];
  ProjectionShared& shared = *(ProjectionShared*)raw;
  if (threadIdx.x == 0) init_ring(shared.ring);
  for (int i = threadIdx.x; i < TAPS * CHANNELS / 4; i += BLOCK_THREADS)
    shared.taps[0][i] = ((const float4*)arg.taps)[i];
  cluster_sync();
  const int group = __shfl_sync(ALL, threadIdx.x >> 7, 0);  // uniform to the compiler
  if (group == WORKERS) {
    shrink_registers<24>();
    if (threadIdx.x == 128 * WORKERS) feed_images(arg, shared);
  } else {
    grow_registers<240>();
    project<T>(arg, shared, group);
  }
  cluster_sync();  // neither block leaves while the other may signal it
}

}  // namespace quasar

// threads and shared bytes of a block, for whoever launches it
extern "C" __constant__ int quasar_projection_launch[2] = {quasar::BLOCK_THREADS,
                                                           sizeof(quasar::ProjectionShared)};

#ifndef QUASAR_ONLY_FP16
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(quasar::BLOCK_THREADS, 1)
    quasar_projection_bf16(const __grid_constant__ quasar::ProjectionArguments arg) {
  quasar::projection<quasar::Scalar::bf16>(arg);
}
#endif

#ifndef QUASAR_ONLY_BF16
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(quasar::BLOCK_THREADS, 1)
    quasar_projection_fp16(const __grid_constant__ quasar::ProjectionArguments arg) {
  quasar::projection<quasar::Scalar::fp16>(arg);
}
#endif

#endif
