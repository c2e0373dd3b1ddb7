// The layer's projections in one kernel: q, k, v = silu(conv(x W^T)), and the gate's low-rank input
// `narrow`, for 512 inputs and 8 heads of 64 (resident_tokens.cuh).
//
// Grid: (blocks, rows). A block computes one run of tokens, 128 at a time; runs overlap by three
// tokens, so that no block needs another's results. Rows of the grid divide the products of 64
// channels among them, so that few tokens still fill the GPU.
//
// Convolution: a lane holds four consecutive tokens of its channels, so it needs the results of the
// three tokens before them. It gets these from the previous lane, from the previous warp (through
// shared memory), or from the block's previous tile (through device memory, where they stay in the
// L2 cache). Results, taps and sums are fp16, as in the kernel for Hopper.

#include "resident_tokens.cuh"

namespace quasar::layer {

constexpr int CHANNELS = 3 * 512;  // q, k and v
constexpr int PRODUCTS = CHANNELS / PIECE_CHANNELS;
constexpr int CYCLE = PRODUCTS + 1;  // one more for `narrow`
constexpr int TAPS = 4, BEFORE = TAPS - 1;

// mirrored by portable.py
struct ProjectionArguments {
  const float *x, *taps;     // [T, 512]; [4, 1536], halved
  const char* weight_tiles;  // 8 of 128 rows for each 128 channels, and 8 of 64 rows for `narrow`
  void *qkv, *narrow;        // [T, 1536], [T, 64]
  uint4* carried;            // [blocks, PRODUCTS, BEFORE, 8]: last rows of the step before
  i64 T;
  int steps;  // tiles of 128 tokens of a block
};

struct ProjectionShared : ResidentShared {
  uint4 rows_before[GROUPS][WARPS][BEFORE * 8];  // of each warp's first token, 64 channels in fp16
};

// A group's products of 64 channels: its share of those of its row of the grid.
struct ProductOrder {
  const char* weight_tiles;
  int first, count;

  __device__ __forceinline__ ProductOrder(const ProjectionArguments& arg, int group)
      : weight_tiles(arg.weight_tiles) {
    const int begin = CYCLE * (int)blockIdx.y / (int)gridDim.y;
    const int end = CYCLE * ((int)blockIdx.y + 1) / (int)gridDim.y;
    first = begin + (end - begin) * group / GROUPS;
    count = begin + (end - begin) * (group + 1) / GROUPS - first;
  }

  __device__ __forceinline__ const char* piece(int i) const {
    const int product = first + i / PIECES, k = i % PIECES;
    if (product == PRODUCTS)
      return weight_tiles + (i64)PRODUCTS * PIECES * PIECE_BYTES + k * PIECE_BYTES;
    return weight_tiles + ((i64)(product / 2 * PIECES + k) * 2 + product % 2) * PIECE_BYTES;
  }
};

// A block's tokens of one step: rows begin .. end - 1 from `first` on are its own.
struct Tile {
  i64 first;
  int begin, end;

  __device__ __forceinline__ Tile(const ProjectionArguments& arg, int step) {
    first = (i64)blockIdx.x * (TOKENS * arg.steps - BEFORE) + TOKENS * step;
    begin = blockIdx.x > 0 && step == 0 ? BEFORE : 0;
    const i64 left = arg.T - first;
    end = left < TOKENS ? (int)left : TOKENS;  // negative where there are none
  }
};

__device__ __forceinline__ float4 load_once(const float* from) {
  float4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from));
  return v;
}

// Calls f(i, m, a) for COUNT operands of this warp's tokens, from `operand` on. The loads of FLIGHT
// operands are in flight at the same time.
template <Scalar T, int COUNT, int FLIGHT, class F>
__device__ __forceinline__ void load_tokens(const ProjectionArguments& arg, const Tile& tile,
                                            int operand, const F& f) {
  const int lane = lane_index();
  const i64 token = tile.first + first_token();
  const i64 last = arg.T - 1;
  const float* from = arg.x + 16 * operand + 4 * (lane & 3);
  const float* rows[LANE_TOKENS];
#pragma unroll
  for (int r = 0; r < LANE_TOKENS; ++r)
    rows[r] = from + (token + r < last ? token + r : last) * INPUTS;  // the last one is repeated
#pragma unroll
  for (int t = 0; t < COUNT; t += FLIGHT) {
    float4 v[FLIGHT][LANE_TOKENS];
#pragma unroll
    for (int i = 0; i < FLIGHT; ++i)
#pragma unroll
      for (int r = 0; r < LANE_TOKENS; ++r) v[i][r] = load_once(rows[r] + 16 * (t + i));
#pragma unroll
    for (int i = 0; i < FLIGHT; ++i)
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float4 &u = v[i][2 * m], &l = v[i][2 * m + 1];
        const u32 a[4] = {pack<T>(u.x, u.y), pack<T>(l.x, l.y), pack<T>(u.z, u.w),
                          pack<T>(l.z, l.w)};
        f(t + i, m, a);
      }
  }
}

// Loads the block's tile as operands: each group its registers, and its share of shared memory.
template <Scalar T>
__device__ __forceinline__ void load_tile(Held& held, const ProjectionArguments& arg,
                                          ProjectionShared& shared, const Tile& tile, int group) {
  constexpr int SHARE = (OPERANDS - HELD) / GROUPS;
  operands_sync();  // all warps have read the previous tile
  load_tokens<T, SHARE, 8>(arg, tile, HELD + SHARE * group, [&](int i, int m, const u32(&a)[4]) {
    store_operand(shared.inputs[SHARE * group + i][warp_index()][m], a);
  });
  load_tokens<T, HELD, 4>(arg, tile, 0, [&](int i, int m, const u32(&a)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) held[i][m][e] = a[e];
  });
  operands_sync();
}

// ---- the convolution ----

// a b + c for two numbers in fp16
__device__ __forceinline__ u32 add_scaled_pair(u32 a, u32 b, u32 c) {
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(c) : "r"(a), "r"(b));
  return c;
}

// silu(2 h) of two numbers. The least finite number first replaces minus infinity, because its SiLU
// would be NaN.
template <Scalar T>
__device__ __forceinline__ u32 silu_of_half(u32 h) {
  float y[2];
  asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(h) : "r"(0xfbfffbffu));
  unpack<Scalar::fp16>(h, y[0], y[1]);
#pragma unroll
  for (int e = 0; e < 2; ++e) y[e] = y[e] * tanh_fast(y[e]) + y[e];
  return pack_finite<T>(y[0], y[1]);
}

typedef u32 Rows[LANE_TOKENS][8];  // a lane's results: by token, pairs of channels

// Copies a warp's last tokens, which lanes 28 .. 31 hold, to the place that the next warp reads.
__device__ __forceinline__ void store_last_rows(uint4* to, const Rows& rows) {
#pragma unroll
  for (int i = 0; i < BEFORE; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32* r = rows[LANE_TOKENS - BEFORE + i] + 4 * h;
      to[8 * i + 2 * (lane_index() & 3) + h] = make_uint4(r[0], r[1], r[2], r[3]);
    }
}

// The rows before the block's tile: copied from where its last warp left them in the step before.
__device__ __forceinline__ uint4* carried_rows(const ProjectionArguments& arg, int product) {
  return arg.carried + ((i64)blockIdx.x * PRODUCTS + product) * (BEFORE * 8);
}

__device__ __forceinline__ void copy_carried_rows(const ProjectionArguments& arg,
                                                  ProjectionShared& shared, int step, int product,
                                                  int group) {
  const int lane = lane_index();
  if (warp_index() > 0 || product == PRODUCTS) return;  // `narrow` is not convolved
  __syncwarp();  // all lanes have read the rows for the product before
  if (lane >= BEFORE * 8) return;
  uint4& to = shared.rows_before[group][0][lane];
  if (step > 0)
    copy16(shared_address(&to), carried_rows(arg, product) + lane);  // arrives with weight pieces
  else
    to = make_uint4(0, 0, 0, 0);  // nothing precedes the first token
}

__device__ __forceinline__ u32 part(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Convolve 64 channels of the block's tile and store them.
template <Scalar T>
__device__ __forceinline__ void convolve(const Results& d, const ProjectionArguments& arg,
                                         ProjectionShared& shared, const Tile& tile, int step,
                                         int product, int group) {
  const int lane = lane_index(), warp = warp_index();
  Rows rows;
#pragma unroll
  for (int r = 0; r < LANE_TOKENS; ++r)
#pragma unroll
    for (int n = 0; n < 8; ++n)
      rows[r][n] = pack_finite<Scalar::fp16>(d[r / 2][n][r % 2 * 2], d[r / 2][n][r % 2 * 2 + 1]);

  if (lane >= 32 - 4) {
    if (warp < WARPS - 1)
      store_last_rows(shared.rows_before[group][warp + 1], rows);
    else if (step + 1 < arg.steps)
      store_last_rows(carried_rows(arg, product), rows);
  }
  group_sync(group);
  uint4 before[BEFORE][2];  // of lanes 0 .. 3
#pragma unroll
  for (int i = 0; i < BEFORE; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      before[i][h] = shared.rows_before[group][warp][8 * i + 2 * (lane & 3) + h];

  const int first = first_token();
  const float* taps = arg.taps + product * PIECE_CHANNELS + 8 * (lane & 3);
  unsigned short* to = (unsigned short*)arg.qkv + (tile.first + first) * CHANNELS +
                       product * PIECE_CHANNELS + 8 * (lane & 3);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    u32 y[LANE_TOKENS][4], weight[TAPS][4];
#pragma unroll
    for (int j = 0; j < TAPS; ++j)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float4 w = *(const float4*)(taps + j * CHANNELS + 32 * h + 2 * i);
        weight[j][i] = pack_finite<Scalar::fp16>(w.x, w.y);
        weight[j][i + 1] = pack_finite<Scalar::fp16>(w.z, w.w);
      }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 4 * h + i;
      u32 x[BEFORE + LANE_TOKENS];
#pragma unroll
      for (int b = 0; b < BEFORE; ++b) {
        const u32 above = __shfl_up_sync(ALL, rows[LANE_TOKENS - BEFORE + b][n], 4);
        x[b] = lane < 4 ? part(before[b][h], i) : above;
      }
#pragma unroll
      for (int r = 0; r < LANE_TOKENS; ++r) x[BEFORE + r] = rows[r][n];
#pragma unroll
      for (int r = 0; r < LANE_TOKENS; ++r) {
        u32 sum = multiply_fp16(x[r], weight[0][i]);
#pragma unroll
        for (int j = 1; j < TAPS; ++j) sum = add_scaled_pair(x[r + j], weight[j][i], sum);
        y[r][i] = silu_of_half<T>(sum);
      }
    }
#pragma unroll
    for (int r = 0; r < LANE_TOKENS; ++r)
      if (first + r >= tile.begin && first + r < tile.end)
        *(uint4*)(to + r * CHANNELS + 32 * h) = make_uint4(y[r][0], y[r][1], y[r][2], y[r][3]);
  }
}

template <Scalar T>
__device__ __forceinline__ void store_narrow(const Results& d, const ProjectionArguments& arg,
                                             const Tile& tile) {
  const int first = first_token();
  unsigned short* to =
      (unsigned short*)arg.narrow + (tile.first + first) * S + 8 * (lane_index() & 3);
#pragma unroll
  for (int r = 0; r < LANE_TOKENS; ++r)
    if (first + r >= tile.begin && first + r < tile.end)
#pragma unroll
      for (int h = 0; h < 2; ++h) *(uint4*)(to + r * S + 32 * h) = packed_channels<T>(d, r, h);
}

template <Scalar T>
__device__ __forceinline__ void resident_projection(const ProjectionArguments& arg) {
  extern __shared__ __align__(1024) uint4 raw[];
  ProjectionShared& shared = *(ProjectionShared*)raw;
  const int group = __shfl_sync(ALL, threadIdx.x / GROUP_THREADS, 0);  // uniform to the compiler
  const ProductOrder order(arg, group);
  WeightStream<ProductOrder> weights(shared, order, group, order.count * PIECES);
  for (int step = 0; step < arg.steps; ++step) {
    const Tile tile(arg, step);
    if (tile.end <= 0) break;
    Held held;
    load_tile<T>(held, arg, shared, tile, group);
    for (int i = 0; i < order.count; ++i) {
      Results d;
      copy_carried_rows(arg, shared, step, order.first + i, group);
      product<T>(d, held, shared, weights);
      if (order.first + i < PRODUCTS)
        convolve<T>(d, arg, shared, tile, step, order.first + i, group);
      else
        store_narrow<T>(d, arg, tile);
    }
  }
  wait_loads<0>();
}

QUASAR_LAUNCH(resident_projection, THREADS, sizeof(ProjectionShared), ProjectionArguments)
QUASAR_KERNEL(resident_projection, __launch_bounds__(THREADS, BLOCKS),
              (const __grid_constant__ ProjectionArguments arg), (arg))

}  // namespace quasar::layer

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
