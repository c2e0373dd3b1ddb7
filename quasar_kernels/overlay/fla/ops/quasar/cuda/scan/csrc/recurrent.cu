// QuasarAttention token by token in fp32: the recurrence itself, for one sequence and head a block.
//
//   lambda = |k_t|^2,  alpha = (1 - exp(-beta lambda)) / (lambda + 1e-8)
//   S_t = (I - alpha k_t k_t^T) S_{t-1} + alpha k_t v_t^T,  o_t = S_t^T q_t      (arXiv 2512.12602)
//
// Thread j keeps column j of the state [S, S] in registers, so the update needs no exchange between
// threads; q, k and v pass through shared memory, TOKENS at a time. It serves as an independent
// check of the chunked kernels on a GPU and is not on the path that is timed.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

constexpr int TOKENS = 16;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ void narrow(float x, float* to) { *to = x; }
__device__ __forceinline__ void narrow(float x, __half* to) { *to = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16* to) { *to = __float2bfloat16_rn(x); }

// q, k, v, o: [B, T, H, S] contiguous; beta: [H]; states: [N, H, S, S], key dimension first.
// cu_seqlens: [N + 1] bounds of sequences packed in one row, or null for N = B rows of T tokens.
// initial_state and final_state may be null. Grid: (N * H), block: S threads.
template <typename scalar, int S>
__device__ __forceinline__ void walk(const scalar* q, const scalar* k, const scalar* v,
                                     const float* beta, const float* initial_state,
                                     float* final_state, const long long* cu_seqlens, scalar* o,
                                     long long T, int H) {
  __shared__ float q_tile[TOKENS][S], k_tile[TOKENS][S], v_tile[TOKENS][S];
  const int column = threadIdx.x;
  const int head = blockIdx.x % H;
  const long long sequence = blockIdx.x / H;
  const long long start = cu_seqlens ? cu_seqlens[sequence] : sequence * T;
  const long long stop = cu_seqlens ? cu_seqlens[sequence + 1] : start + T;
  const float beta_h = beta[head];

  float state[S];  // indexed by constants only, so that it stays in registers
  const long long own = (long long)blockIdx.x * S * S + column;
#pragma unroll
  for (int i = 0; i < S; ++i) state[i] = initial_state ? initial_state[own + i * S] : 0.f;

  for (long long first = start; first < stop; first += TOKENS) {
    const int count = (int)min((long long)TOKENS, stop - first);
    for (int t = 0; t < count; ++t) {
      const long long at = ((first + t) * H + head) * S + column;
      q_tile[t][column] = widen(q[at]);
      k_tile[t][column] = widen(k[at]);
      v_tile[t][column] = widen(v[at]);
    }
    __syncthreads();
    for (int t = 0; t < count; ++t) {
      float lambda = 0.f, seen = 0.f;  // |k|^2, and k^T S before the update
#pragma unroll
      for (int i = 0; i < S; ++i) {
        lambda += k_tile[t][i] * k_tile[t][i];
        seen += k_tile[t][i] * state[i];
      }
      const float alpha = -expm1f(-beta_h * lambda) / (lambda + 1e-8f);
      const float step = alpha * (v_tile[t][column] - seen);
      float out = 0.f;
#pragma unroll
      for (int i = 0; i < S; ++i) {
        state[i] += k_tile[t][i] * step;
        out += q_tile[t][i] * state[i];
      }
      narrow(out, o + ((first + t) * H + head) * S + column);
    }
    __syncthreads();
  }
  if (final_state) {
#pragma unroll
    for (int i = 0; i < S; ++i) final_state[own + i * S] = state[i];
  }
}

}  // namespace

#define RECURRENT(NAME, SCALAR, S)                                                             \
  extern "C" __global__ void __launch_bounds__(S)                                              \
      NAME(const SCALAR* q, const SCALAR* k, const SCALAR* v, const float* beta,               \
           const float* initial_state, float* final_state, const long long* cu_seqlens,        \
           SCALAR* o, long long T, int H) {                                                    \
    walk<SCALAR, S>(q, k, v, beta, initial_state, final_state, cu_seqlens, o, T, H);           \
  }

RECURRENT(quasar_recurrent_fp32_s64, float, 64)
RECURRENT(quasar_recurrent_fp16_s64, __half, 64)
RECURRENT(quasar_recurrent_bf16_s64, __nv_bfloat16, 64)
RECURRENT(quasar_recurrent_fp32_s32, float, 32)
RECURRENT(quasar_recurrent_fp16_s32, __half, 32)
RECURRENT(quasar_recurrent_bf16_s32, __nv_bfloat16, 32)
