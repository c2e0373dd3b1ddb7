// The layer's output in one kernel: y = (rmsnorm(o per head) * weight * sigmoid(narrow W_g^T + b))
// W_o^T, for 8 heads of 64 channels (resident_tokens.cuh).
//
// Grid: (blocks, rows). A block takes every gridDim.x-th tile of 128 tokens. Rows of the grid
// divide the output channels among them, so that few tokens still fill the GPU; every row computes
// all norms.
//
// Heads 0 .. 3 of the gated norm are operands in registers, so each group of warps computes all of
// them. The other heads are in shared memory, and each group computes its part of them. Where a
// block has two groups, it therefore computes 12 heads instead of 8; the 4 additional heads are 5%
// of all products. Only y is written. The last product's operands are fp16 for any dtype of o,
// narrow and y, as in the kernel for Hopper.
//
// The weight tiles include the norm's weight and both factors 1/2 of sigmoid(x) =
// (1 + tanh(x / 2)) / 2.

#include "resident_tokens.cuh"

namespace quasar::layer {

constexpr int HEADS = 8, WIDTH = HEADS * S;  // channels of o
constexpr int HELD_HEADS = HEADS / 2, SHARED_HEADS = (HEADS - HELD_HEADS) / GROUPS;  // per group
constexpr int GATE_PIECES = SHARED_HEADS + HELD_HEADS;
constexpr Scalar OPERAND = Scalar::fp16;  // of the last product

// mirrored by portable.py
struct OutputArguments {
  const char *o, *narrow, *gate_weights, *out_weights;
  const float* bias;     // [WIDTH]
  char* y;               // [T, 64 * channels]
  i64 T, narrow_stride;  // elements
  int channels;          // of y, in units of 64
  int steps;             // most tiles of a block
  float eps;
};

// the heads that a group computes, in order: those in shared memory, then those in registers
__device__ __forceinline__ int head_of(int group, int i) {
  return i < SHARED_HEADS ? HELD_HEADS + group * SHARED_HEADS + i : i - SHARED_HEADS;
}

// The weight pieces of a group for a tile: the gate's for its heads, then its output channels'.
struct OutputOrder {
  const char *gate_weights, *out_weights;
  int group, first, count;  // output channels, in units of 64

  __device__ __forceinline__ OutputOrder(const OutputArguments& arg, int group)
      : gate_weights(arg.gate_weights), out_weights(arg.out_weights), group(group) {
    const int begin = arg.channels * (int)blockIdx.y / (int)gridDim.y;
    const int end = arg.channels * ((int)blockIdx.y + 1) / (int)gridDim.y;
    first = begin + (end - begin) * group / GROUPS;
    count = begin + (end - begin) * (group + 1) / GROUPS - first;
  }

  __device__ __forceinline__ const char* piece(int i) const {
    if (i < GATE_PIECES) return gate_weights + head_of(group, i) * PIECE_BYTES;
    i -= GATE_PIECES;
    const int product = first + i / PIECES, k = i % PIECES;
    return out_weights + ((i64)(product / 2 * PIECES + k) * 2 + product % 2) * PIECE_BYTES;
  }
};

__device__ __forceinline__ float rsqrt_fast(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The tokens of a block's tile.
struct OutputTile {
  i64 first;
  int end;  // number of tokens; not positive after the last tile

  __device__ __forceinline__ OutputTile(const OutputArguments& arg, int step) {
    first = ((i64)step * gridDim.x + blockIdx.x) * TOKENS;
    const i64 left = arg.T - first;
    end = left < TOKENS ? (int)left : TOKENS;
  }
};

__device__ __forceinline__ uint4 load_16_bytes(const char* from) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// Loads 8 channels of the lane's tokens, from 32 h + 8 (lane & 3) on.
__device__ __forceinline__ void load_half(u32 (*a)[2][4], const char* from, i64 pitch,
                                          const OutputTile& tile, int h) {
  const int own = first_token();
  from += tile.first * pitch + 64 * h + 16 * (lane_index() & 3);
#pragma unroll
  for (int r = 0; r < LANE_TOKENS; ++r) {
    const uint4 v = load_16_bytes(from + min(own + r, tile.end - 1) * pitch);
    const int m = r / 2, upper = r % 2;
    a[0][m][upper] = v.x, a[0][m][2 + upper] = v.y;
    a[1][m][upper] = v.z, a[1][m][2 + upper] = v.w;
  }
}

// Replaces a head's o by 2 o / rms(o) * sigmoid(x), as operands of the last product. `gate` is
// x / 2, with the bias.
template <Scalar T>
__device__ __forceinline__ void gate_head(u32 (*a)[2][4], const Results& gate, float eps) {
#pragma unroll
  for (int r = 0; r < LANE_TOKENS; ++r) {
    const int m = r / 2, upper = r % 2;
    float squares = 0.f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float low, high;
      unpack<T>(a[n / 2][m][n % 2 * 2 + upper], low, high);
      squares += low * low + high * high;
    }
    squares += __shfl_xor_sync(ALL, squares, 1);
    squares += __shfl_xor_sync(ALL, squares, 2);
    const float scale = rsqrt_fast(squares * (1.f / S) + eps);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      u32& x = a[n / 2][m][n % 2 * 2 + upper];
      float low, high;
      unpack<T>(x, low, high);
      low *= scale, high *= scale;
      low += low * tanh_fast(gate[m][n][2 * upper]);
      high += high * tanh_fast(gate[m][n][2 * upper + 1]);
      x = pack<OPERAND>(low, high);
    }
  }
}

__device__ __forceinline__ void load_head(u32 (*a)[2][4], const OutputArguments& arg,
                                          const OutputTile& tile, int head) {
  load_half(a, arg.o + head * (2 * S), 2 * WIDTH, tile, 0);
  load_half(a + 2, arg.o + head * (2 * S), 2 * WIDTH, tile, 1);
}

// Computes one head of the tile's gated norm; `a` holds its o.
template <Scalar T>
__device__ __forceinline__ void compute_head(u32 (*a)[2][4], const OutputArguments& arg,
                                             const OutputTile& tile, int head, int number,
                                             WeightStream<OutputOrder>& weights) {
  Results gate;
  const float* bias = arg.bias + head * S + 8 * (lane_index() & 3);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 b = *(const float2*)(bias + n / 4 * 32 + n % 4 * 2);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) gate[m][n][e] = 0.5f * (e % 2 ? b.y : b.x);
  }
  const u32 b = weights.next(number);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    u32 narrow[2][2][4];
    load_half(narrow, arg.narrow, 2 * arg.narrow_stride, tile, h);
    multiply<T>(gate, narrow[0], b, 2 * h);
    multiply<T>(gate, narrow[1], b, 2 * h + 1);
  }
  // Always true, but unknown to the compiler: without a branch ptxas delays parts of this into the
  // next heads' products, and spills registers.
  if (arg.T > 0) gate_head<T>(a, gate, arg.eps);
}

// Computes the tile's gated norm, in registers and in shared memory. Loads of o for several heads
// are in flight at the same time.
template <Scalar T>
__device__ __forceinline__ void gate_and_norm(Held& held, const OutputArguments& arg,
                                              ResidentShared& shared, const OutputTile& tile,
                                              int group, WeightStream<OutputOrder>& weights) {
#pragma unroll
  for (int i = 0; i < SHARED_HEADS; ++i) load_head(held + 4 * i, arg, tile, head_of(group, i));
  operands_sync();  // all warps have read the previous tile
#pragma unroll
  for (int i = 0; i < SHARED_HEADS; ++i) {
    compute_head<T>(held + 4 * i, arg, tile, head_of(group, i), i, weights);
#pragma unroll
    for (int t = 4 * i; t < 4 * i + 4; ++t)
#pragma unroll
      for (int m = 0; m < 2; ++m)
        store_operand(shared.inputs[4 * group * SHARED_HEADS + t][warp_index()][m], held[t][m]);
  }
#pragma unroll
  for (int h = 0; h < HELD_HEADS; ++h) load_head(held + 4 * h, arg, tile, h);
#pragma unroll
  for (int h = 0; h < HELD_HEADS; ++h) compute_head<T>(held + 4 * h, arg, tile, h, h, weights);
  operands_sync();
}

template <Scalar T>
__device__ __forceinline__ void store(const Results& d, const OutputArguments& arg,
                                      const OutputTile& tile, int product) {
  const i64 pitch = (i64)arg.channels * (2 * PIECE_CHANNELS);
  const int row = first_token();
  char* to =
      arg.y + (tile.first + row) * pitch + product * (2 * PIECE_CHANNELS) + 16 * (lane_index() & 3);
#pragma unroll
  for (int r = 0; r < LANE_TOKENS; ++r)
    if (row + r < tile.end)
#pragma unroll
      for (int h = 0; h < 2; ++h) *(uint4*)(to + r * pitch + 64 * h) = packed_channels<T>(d, r, h);
}

template <Scalar T>
__device__ __forceinline__ void resident_output(const OutputArguments& arg) {
  extern __shared__ __align__(1024) uint4 raw[];
  ResidentShared& shared = *(ResidentShared*)raw;
  const int group = __shfl_sync(ALL, threadIdx.x / GROUP_THREADS, 0);  // uniform to the compiler
  const OutputOrder order(arg, group);
  WeightStream<OutputOrder> weights(shared, order, group, GATE_PIECES + order.count * PIECES);
  for (int step = 0; step < arg.steps; ++step) {
    const OutputTile tile(arg, step);
    if (tile.end <= 0) break;
    Held held;
    gate_and_norm<T>(held, arg, shared, tile, group, weights);
    for (int i = 0; i < order.count; ++i) {
      Results d;
      product<OPERAND>(d, held, shared, weights);
      store<T>(d, arg, tile, order.first + i);
    }
  }
  wait_loads<0>();
}

QUASAR_LAUNCH(resident_output, THREADS, sizeof(ResidentShared), OutputArguments)
QUASAR_KERNEL(resident_output, __launch_bounds__(THREADS, BLOCKS),
              (const __grid_constant__ OutputArguments arg), (arg))

}  // namespace quasar::layer

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
