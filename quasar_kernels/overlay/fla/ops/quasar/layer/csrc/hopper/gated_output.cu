// The layer's output in one kernel: y = (rmsnorm(o per head) * weight * sigmoid(narrow W_g^T + b))
// W_o^T, for 8 heads of 64 channels, on Hopper.
//
// Grid: (an even number of blocks, tiles / row_tiles), in clusters of two blocks along x. Each row
// of the grid computes some of the outputs, because few tokens cannot fill the GPU otherwise.
//
// Warps of a block: two consumer warpgroups and one producer warpgroup. Each consumer warpgroup
// owns 64 tokens and keeps their 512 channels in registers from the norm to the products: the gated
// norm is the A operand of the last product, and only y is written. In the producer warpgroup, one
// thread copies swizzled weight tiles (pack_weights.cu) to both blocks of the cluster, first W_g's,
// then W_o's. Two warps copy the consumers' rows of narrow and o, a head of 64 tokens at a time.
//
// Shared memory (gated_rows.cuh): a pipeline of WEIGHT_STAGES weight tiles; for each consumer one
// tile of narrow and a pipeline of CHUNKS heads of o.
//
// One consumer can be ahead of the other only by the depth of the weight pipeline, which is far
// less than the time of a tile's norms. Both consumers therefore compute norms at about the same
// time, two warps per scheduler, and then multiply.
//
// The last product's operands are fp16 for any dtype of o, narrow and y: each bf16 operand would
// add as much error as y's own rounding. A norm over 64 channels is at most 8, far within fp16's
// range. Weights saturate at 65504 and lose digits below 6e-5.
//
// The weight tiles include the norm's weight and both factors 1/2 of sigmoid(x) =
// (1 + tanh(x / 2)) / 2.

#include "gated_rows.cuh"

#if QUASAR_WGMMA
namespace quasar::layer {

// The producer thread: copies the gate's weight tiles and those of the block's outputs, in each
// step.
__device__ __forceinline__ void produce_weights(const OutputArguments& arg, OutputShared& shared) {
  PipelineProducer<WEIGHT_STAGES> producer(shared.pipeline);
  const char* out_weights =
      (const char*)arg.out_weights + (i64)blockIdx.y * arg.row_tiles * HEADS * WEIGHT_TILE_BYTES;
  for (int step = 0; step < arg.steps; ++step) {
    for (int i = 0; i < GATE_WEIGHT_TILES; ++i)
      producer.load((const char*)arg.gate_weights + i * WEIGHT_TILE_BYTES, WEIGHT_TILE_BYTES);
    for (int i = 0; i < arg.row_tiles * HEADS; ++i)
      producer.load(out_weights + (i64)i * WEIGHT_TILE_BYTES, WEIGHT_TILE_BYTES);
  }
}

// ---- a consumer warpgroup ----

__device__ __forceinline__ float rsqrt_fast(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Always true, but unknown to the compiler. A branch on it fixes the position of its code: without
// the branch, ptxas delays parts of the code until the product needs them, and spills registers.
__device__ __forceinline__ bool always() {
  u32 rows;
  asm volatile("mov.u32 %0, %%nctaid.z;" : "=r"(rows));
  return rows == 1;
}

constexpr Scalar OPERAND = Scalar::fp16;  // operands of the last product

template <Scalar T>
struct Consumer {
  const OutputArguments& arg;
  OutputShared& shared;
  const int consumer, lane;
  PipelineConsumer<WEIGHT_STAGES> weights;
  PipelineState<CHUNKS> state;
  u64 gate_tile;        // the current weight tile, for two heads
  u32 a[4 * HEADS][4];  // the token tile: a head is 4 operands [64, 16]; o, then the gated norm

  __device__ __forceinline__ Consumer(const OutputArguments& arg, OutputShared& shared,
                                      int consumer)
      : arg(arg),
        shared(shared),
        consumer(consumer),
        lane(threadIdx.x & 31),
        weights(shared.pipeline) {}

  // loads the next chunk as operands
  __device__ __forceinline__ void load_chunk(u32 (*out)[4]) {
    wait_barrier(shared_address(&shared.full[consumer][state.stage]), state.parity);
    const u32 rows = shared_address(shared.chunks[consumer][state.stage]) +
                     (threadIdx.x >> 5 & 3) * (16 * ROW_BYTES);
    const u32 from = row_address(rows, lane);
#pragma unroll
    for (int t = 0; t < 4; ++t) load_rows(out[t], from ^ 32 * t);
    __syncwarp();
    if (lane == 0) arrive(shared_address(&shared.empty[consumer][state.stage]));
    state.advance();
  }

  __device__ __forceinline__ void multiply_gate(float (&d)[8][4], int h) {
    if (h % 2 == 0) gate_tile = weights.next();
    const u64 b = gate_tile + h % 2 * (WEIGHT_TILE_BYTES / 2 / 16);
    const u64 a = tile_descriptor(shared_address(shared.narrow[consumer]));
    warpgroup_arrive();
    wgmma_tile<T, true>(d, a, b);
#pragma unroll
    for (int t = 1; t < 4; ++t) wgmma_tile<T>(d, at_columns(a, t), at_columns(b, t));
    warpgroup_commit();
  }

  // 1 / rms of this lane's two rows of head h
  __device__ __forceinline__ void compute_scales(float (&scale)[2], int h) const {
    float squares[2] = {}, others[2] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float low, high;
      unpack<T>(a[4 * h + i / 4][i % 4], low, high);
      squares[i % 2] += low * low;
      others[i % 2] += high * high;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      squares[r] += others[r];
      squares[r] += __shfl_xor_sync(ALL, squares[r], 1);
      squares[r] += __shfl_xor_sync(ALL, squares[r], 2);
      scale[r] = rsqrt_fast(squares[r] * (1.f / S) + arg.eps);
    }
  }

  // head h becomes 2 o / rms(o) * sigmoid(gate + b)
  __device__ __forceinline__ void gate_head(int h, const float (&gate)[8][4],
                                            const float (&scale)[2]) {
    const float* bias = shared.bias + h * S + 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < 8; ++j) {  // tiles of 8 channels, of which this lane has 2 adjacent ones
      const float2 b = *(const float2*)(bias + 8 * j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        u32& x = a[4 * h + j / 2][j % 2 * 2 + r];
        float low, high;
        unpack<T>(x, low, high);
        low *= scale[r];
        high *= scale[r];
        low += low * tanh_fast(gate[j][2 * r] + b.x);
        high += high * tanh_fast(gate[j][2 * r + 1] + b.y);
        x = pack<OPERAND>(low, high);
      }
    }
  }

  // computes the tile's A operand in `a`
  __device__ __forceinline__ void gate_and_norm(u32 parity) {
    float gate[2][8][4], scale[2];
    wait_barrier(shared_address(&shared.narrow_full[consumer]), parity);
    load_chunk(a);
    multiply_gate(gate[0], 0);
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      if (h + 1 < HEADS) {
        load_chunk(a + 4 * (h + 1));
        multiply_gate(gate[(h + 1) % 2], h + 1);
      }
      compute_scales(scale, h);
      if (h + 1 < HEADS)
        warpgroup_wait<1>();
      else
        warpgroup_wait<0>();
      if (h % 2) weights.release();
      warpgroup_fence_operand(gate[h % 2]);
      if (always()) gate_head(h, gate[h % 2], scale);
    }
    __syncwarp();
    if (lane == 0) arrive(shared_address(&shared.narrow_empty[consumer]));
  }

  // stores 16 bytes per lane, 64 consecutive bytes per row
  __device__ __forceinline__ void store(const float (&d)[16][4], i64 row, int tile) const {
    const i64 stride = (i64)arg.tiles * (2 * WEIGHT_TILE_ROWS);
    char* to = (char*)arg.y + row * stride + tile * (2 * WEIGHT_TILE_ROWS) + 16 * (lane & 3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r < arg.T) {
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
          const u32 x = pack<T>(d[j][2 * r], d[j][2 * r + 1]);
          const u32 y = pack<T>(d[j + 1][2 * r], d[j + 1][2 * r + 1]);
          const u32 z = pack<T>(d[j + 2][2 * r], d[j + 2][2 * r + 1]);
          const u32 w = pack<T>(d[j + 3][2 * r], d[j + 3][2 * r + 1]);
          *(uint4*)(to + 8 * r * stride + 16 * j) = make_uint4(x, y, z, w);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    i64 row = ((i64)blockIdx.x * CONSUMERS + consumer) * TILE_TOKENS + (threadIdx.x >> 5 & 3) * 16 +
              lane / 4;
    for (int step = 0; step < arg.steps; ++step) {
      gate_and_norm(step & 1);
      for (int i = 0; i < arg.row_tiles; ++i) {
        float d[16][4];
        product<OPERAND>(d, a, weights);
        store(d, row, blockIdx.y * arg.row_tiles + i);
      }
      row += (i64)gridDim.x * CONSUMERS * TILE_TOKENS;
    }
  }
};

template <Scalar T>
__device__ __forceinline__ void gated_output(const OutputArguments& arg) {
  extern __shared__ __align__(1024) uint4 raw[];
  OutputShared& shared = *(OutputShared*)raw;
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < CONSUMERS; ++i) {
      init_barrier(shared_address(&shared.narrow_full[i]), 32);  // the lanes that copy
      init_barrier(shared_address(&shared.narrow_empty[i]), 4);  // the consumer's warps
    }
    for (int i = 0; i < CONSUMERS * CHUNKS; ++i) {
      init_barrier(shared_address(&shared.full[0][i]), 32);
      init_barrier(shared_address(&shared.empty[0][i]), 4);
    }
    init_pipeline(shared.pipeline);
  }
  for (int i = tid; i < WIDTH; i += BLOCK_THREADS) shared.bias[i] = 0.5f * arg.bias[i];
  cluster_sync();
  const int consumer = __shfl_sync(ALL, tid >> 7, 0);  // uniform to the compiler
  if (consumer == CONSUMERS) {
    warpgroup_reg_dealloc<24>();
    const int warp = tid / 32 % 4;
    if (warp < CONSUMERS) produce_rows(arg, shared, warp);
    if (tid == BLOCK_THREADS - 1) produce_weights(arg, shared);
  } else {
    warpgroup_reg_alloc<240>();
    Consumer<T>(arg, shared, consumer).run();
  }
  cluster_sync();  // a block must not exit while the other may still access its shared memory
}

QUASAR_LAUNCH(gated_output, BLOCK_THREADS, sizeof(OutputShared), OutputArguments)
QUASAR_KERNEL(gated_output, __cluster_dims__(2, 1, 1) __launch_bounds__(BLOCK_THREADS, 1),
              (const __grid_constant__ OutputArguments arg), (arg))

}  // namespace quasar::layer

#endif

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
