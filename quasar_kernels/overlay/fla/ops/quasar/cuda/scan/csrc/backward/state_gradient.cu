// The gradient of the state, dS, over each segment from its last chunk to its first.
//
// With P = tril(Q K^T) and the WY representation's matrix B = A diag(a) (chunk.cuh) a chunk gives
//     dV = B^T (P^T dO + K dS),  dS += Q^T dO - K^T dV.
// Grid: one block for each segment, head and panel of 64 value channels. Columns of dS and dV are
// independent, so each warp owns 16 * COLUMN_BLOCKS columns and keeps dS^T in registers; all
// matrices are transposed, as in output_chunk.cuh. Over a segment this is an affine map; its matrix
// is the transpose of the forward pass's. state_gradient_map computes the map's offset, and in a
// sequence's last segment the gradient itself, from d_final. gradient_scan.cu then scans over the
// segments. state_gradient starts from the true gradient after the segment, writes dv, and stores
// checkpoints of dS in the rows of dk. With decays, the map may omit the segment's last tokens
// (tokens_until_faded).
//
// Shared memory: two stages of keys and queries, two of dO (dv overwrites it), one set of
// triangular matrices.
//
// Precision: if keys are alike, P^T dO + K dS is a small difference, so dS enters it as the sum
// of two operands. The map uses one operand: its errors in such directions decay within some
// chunks.

#include "gradients.cuh"

namespace quasar::scan {

// Fragments of an upper triangular matrix [16, 16]: its upper half, and its lower right block.
struct UpperTriangle {
  float4 upper[32];
  float2 corner[32];
};

struct GradientTiles {
  uint4 keys[2][WALK_TILE_BYTES / 16], queries[2][WALK_TILE_BYTES / 16];
  uint4 outputs[2][WALK_PANEL_BYTES / 16];  // dO, overwritten by dv
  UpperTriangle wy[WALK_WARPS];             // -(A diag(a))^T
  UpperTriangle scores[WALK_WARPS];         // scale tril(Q K^T)^T
};

struct GradientShared : GradientTiles, DecaySlots<WALK_WARPS> {
  u64 full[2], outputs_full[2];
};

__device__ __forceinline__ void store_triangle(UpperTriangle& out, const float (&x)[2][4],
                                               int lane) {
  out.upper[lane] =
      make_float4(to_tf32(x[0][0]), to_tf32(x[0][1]), to_tf32(x[1][0]), to_tf32(x[1][1]));
  out.corner[lane] = make_float2(to_tf32(x[1][2]), to_tf32(x[1][3]));
}

// d += x triangle^T in tf32; the triangle's block (1, 0) is zero
__device__ __forceinline__ void multiply_upper(float (&d)[2][4], const float (&x)[2][4],
                                               float4 upper, float2 corner) {
  mma_tf32(d[0], x[0], upper.x, upper.y);
  mma_tf32(d[1], x[1], corner.x, corner.y);
  mma_tf32(d[0], x[1], upper.z, upper.w);
}

// computes both triangles of this warp's chunk
template <Scalar T>
__device__ __forceinline__ void prepare_gradient(u32 keys, u32 queries, const Steps& steps,
                                                 float scale, const BlockMasks& mask,
                                                 UpperTriangle& wy, UpperTriangle& scores,
                                                 ChunkDecays& chunk_decays, int lane) {
  ChunkKeys at = {};
  float P[2][4] = {};  // transposed
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      u32 k[4], q[4];
      load_rows(k, row_address(keys + p * WALK_PANEL_BYTES, lane) ^ 32 * t);
      load_rows(q, row_address(queries + p * WALK_PANEL_BYTES, lane) ^ 32 * t);
      add_products<T>(at.gram, k, k);
      add_products<T>(P, k, q);
    }
  compute_step_sizes(at, steps, lane);
#pragma unroll
  for (int e = 0; e < 2; ++e)
    if (2 * (lane & 3) + e < lane >> 2) P[0][e] = P[1][2 + e] = 0.f;
  if (scale != 1.f) {
#pragma unroll
    for (int e = 0; e < 4; ++e) P[0][e] *= scale, P[1][e] *= scale;
  }
  const Decays decays(steps, lane);
  decays.apply<true>(P);
  chunk_decays.store(decays, lane);
  store_triangle(scores, P, lane);
  float columns[2][2], wy_matrix[2][4];
  rows_to_columns(at.root, columns, lane);
  scale_by_roots(at.gram, at.root, columns);
  u32 inverse[3];
  invert_transposed(at.gram, mask, inverse);
  unpack<Scalar::fp16>(inverse[0], wy_matrix[0][0], wy_matrix[0][1]);
  unpack<Scalar::fp16>(inverse[1], wy_matrix[1][0], wy_matrix[1][1]);
  unpack<Scalar::fp16>(inverse[2], wy_matrix[1][2], wy_matrix[1][3]);
  wy_matrix[0][2] = wy_matrix[0][3] = 0.f;
  scale_by_roots(wy_matrix, at.root, columns);
  decays.apply<true>(wy_matrix);
  store_triangle(wy, wy_matrix, lane);
}

// Updates the columns of dS with one chunk; unless MAP, overwrites its dO by its dv.
template <Scalar T, bool MAP>
__device__ __forceinline__ void walk_outputs(WalkState& state, u32 keys, u32 queries, u32 outputs,
                                             const UpperTriangle& wy, const UpperTriangle& scores,
                                             const ChunkDecays& chunk_decays, float scale,
                                             int lane) {
  const auto decays = chunk_decays.load(lane);
  float O[COLUMN_BLOCKS][2][4], read[COLUMN_BLOCKS][2][4];
  u32 o[COLUMN_BLOCKS][4], v[COLUMN_BLOCKS][4];  // dO^T and -dv^T as operands
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; ++b) {
    u32 x[4];
    load_columns(x, outputs ^ 32 * b);
    o[b][0] = x[0], o[b][1] = x[2], o[b][2] = x[1], o[b][3] = x[3];
    unpack_columns<T>(x, O[b]);
    if (DECAY || scale != 1.f) {
      float scaled[2][4] = {
          {scale * O[b][0][0], scale * O[b][0][1], scale * O[b][0][2], scale * O[b][0][3]},
          {scale * O[b][1][0], scale * O[b][1][1], scale * O[b][1][2], scale * O[b][1][3]}};
      decays.scale_before(scaled[0], scaled[1]);
      pack_tiles<T>(o[b], scaled[0], scaled[1]);
    }
  }
  const float4 m = wy.upper[lane], s = scores.upper[lane];
  const float2 m_corner = wy.corner[lane], s_corner = scores.corner[lane];
  finish_state<COLUMN_BLOCKS>(state);
  read_keys<T, !MAP>(state, read, keys, lane);
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; ++b) decays.scale_after(read[b][0], read[b][1]);
  for_each_state_element(state, [&](float& x) { chunk_decays.scale_state(x); });
  open_products();
  add_rows<T>(state, o, queries, lane);
  close_products();
  float V[COLUMN_BLOCKS][2][4] = {};  // -dv^T
#pragma unroll
  for (int b = 0; b < COLUMN_BLOCKS; ++b) {
    multiply_upper(read[b], O[b], s, s_corner);
    multiply_upper(V[b], read[b], m, m_corner);
    float entering[2][4];  // -dv^T, decayed to the chunk's begin
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) entering[n][e] = V[b][n][e];
    decays.scale_before(entering[0], entering[1]);
    pack_tiles<T>(v[b], entering[0], entering[1]);
  }
  open_products();
  add_rows<T>(state, v, keys, lane);
  close_products();
  if (!MAP) {
#pragma unroll
    for (int b = 0; b < COLUMN_BLOCKS; ++b)
      store_output<T>(outputs ^ 32 * b, 1.f, V[b][0], V[b][1], lane);
  }
}

// The number of tokens from a segment's begin, in whole tiles, that the map must include. The decay
// from later tokens to the begin is below 2^-126, so it is zero in fp32, as in the forward pass's
// map. Every warp computes the number. It is the whole segment if the decays are so weak that the
// search would take long.
__device__ __forceinline__ int tokens_until_faded(const GradientArguments& arg,
                                                  const Segment& segment, int head, int lane) {
  constexpr float FADED = -126.f / 1.44269504f;
  constexpr int STEP = 32 * CHUNK;
  const float* decay = arg.decay + entry_of(arg, segment, head, 0);
  float before = 0.f;  // the log decay of the tokens before `begin`
  int begin = 0;
  // goes on only while the tokens so far suggest that half of the segment is enough
  for (; begin < segment.tokens && before * segment.tokens <= 2 * FADED * begin; begin += STEP) {
    const int token = begin + lane * CHUNK;
    float sum = 0.f;  // of 16 tokens
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
      if (token + i < segment.tokens) sum += decay[(i64)(token + i) * arg.heads];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float earlier = __shfl_up_sync(ALL, sum, step);
      if (lane >= step) sum += earlier;
    }
    // lane 32 - faded is the first one with tokens after which everything has faded
    const int faded = (int)__reduce_max_sync(ALL, before + sum < FADED ? 32 - lane : 0);
    if (faded) {
      const int end = begin + (33 - faded) * CHUNK;
      return min((end + WALK_TOKENS - 1) / WALK_TOKENS * WALK_TOKENS, segment.tokens);
    }
    before += __shfl_sync(ALL, sum, 31);
  }
  return segment.tokens;
}

template <Scalar T, bool MAP>
__device__ __forceinline__ void walk_gradient(const GradientArguments& arg,
                                              const GradientMaps& maps) {
  extern __shared__ __align__(1024) uint4 raw[];
  GradientShared& shared = *(GradientShared*)raw;
  const int unit = blockIdx.x / PANELS, panel = blockIdx.x % PANELS;
  const int head = unit % arg.heads, lane = threadIdx.x & 31;
  const int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0);  // uniform to the compiler
  Segment segment = find_segment(arg, unit / arg.heads);
  if (MAP && segment.is_first) return;  // no segment precedes a sequence's first one
  if constexpr (MAP && DECAY) {
    const int kept = arg.omits ? tokens_until_faded(arg, segment, head, lane) : segment.tokens;
    if (kept < segment.tokens) segment.tokens = kept, segment.is_last = false;  // zero after them
  }
  const StepSizes steps(arg, segment, head, lane);
  const BlockMasks mask(lane);
  const int tiles = (segment.tokens + WALK_TOKENS - 1) / WALK_TOKENS;
  const int column = panel * PANEL + warp * COLUMN_BLOCKS * 16;  // the first of this warp's
  const i64 own = (segment.sequence * arg.heads + head) * S * S;

  const u32 keys = shared_address(shared.keys), queries = shared_address(shared.queries);
  const u32 outputs = shared_address(shared.outputs);
  const Tiles k(maps.k, arg.k, arg.k_stride, segment, key_head(arg, head), warp, lane);
  const Tiles q(maps.q, arg.q, arg.q_stride, segment, key_head(arg, head), warp, lane);
  const Tiles d_o(maps.d_o, arg.d_o, arg.o_stride, segment, head, warp, lane);
  const Tiles dv(maps.dv, arg.dv, arg.o_stride, segment, head, warp, lane);
  const Pipeline<2> pipeline{shared_address(shared.full)};
  const Pipeline<2> outputs_pipeline{shared_address(shared.outputs_full)};
  if (threadIdx.x == 0) {
    pipeline.init(1);
    outputs_pipeline.init(1);
  }
  __syncthreads();

  // step s processes the s-th tile from the end
  auto token = [&](int s) { return (tiles - 1 - s) * WALK_TOKENS; };
  auto load_keys_queries = [&](int s) {
    if (s < tiles && Tiles::copied_by(warp)) {
      const int stage = s & 1;
      pipeline.producer_expect(stage, 2 * WALK_TILE_BYTES);
#pragma unroll
      for (int p = 0; p < PANELS; ++p) {
        const u32 to = stage * WALK_TILE_BYTES + p * WALK_PANEL_BYTES;
        k.load(keys + to, token(s), p * PANEL, pipeline, stage);
        q.load(queries + to, token(s), p * PANEL, pipeline, stage);
      }
    }
    pipeline.producer_commit();
  };
  auto load_outputs = [&](int s) {
    if (s < tiles && Tiles::copied_by(warp)) {
      const int stage = s & 1;
      outputs_pipeline.producer_expect(stage, WALK_PANEL_BYTES);
      d_o.load(outputs + stage * WALK_PANEL_BYTES, token(s), panel * PANEL, outputs_pipeline,
               stage);
    }
    outputs_pipeline.producer_commit();
  };
  load_keys_queries(0);
  load_outputs(0);
  Steps next_steps = steps.of(token(0) + warp * CHUNK);  // those of the next tile

  WalkState state;  // dS^T
  const float* enter = segment.is_last ? (arg.d_final ? arg.d_final + own : nullptr)
                       : MAP           ? nullptr
                                       : arg.d_states + ((i64)unit + arg.heads) * S * S;
  for_each_place(state, column, lane, [&](int at, float& x) { x = enter ? enter[at] : 0.f; });

  const u32 own_columns = row_address(outputs, lane) ^ 32 * warp * COLUMN_BLOCKS;
  // whether another sequence may begin in the last tile
  const bool runs_over = Tiles::RUN_OVER && arg.table && segment.tokens % WALK_TOKENS;
  auto store = [&](int s) {  // the tile of step s, after a barrier of the block
    const u32 from = outputs + (s & 1) * WALK_PANEL_BYTES;
    if (runs_over && s == 0) {
      Rows(arg.dv, arg.o_stride, segment, head, lane)
          .store(from + warp * CHUNK_BYTES, token(s) + warp * CHUNK, panel * PANEL);
    } else if (Tiles::copied_by(warp)) {
      dv.store(from, token(s), panel * PANEL);
    }
  };
  for (int s = 0; s < tiles; ++s) {
    const int stage = s & 1;
    const u32 parity = s >> 1 & 1;
    const u32 at = stage * WALK_TILE_BYTES, outputs_at = stage * WALK_PANEL_BYTES;
    pipeline.template consumer_wait<1>(stage, parity);
    if (runs_over && s == 0) {
      outputs_pipeline.template consumer_wait<0>(stage, parity);
      const int left = segment.tokens - token(s) - warp * CHUNK;
      const u32 chunk = warp * CHUNK_BYTES;
#pragma unroll
      for (int p = 0; p < PANELS; ++p) {
        clear_rows(keys + at + p * WALK_PANEL_BYTES + chunk, left, lane);
        clear_rows(queries + at + p * WALK_PANEL_BYTES + chunk, left, lane);
      }
      clear_rows(outputs + outputs_at + chunk, left, lane);
    }
    fence_proxy_async();
    __syncthreads();
    if (!MAP && s) store(s - 1);
    load_keys_queries(s + 1);
    prepare_gradient<T>(keys + at + warp * CHUNK_BYTES, queries + at + warp * CHUNK_BYTES,
                        next_steps, arg.scale, mask, shared.wy[warp], shared.scores[warp],
                        shared.decays(warp), lane);
    next_steps = steps.of(token(s + 1) + warp * CHUNK);
    if (!MAP && s == 1 && runs_over) __syncthreads();  // every warp has read its dv rows
    if (!MAP && Tiles::copied_by(warp)) dv.finish_stores();
    load_outputs(s + 1);  // overwrites dv of the previous tile
    outputs_pipeline.template consumer_wait<2>(stage, parity);
    __syncthreads();
    const int behind = token(s) + WALK_TOKENS;
    if (!MAP && behind % S == 0 && !(segment.is_last && behind >= segment.tokens))
      store_checkpoint<T, 1>(arg.dk, arg.o_stride, segment, head, behind - S, state, column, lane);
#pragma unroll
    for (int i = WALK_WARPS - 1; i >= 0; --i)
      walk_outputs<T, MAP>(state, keys + at + i * CHUNK_BYTES, queries + at + i * CHUNK_BYTES,
                           own_columns + outputs_at + i * CHUNK_BYTES, shared.wy[i],
                           shared.scores[i], shared.decays(i), arg.scale, lane);
    finish_state<COLUMN_BLOCKS>(state);
    sync_pair();
  }
  if (!MAP) {
    fence_proxy_async();
    __syncthreads();
    if (tiles > 0) {
      store(tiles - 1);
      if (Tiles::copied_by(warp)) dv.finish_stores();
    }
  }
  float* out = MAP                ? arg.d_states + (i64)unit * S * S
               : segment.is_first ? (arg.d_initial ? arg.d_initial + own : nullptr)
                                  : nullptr;
  if (out) for_each_place(state, column, lane, [&](int at, float& x) { out[at] = x; });
}

template <Scalar T>
__device__ __forceinline__ void state_gradient(const GradientArguments& arg,
                                               const GradientMaps& maps) {
  walk_gradient<T, false>(arg, maps);
}

template <Scalar T>
__device__ __forceinline__ void state_gradient_map(const GradientArguments& arg,
                                                   const GradientMaps& maps) {
  walk_gradient<T, true>(arg, maps);
}

QUASAR_LAUNCH(state_gradient, 32 * WALK_WARPS, sizeof(GradientShared), GradientArguments)
QUASAR_KERNEL(state_gradient, QUASAR_IN_PAIRS __launch_bounds__(32 * WALK_WARPS, WALK_BLOCKS),
              (const __grid_constant__ GradientArguments arg,
               const __grid_constant__ GradientMaps maps),
              (arg, maps))
QUASAR_LAUNCH(state_gradient_map, 32 * WALK_WARPS, sizeof(GradientShared), GradientArguments)
QUASAR_KERNEL(state_gradient_map, QUASAR_IN_PAIRS __launch_bounds__(32 * WALK_WARPS, WALK_BLOCKS),
              (const __grid_constant__ GradientArguments arg,
               const __grid_constant__ GradientMaps maps),
              (arg, maps))

}  // namespace quasar::scan

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
