// The layer's projections in one kernel: q, k, v = silu(conv(x W^T)), and the gate's low-rank input
// `narrow`, for 512 inputs and 8 heads of 64 (resident_tokens.cuh).
//
// Grid: (blocks, rows). A block computes one run of tokens, 128 at a time; runs overlap by three
// tokens, so that no block needs another's results. Rows of the grid divide the products of 64
// channels among them, so that few tokens still fill the GPU.
//
// Convolution: a lane holds four consecutive tokens of its channels, so it needs three results more:
// of the lane with the tokens before, or of the warp before (through shared memory), or of the
// block's tile before (through device memory, where they stay in the L2 cache). Results, taps and
// sums are fp16, as in the kernel for Hopper.

#include "resident_tokens.cuh"

namespace quasar::layer {

constexpr int CHANNELS = 3 * 512;  // q, k and v
constexpr int PRODUCTS = CHANNELS / PIECE_CHANNELS;
constexpr int CYCLE = PRODUCTS + 1;  // one more for `narrow`
constexpr int TAPS = 4, BEFORE = TAPS - 1;

// mirrored by program.py
struct ProjectionArguments {
  const float *x, *taps;     // [T, 512]; [4, 1536], halved
  const char* weight_tiles;  // 8 of 128 rows for each 128 channels, and 8 of 64 rows for `narrow`
  void *qkv, *narrow;        // [T, 1536], [T, 64]
  uint4* carried;            // [blocks, PRODUCTS, BEFORE, 8]: last rows of the tile before
  i64 T;
  int steps;  // tiles of 128 tokens of a block
};

struct ProjectionShared : ResidentShared {
  uint4 last_rows[GROUPS][WARPS][BEFORE][8];  // 64 channels in fp16
};

// A group's products of 64 channels: its half of those of its row of the grid.
struct ProductOrder {
  const char* weight_tiles;
  int first, count;

  __device__ __forceinline__ ProductOrder(const ProjectionArguments& arg, int group)
      : weight_tiles(arg.weight_tiles) {
    const int begin = CYCLE * (int)blockIdx.y / (int)gridDim.y;
    const int end = CYCLE * ((int)blockIdx.y + 1) / (int)gridDim.y;
    const int middle = (begin + end) / 2;
    first = group == 0 ? begin : middle;
    count = (group == 0 ? middle : end) - first;
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

// COUNT operands of this warp's tokens from `operand` on; f(i, m, a) takes them.
template <Scalar T, int COUNT, class F>
__device__ __forceinline__ void load_tokens(const ProjectionArguments& arg, const Tile& tile,
                                            int operand, const F& f) {
  constexpr int FLIGHT = 4;  // operands whose loads are on the way together
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

// The block's tile as operands: each group loads the held ones, and half of the others.
template <Scalar T>
__device__ __forceinline__ void load_tile(Held& held, const ProjectionArguments& arg,
                                          ProjectionShared& shared, const Tile& tile, int group) {
  load_tokens<T, HELD>(arg, tile, 0, [&](int i, int m, const u32(&a)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) held[i][m][e] = a[e];
  });
  constexpr int SHARE = (OPERANDS - HELD) / GROUPS;
  __syncthreads();  // nobody reads the tile before any more
  load_tokens<T, SHARE>(arg, tile, HELD + SHARE * group, [&](int i, int m, const u32(&a)[4]) {
    store_operand(shared.inputs[SHARE * group + i][warp_index()][m], a);
  });
  __syncthreads();
}

// One row's 512 inputs are 16 lines; a thread of the group asks for half of a row.
__device__ __forceinline__ void prefetch_tile(const ProjectionArguments& arg, const Tile& tile,
                                              int group) {
  const int row = threadIdx.x % GROUP_THREADS;
  if (row < tile.end)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      prefetch_to_l2(arg.x + (tile.first + row) * INPUTS + 32 * (8 * group + i));
}

// ---- the convolution ----

// two numbers in fp16: a <- a b, and a b + c
__device__ __forceinline__ u32 scale_pair(u32 a, u32 b) {
  asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}

__device__ __forceinline__ u32 add_scaled_pair(u32 a, u32 b, u32 c) {
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(c) : "r"(a), "r"(b));
  return c;
}

// silu(2 h) of two numbers. Minus infinity becomes the least number first: its SiLU would be NaN.
template <Scalar T>
__device__ __forceinline__ u32 silu_of_half(u32 h) {
  float y[2];
  asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(h) : "r"(0xfbfffbffu));
  unpack<Scalar::fp16>(h, y[0], y[1]);
#pragma unroll
  for (int e = 0; e < 2; ++e) y[e] = y[e] * tanh_fast(y[e]) + y[e];
  return pack_saturated<T>(y[0], y[1]);
}

typedef u32 Rows[LANE_TOKENS][8];  // a lane's results: by token, pairs of channels

// The last rows before this warp's: lanes 0 .. 3 have them, as channels 32 h + 8 lane on.
__device__ __forceinline__ void load_rows_before(uint4 (&to)[BEFORE][2],
                                                 const uint4 (*from)[8]) {
#pragma unroll
  for (int i = 0; i < BEFORE; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) to[i][h] = from[i][2 * (lane_index() & 3) + h];
}

__device__ __forceinline__ void store_last_rows(uint4 (*to)[8], const Rows& rows) {
#pragma unroll
  for (int i = 0; i < BEFORE; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32* r = rows[LANE_TOKENS - BEFORE + i] + 4 * h;
      to[i][2 * (lane_index() & 3) + h] = make_uint4(r[0], r[1], r[2], r[3]);
    }
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
      rows[r][n] =
          pack_saturated<Scalar::fp16>(d[r / 2][n][r % 2 * 2], d[r / 2][n][r % 2 * 2 + 1]);

  uint4 before[BEFORE][2] = {};  // nothing precedes the first token
  uint4(*carried)[8] =
      (uint4(*)[8])(arg.carried + ((i64)blockIdx.x * PRODUCTS + product) * (BEFORE * 8));
  if (lane >= 32 - 4) store_last_rows(shared.last_rows[group][warp], rows);
  if (warp == 0 && lane < 4 && step > 0) load_rows_before(before, carried);
  group_sync(group);
  if (warp > 0 && lane < 4) load_rows_before(before, shared.last_rows[group][warp - 1]);
  if (warp == WARPS - 1 && lane >= 32 - 4 && step + 1 < arg.steps) store_last_rows(carried, rows);

  const int first = first_token();
  const float* taps = arg.taps + product * PIECE_CHANNELS + 8 * (lane & 3);
  unsigned short* to = (unsigned short*)arg.qkv + (tile.first + first) * CHANNELS +
                       product * PIECE_CHANNELS + 8 * (lane & 3);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    u32 y[LANE_TOKENS][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 4 * h + i;
      u32 x[BEFORE + LANE_TOKENS], weight[TAPS];
#pragma unroll
      for (int b = 0; b < BEFORE; ++b) {
        const u32 above = __shfl_up_sync(ALL, rows[LANE_TOKENS - BEFORE + b][n], 4);
        x[b] = lane < 4 ? part(before[b][h], i) : above;
      }
#pragma unroll
      for (int r = 0; r < LANE_TOKENS; ++r) x[BEFORE + r] = rows[r][n];
#pragma unroll
      for (int j = 0; j < TAPS; ++j) {
        const float2 w = *(const float2*)(taps + j * CHANNELS + 32 * h + 2 * i);
        weight[j] = pack_saturated<Scalar::fp16>(w.x, w.y);
      }
#pragma unroll
      for (int r = 0; r < LANE_TOKENS; ++r) {
        u32 sum = scale_pair(x[r], weight[0]);
#pragma unroll
        for (int j = 1; j < TAPS; ++j) sum = add_scaled_pair(x[r + j], weight[j], sum);
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
      for (int h = 0; h < 2; ++h)
        *(uint4*)(to + r * S + 32 * h) = packed_channels<T>(d, r, h);
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
      product<T>(d, held, shared, weights);
      if (i == order.count / 2 && step + 1 < arg.steps)
        prefetch_tile(arg, Tile(arg, step + 1), group);
      if (order.first + i < PRODUCTS)
        convolve<T>(d, arg, shared, tile, step, order.first + i, group);
      else
        store_narrow<T>(d, arg, tile);
    }
  }
  wait_loads<0>();
}

QUASAR_LAUNCH(resident_projection, THREADS, sizeof(ProjectionShared), ProjectionArguments)
QUASAR_KERNEL(resident_projection, __launch_bounds__(THREADS, 1),
              (const __grid_constant__ ProjectionArguments arg), (arg))

}  // namespace quasar::layer
