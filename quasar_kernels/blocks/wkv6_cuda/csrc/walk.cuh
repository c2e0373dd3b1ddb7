// Shared by both kernels of WKV6: arguments, sequences, and tokens staged through shared memory.

#pragma once

#include "../../../overlay/fla/ops/quasar/cuda/csrc/fragments.cuh"

#ifndef WKV6_KEYS
#define WKV6_KEYS 64
#endif
#ifndef WKV6_FP32
#define WKV6_FP32 0
#endif

namespace quasar::wkv6 {

constexpr int KEYS = WKV6_KEYS;  // channels of a head's r, k and w: 32, 64 or 128
constexpr int CHECKPOINT = 8;    // tokens between state checkpoints of the forward kernel

#if WKV6_FP32
typedef float Element;
#else
typedef unsigned short Element;
#endif
#ifdef QUASAR_ONLY_FP16
constexpr Scalar SCALAR = Scalar::fp16;
#else
constexpr Scalar SCALAR = Scalar::bf16;
#endif

// Arguments of both kernels; mirrored by launch.py. Tensors are contiguous. r, k, v, o, dout and dv
// hold Elements. Null outputs are not written.
struct Arguments {
  const void *r, *k, *v, *dout;
  const float *w, *u, *initial_state, *d_final;
  void *o, *dv;
  float *final_state, *checkpoints, *dr, *dk, *dw, *du, *d_initial;
  const i64* bounds;  // of packed sequences (cu_seqlens), otherwise null
  i64 T;
  int heads, values;
};

// A block's sequence and head.
struct Chain {
  i64 sequence, begin, cell;  // begin: index of the first token; cell: of the first checkpoint
  int head, tokens;
};

__device__ __forceinline__ Chain find_chain(const Arguments& arg) {
  const i64 n = blockIdx.x / arg.heads;
  const int head = blockIdx.x % arg.heads;
  if (!arg.bounds) return {n, n * arg.T, n * arg.T / CHECKPOINT + n, head, (int)arg.T};
  // clamp bounds to 0 .. T, so that no access leaves the tensors
  i64 begin = arg.bounds[n], end = arg.bounds[n + 1];
  if (begin < 0) begin = 0;
  if (end > arg.T) end = arg.T;
  const int tokens = end > begin ? (int)(end - begin) : 0;
  return {n, begin, begin / CHECKPOINT + n, head, tokens};
}

// e^x, 0 for -inf
__device__ __forceinline__ float exponential(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.44269504f));
  return power;
}

__device__ __forceinline__ float2 widened(const Element* pair) {
#if WKV6_FP32
  return *(const float2*)pair;
#else
  float2 out;
  unpack<SCALAR>(*(const u32*)pair, out.x, out.y);
  return out;
#endif
}

__device__ __forceinline__ Element narrowed(float x) {
#if WKV6_FP32
  return x;
#else
  return (Element)pack<SCALAR>(x, 0.f);
#endif
}

// start copying `rows` rows of WIDTH elements, which are `stride` elements apart
template <int WIDTH, int THREADS, class X>
__device__ __forceinline__ void copy_rows(X* to, const X* from, i64 stride, int rows) {
  constexpr int PIECE = 16 / sizeof(X), PIECES = WIDTH / PIECE;
  static_assert(WIDTH % PIECE == 0, "rows are copied by 16 bytes");
  for (int p = threadIdx.x; p < rows * PIECES; p += THREADS)
    copy16(shared_address(to + p * PIECE), from + p / PIECES * stride + p % PIECES * PIECE);
}

// convert `count` elements, an even number
template <int THREADS>
__device__ __forceinline__ void widen_all(float* to, const Element* from, int count) {
  for (int p = threadIdx.x; p < count / 2; p += THREADS) ((float2*)to)[p] = widened(from + 2 * p);
}

// 4 floats by one load
__device__ __forceinline__ void load4(float* to, const float* from) {
  const float4 x = *(const float4*)from;
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

// TOKENS tokens of a head and COLUMNS columns of its values; with GRADIENT also of the outputs'
// gradients. Copies write one of the two `raw` parts while the kernel processes the tokens of the
// other part, converted to floats and with decays instead of their logarithms.
template <int TOKENS, int COLUMNS, bool GRADIENT>
struct Stage {
  static constexpr int OUT = GRADIENT ? COLUMNS : 4;
  struct Raw {
    Element r[TOKENS * KEYS], k[TOKENS * KEYS];
    float w[TOKENS * KEYS];
    Element v[TOKENS * COLUMNS], dout[TOKENS * OUT];
  } raw[2];
  float r[TOKENS * KEYS], k[TOKENS * KEYS], decay[TOKENS * KEYS];
  float v[TOKENS * COLUMNS], dout[TOKENS * OUT];

  // start copying `tokens` tokens from `first` on; all threads must call it, even for 0 tokens
  template <int THREADS>
  __device__ __forceinline__ void copy(const Arguments& arg, const Chain& chain, int first,
                                       int tokens, int column, int part) {
    if (tokens > 0) {
      const i64 row = (chain.begin + first) * arg.heads + chain.head;
      const i64 keys = (i64)arg.heads * KEYS, values = (i64)arg.heads * arg.values;
      Raw& to = raw[part];
      copy_rows<KEYS, THREADS>(to.r, (const Element*)arg.r + row * KEYS, keys, tokens);
      copy_rows<KEYS, THREADS>(to.k, (const Element*)arg.k + row * KEYS, keys, tokens);
      copy_rows<KEYS, THREADS>(to.w, arg.w + row * KEYS, keys, tokens);
      const i64 at = row * arg.values + column;
      copy_rows<COLUMNS, THREADS>(to.v, (const Element*)arg.v + at, values, tokens);
      if (GRADIENT)
        copy_rows<COLUMNS, THREADS>(to.dout, (const Element*)arg.dout + at, values, tokens);
    }
    commit_loads();
  }

  // converts the tokens of one raw part
  template <int THREADS>
  __device__ __forceinline__ void convert(int tokens, int part) {
    const Raw& from = raw[part];
    widen_all<THREADS>(r, from.r, tokens * KEYS);
    widen_all<THREADS>(k, from.k, tokens * KEYS);
    widen_all<THREADS>(v, from.v, tokens * COLUMNS);
    if (GRADIENT) widen_all<THREADS>(dout, from.dout, tokens * COLUMNS);
    for (int p = threadIdx.x; p < tokens * KEYS; p += THREADS) decay[p] = exponential(from.w[p]);
  }
};

}  // namespace quasar::wkv6
