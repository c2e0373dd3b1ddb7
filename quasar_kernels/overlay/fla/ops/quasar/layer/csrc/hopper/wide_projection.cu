// The projections of a layer of any width in one kernel, on Hopper: q, k, v = silu(conv(x W^T)),
// and the output gate's low-rank input `narrow`.
//
// projection.cu keeps 512 inputs in registers. Here x and W are both streamed, and a tile of the
// result is [128 tokens, 256 channels]. Tiles overlap by the convolution's three earlier rows, so
// each gives 125 tokens. The last column of tiles is `narrow`, which is not convolved.
//
// Grid: n clusters of two blocks. The blocks of a cluster compute a pair of tiles, of different
// tokens and the same tiles of W. A cluster takes every n-th pair. All columns of GROUP pairs of
// rows are computed before the next GROUP, so that x and W are read from L2.
//
// Warps of a block: two consumer warpgroups, each with 64 of the rows; one producer warp; three
// epilogue warps, which convolve and store a tile while the next one is multiplied. A fourth
// warpgroup would leave a thread too few registers for a product of 256 columns.
//
// Shared memory: the pipeline of x and W, 64 inputs per stage; one result in fp16, saturated.

#include "convolution.cuh"

#if QUASAR_WGMMA
namespace quasar::layer {

constexpr int WIDE_ROWS = 64 * CONSUMERS, WIDE_COLUMNS = 256, WIDE_STAGES = 3;
constexpr int WIDE_TOKENS = WIDE_ROWS - BEFORE;  // of a tile
constexpr int HALF_COLUMNS = WIDE_COLUMNS / CLUSTER_BLOCKS;
constexpr int GROUP = 8;  // pairs of row tiles
constexpr u32 X_BYTES = WIDE_ROWS * ROW_BYTES, W_BYTES = WIDE_COLUMNS * ROW_BYTES;
constexpr u32 WIDE_PITCH = 2 * WIDE_COLUMNS + 16;
constexpr int EPILOGUE_WARPS = 3, EPILOGUE_THREADS = 32 * EPILOGUE_WARPS;
constexpr int WIDE_THREADS = 128 * (CONSUMERS + 1);
constexpr int WIDE_RESULT_THREADS = 128 * CONSUMERS + EPILOGUE_THREADS;
constexpr int WIDE_FULL = 1, WIDE_FREE = 2;  // barriers of the result

// the dtype of q, k and v and of their products; `narrow` has the inputs' dtype
#ifdef QUASAR_FP16_RESULTS
template <Scalar T>
constexpr Scalar RESULTS = Scalar::fp16;
#else
template <Scalar T>
constexpr Scalar RESULTS = T;
#endif

// Mirrored by wide.py.
struct WideArguments {
  const float* taps;   // [channels, 4]
  void *qkv, *narrow;  // [tokens, channels], [tokens, narrow_width]
  void* products;      // [tokens, channels]: x W^T before the convolution; may be null
  i64 tokens;
  int inputs, channels, narrow_width;
  int pairs;  // of row tiles
};

struct WideMaps {
  TensorMap x, weights;  // boxes of 64 inputs and 128 rows
};

struct WideShared {
  uint4 x[WIDE_STAGES][X_BYTES / 16];  // 1024-byte aligned
  uint4 weights[WIDE_STAGES][W_BYTES / 16];
  uint4 result[WIDE_ROWS * WIDE_PITCH / 16];
  u64 full[WIDE_STAGES], empty[WIDE_STAGES];
};

// A cluster's tile: a pair of row tiles, and a column of tiles.
struct WideTile {
  int pair, column;
  bool is_narrow;

  __device__ __forceinline__ WideTile(const WideArguments& arg, int index) {
    const int columns = arg.channels / WIDE_COLUMNS + 1, group = index / (GROUP * columns);
    const int place = index % (GROUP * columns), pairs = min(GROUP, arg.pairs - GROUP * group);
    pair = GROUP * group + place % pairs;
    column = place / pairs;
    is_narrow = column == columns - 1;
  }
  // the first row of a block's tile; the first tile begins with three rows before the tokens
  __device__ __forceinline__ i64 first_row() const {
    return (i64)(CLUSTER_BLOCKS * pair + (int)cluster_rank()) * WIDE_TOKENS - BEFORE;
  }
};

// Calls f for each tile of the block's cluster.
template <class F>
__device__ __forceinline__ void for_each_tile(const WideArguments& arg, const F& f) {
  const int tiles = arg.pairs * (arg.channels / WIDE_COLUMNS + 1);
  for (int i = blockIdx.x / CLUSTER_BLOCKS; i < tiles; i += gridDim.x / CLUSTER_BLOCKS)
    f(WideTile(arg, i));
}

// Copies a box of a tensor map. Rows outside of the tensor become zeros.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int column, int row,
                                         u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];"
      :
      : "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same to both blocks of the cluster.
__device__ __forceinline__ void copy_box_to_both(u32 to, const TensorMap& map, int column, int row,
                                                 u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
      :
      : "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"((unsigned short)3)
      : "memory");
}

__device__ __forceinline__ void produce_wide(const WideArguments& arg, const WideMaps& maps,
                                             const WideShared& shared) {
  const u32 x = shared_address(shared.x), weights = shared_address(shared.weights);
  const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
  const int rank = cluster_rank();
  PipelineState<WIDE_STAGES> place;
  for_each_tile(arg, [&](const WideTile& tile) {
    const int row = (int)tile.first_row(), column = tile.column * WIDE_COLUMNS;
    for (int input = 0; input < arg.inputs; input += 64) {
      const u32 barrier = full + 8 * place.stage;
      wait_barrier(empty + 8 * place.stage, place.parity ^ 1);
      arrive_expecting(barrier, X_BYTES + (tile.is_narrow ? W_BYTES / 2 : W_BYTES));
      copy_box(x + place.stage * X_BYTES, maps.x, input, row, barrier);
      if (!tile.is_narrow || rank == 0)  // narrow has at most 128 channels
        copy_box_to_both(weights + place.stage * W_BYTES + rank * (W_BYTES / 2), maps.weights,
                         input, column + rank * HALF_COLUMNS, barrier);
      place.advance();
    }
  });
}

// A consumer warpgroup's view of the pipeline and the result.
template <Scalar T>
struct WideConsumer {
  u64 x, weights;   // descriptors of stage 0, of this warpgroup's rows of x
  u32 full, empty;  // empty: lane 0's is in block 0, lane 1's in block 1
  u32 result;
  bool reports;
  PipelineState<WIDE_STAGES> place;

  __device__ __forceinline__ WideConsumer(WideShared& shared, int consumer)
      : x(tile_descriptor(shared_address(shared.x) + consumer * (X_BYTES / CONSUMERS))),
        weights(tile_descriptor(shared_address(shared.weights))),
        full(shared_address(shared.full)),
        result(shared_address(shared.result) + 64 * consumer * WIDE_PITCH),
        reports((threadIdx.x & 31) < CLUSTER_BLOCKS) {
    empty = in_block(shared_address(shared.empty), threadIdx.x & (CLUSTER_BLOCKS - 1));
  }

  // d = x W^T over all inputs, for the first 8 * TILES columns of the tile
  template <int TILES>
  __device__ __forceinline__ void multiply(float (&d)[TILES][4], int inputs) {
    clear(d);
    int before = 0;
    for (int input = 0; input < inputs; input += 64) {
      wait_barrier(full + 8 * place.stage, place.parity);
      const u64 a = x + place.stage * (X_BYTES / 16), b = weights + place.stage * (W_BYTES / 16);
      warpgroup_fence_operand(d);
      warpgroup_arrive();
#pragma unroll
      for (int t = 0; t < 4; ++t) wgmma_tile<T>(d, at_columns(a, t), at_columns(b, t));
      warpgroup_commit();
      if (input) {
        warpgroup_wait<1>();
        if (reports) arrive_in_cluster(empty + 8 * before);
      }
      before = place.stage;
      place.advance();
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(d);
    if (reports) arrive_in_cluster(empty + 8 * before);
  }

  // Passes a result to the epilogue as fp16.
  template <int TILES>
  __device__ __forceinline__ void pass_on(const float (&d)[TILES][4]) const {
    named_barrier_sync(WIDE_FREE, WIDE_RESULT_THREADS);
    store_tiles<Scalar::fp16>(result, WIDE_PITCH, d);
    named_barrier_arrive(WIDE_FULL, WIDE_RESULT_THREADS);
  }
};

__device__ __forceinline__ uint4 load_piece(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Converts fp16 pairs to the dtype of the results.
template <Scalar T>
__device__ __forceinline__ uint4 convert_piece(const uint4& x) {
  if (T == Scalar::fp16) return x;
  const u32 from[4] = {x.x, x.y, x.z, x.w};
  u32 to[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low, high;
    unpack<Scalar::fp16>(from[i], low, high);
    to[i] = pack<T>(low, high);
  }
  return make_uint4(to[0], to[1], to[2], to[3]);
}

// An epilogue warp convolves and stores a third of the result; a lane owns 8 channels.
template <Scalar T>
__device__ __forceinline__ void convolve_wide(const WideArguments& arg, const WideTile& tile,
                                              u32 result, int warp) {
  constexpr int ROWS = (WIDE_TOKENS + EPILOGUE_WARPS - 1) / EPILOGUE_WARPS;
  const int lane = threadIdx.x & 31, before = ROWS * warp;  // the first of three earlier rows
  const int channel = tile.column * WIDE_COLUMNS + 8 * lane;
  u32 weight[TAPS][4];  // halved, because silu(x) = h + h tanh(h) with h = x / 2
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 a = ((const float4*)arg.taps)[channel + 2 * i];
    const float4 b = ((const float4*)arg.taps)[channel + 2 * i + 1];
    weight[0][i] = pack_finite<Scalar::fp16>(0.5f * a.x, 0.5f * b.x);
    weight[1][i] = pack_finite<Scalar::fp16>(0.5f * a.y, 0.5f * b.y);
    weight[2][i] = pack_finite<Scalar::fp16>(0.5f * a.z, 0.5f * b.z);
    weight[3][i] = pack_finite<Scalar::fp16>(0.5f * a.w, 0.5f * b.w);
  }
  const i64 first = tile.first_row() + before + BEFORE, left = arg.tokens - first;
  const int own = WIDE_TOKENS - before < ROWS ? WIDE_TOKENS - before : ROWS;
  const int end = left < own ? (int)left : own;
  const i64 offset = first * arg.channels + channel;
  unsigned short* to = (unsigned short*)arg.qkv + offset;
  unsigned short* raw = arg.products ? (unsigned short*)arg.products + offset : nullptr;
  u32 from = result + before * WIDE_PITCH + 16 * lane;
  named_barrier_sync(WIDE_FULL, WIDE_RESULT_THREADS);
  uint4 x[TAPS];  // the latest four rows
#pragma unroll
  for (int i = 0; i < BEFORE; ++i, from += WIDE_PITCH) x[i] = load_piece(from);
#pragma unroll 4
  for (int r = 0; r < end; ++r, from += WIDE_PITCH) {
    x[BEFORE] = load_piece(from);
    u32 y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 sum = multiply_pair(weight[0][i], (&x[0].x)[i]);
#pragma unroll
      for (int j = 1; j < TAPS; ++j) sum = multiply_add_pair(weight[j][i], (&x[j].x)[i], sum);
      float silu[2];
      silu_of_half(silu, sum);
      y[i] = pack_finite<RESULTS<T>>(silu[0], silu[1]);
    }
    *(uint4*)to = make_uint4(y[0], y[1], y[2], y[3]);
    to += arg.channels;
    if (raw) {
      *(uint4*)raw = convert_piece<RESULTS<T>>(x[BEFORE]);
      raw += arg.channels;
    }
#pragma unroll
    for (int i = 0; i < BEFORE; ++i) x[i] = x[i + 1];
  }
}

template <Scalar T>
__device__ __forceinline__ void store_narrow_rows(const WideArguments& arg, const WideTile& tile,
                                                  u32 result, int thread) {
  const int pieces = arg.narrow_width / 8;  // of 16 bytes
  const i64 first = tile.first_row(), left = arg.tokens - first;
  const int end = left < WIDE_ROWS ? (int)left : WIDE_ROWS;
  named_barrier_sync(WIDE_FULL, WIDE_RESULT_THREADS);
  for (int i = thread + BEFORE * pieces; i < end * pieces; i += EPILOGUE_THREADS) {
    const int row = i / pieces, piece = i % pieces;
    const uint4 x = load_piece(result + row * WIDE_PITCH + 16 * piece);
    *((uint4*)arg.narrow + (first + row) * pieces + piece) = convert_piece<T>(x);
  }
}

template <Scalar T>
__device__ __forceinline__ void wide_projection(const WideArguments& arg, const WideMaps& maps) {
  extern __shared__ __align__(1024) uint4 raw[];
  WideShared& shared = *(WideShared*)raw;
  if (threadIdx.x == 0) {
    for (int i = 0; i < WIDE_STAGES; ++i) {
      init_barrier(shared_address(&shared.full[i]), 1);
      init_barrier(shared_address(&shared.empty[i]), CLUSTER_BLOCKS * CONSUMERS * 4);
    }
    fence_barrier_init();
  }
  cluster_sync();
  const int group = __shfl_sync(ALL, threadIdx.x >> 7, 0);  // uniform to the compiler
  if (group == CONSUMERS) {
    warpgroup_reg_dealloc<88>();
    const int thread = threadIdx.x & 127, warp = __shfl_sync(ALL, thread >> 5, 0);
    if (warp == EPILOGUE_WARPS) {
      if (thread == 32 * EPILOGUE_WARPS) produce_wide(arg, maps, shared);
    } else {
      const u32 result = shared_address(shared.result);
      named_barrier_arrive(WIDE_FREE, WIDE_RESULT_THREADS);
      for_each_tile(arg, [&](const WideTile& tile) {
        if (tile.is_narrow)
          store_narrow_rows<T>(arg, tile, result, thread);
        else
          convolve_wide<T>(arg, tile, result, warp);
        named_barrier_arrive(WIDE_FREE, WIDE_RESULT_THREADS);
      });
    }
  } else {
    warpgroup_reg_alloc<208>();
    WideConsumer<T> consumer(shared, group);
    for_each_tile(arg, [&](const WideTile& tile) {
      if (tile.is_narrow) {
        float d[HALF_COLUMNS / 8][4];
        consumer.multiply(d, arg.inputs);
        consumer.pass_on(d);
      } else {
        float d[WIDE_COLUMNS / 8][4];
        consumer.multiply(d, arg.inputs);
        consumer.pass_on(d);
      }
    });
    named_barrier_sync(WIDE_FREE, WIDE_RESULT_THREADS);  // completes the barrier's last phase
  }
  cluster_sync();  // a block must not exit while the other may signal it
}

QUASAR_LAUNCH(wide_projection, WIDE_THREADS, sizeof(WideShared), WideArguments)
QUASAR_KERNEL(wide_projection, __cluster_dims__(2, 1, 1) __launch_bounds__(WIDE_THREADS, 1),
              (const __grid_constant__ WideArguments arg, const __grid_constant__ WideMaps maps),
              (arg, maps))

}  // namespace quasar::layer

#endif

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
