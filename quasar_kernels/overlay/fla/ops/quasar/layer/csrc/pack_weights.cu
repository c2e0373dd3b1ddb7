// Rewrites weights as the swizzled weight tiles that the fused products read. On Hopper a plain
// bulk copy brings a tile into shared memory ready for wgmma.
//
// A matrix W [rows, inputs], a row per output, becomes weight tiles of 128 rows by 64 inputs, 16 KB
// each: first the tiles of rows 0..127 along the inputs, then those of rows 128..255, and so on.
// Unless the rows are a multiple of 128, the last tiles have 64 rows, 8 KB. Rows of a tile are
// 128 bytes, and their 16-byte piece number j (of 8) is stored at j ^ (row & 7): the hardware's
// 128-byte swizzle, as `tile_descriptor` of wgmma.cuh expects it.
//
// Inputs are permuted in groups of G = 8 (no permutation), 16 or 32: position p of a group holds
//     channel(p) = (G / 4) * ((p >> 1) & 3) + 2 * (p >> 3) + (p & 1).
// With c = lane & 3, the positions 2c, 2c+1, 2c+8, 2c+9 of an A fragment (for G = 32 of two
// neighbouring k16 blocks) are then G / 4 consecutive channels, so that a thread fills its A
// registers by one wide load. The rows of a weight tile may be permuted by the same rule, with
// another group size: a thread's accumulators of G / 8 neighbouring tiles of 8 columns are then
// G / 4 consecutive outputs, which one wide store writes.
//
// The same launch converts the smaller parameters to fp32: the convolutions' taps, the gate's bias
// and beta.
//
// Grid: (pieces of the largest matrix / PACK_THREADS, MATRICES + VECTORS). A thread writes one
// 16-byte piece of a matrix. Unused matrices have no rows, unused vectors no elements. No shared
// memory.

#include "../../cuda/csrc/fragments.cuh"

namespace quasar::layer {

constexpr int PACK_THREADS = 256, MATRICES = 6, VECTORS = 5;
constexpr int TILE_ROWS = 128, PIECE = 8;  // of a weight tile; elements of a piece, 16 bytes

enum class Source : int { fp32, bf16, fp16 };

// A matrix W. Its elements are multiplied by factor, and by scale[input % S] unless scale is null.
// Mirrored by weight_tiles.py.
struct PackedMatrix {
  const void *from, *scale;
  void* weight_tiles;
  Source type, scale_type;
  int rows, inputs, row_group, input_group;
  float factor;
  int fp16;  // whether the weight tiles are fp16 instead of T
};

// A smaller parameter, which is converted to fp32 and multiplied by factor. Element i is written to
// index i % inner * stride + i / inner. Mirrored by weight_tiles.py.
struct ConvertedVector {
  const void* from;
  float* to;
  Source type;
  int count, inner, stride;
  float factor;
  int softplus;  // log(1 + exp(x)) instead of x
};

struct PackArguments {
  PackedMatrix matrices[MATRICES];
  ConvertedVector vectors[VECTORS];
};

__device__ __forceinline__ float read_source(const void* from, Source type, i64 i) {
  if (type == Source::fp32) return ((const float*)from)[i];
  const u32 x = ((const unsigned short*)from)[i];
  float low, high;
  if (type == Source::bf16) {
    unpack<Scalar::bf16>(x, low, high);
  } else {
    unpack<Scalar::fp16>(x, low, high);
  }
  return low;
}

__device__ __forceinline__ int permuted_channel(int p, int group) {
  const int within = p & (group - 1);
  return p - within + group / 4 * (within >> 1 & 3) + 2 * (within >> 3) + (within & 1);
}

__device__ __forceinline__ void convert_vector(const ConvertedVector& v) {
  const int threads = gridDim.x * PACK_THREADS;
  for (int i = blockIdx.x * PACK_THREADS + threadIdx.x; i < v.count; i += threads) {
    float x = read_source(v.from, v.type, i);
    if (v.softplus && x <= 20.f) x = log1pf(expf(x));  // torch's threshold
    v.to[i % v.inner * v.stride + i / v.inner] = v.factor * x;
  }
}

template <Scalar T>
__device__ __forceinline__ void pack_weights(const PackArguments& arg) {
  if (blockIdx.y >= MATRICES) return convert_vector(arg.vectors[blockIdx.y - MATRICES]);
  const PackedMatrix& m = arg.matrices[blockIdx.y];
  const i64 piece = (i64)blockIdx.x * PACK_THREADS + threadIdx.x;
  if (piece * PIECE >= (i64)m.rows * m.inputs) return;
  const int per_tile = TILE_ROWS * m.inputs / PIECE;
  const int first = (int)(piece / per_tile) * TILE_ROWS, rest = (int)(piece % per_tile);
  const int rows = m.rows - first < TILE_ROWS ? m.rows - first : TILE_ROWS;
  const int weight_tile = rest / (rows * PIECE), row = rest / PIECE % rows;
  const int j = (rest ^ row) & 7;
  const int output = first + permuted_channel(row, m.row_group);
  u32 out[PIECE / 2];
#pragma unroll
  for (int e = 0; e < PIECE; e += 2) {
    const int input =
        S * weight_tile + permuted_channel(PIECE * j + e, m.input_group);  // and input + 1
    const i64 at = (i64)output * m.inputs + input;
    float low = m.factor * read_source(m.from, m.type, at);
    float high = m.factor * read_source(m.from, m.type, at + 1);
    if (m.scale) {
      low *= read_source(m.scale, m.scale_type, input % S);
      high *= read_source(m.scale, m.scale_type, input % S + 1);
    }
    out[e / 2] = m.fp16 ? pack_saturated<Scalar::fp16>(low, high) : pack_saturated<T>(low, high);
  }
  ((uint4*)m.weight_tiles)[piece] = make_uint4(out[0], out[1], out[2], out[3]);
}

QUASAR_LAUNCH(pack_weights, PACK_THREADS, 0, PackArguments)
QUASAR_KERNEL(pack_weights, __launch_bounds__(PACK_THREADS),
              (const __grid_constant__ PackArguments arg), (arg))

}  // namespace quasar::layer

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
