// The gradients of q and k, and beta's, for one tile of S tokens of one head.
//
// Both walks have left what a tile needs: V', dv, the state S before it and its gradient dS behind
// it. So all tiles run at once. With dP = tril(dO V'^T) and N = strict_tril(dv V'^T),
//   dQ = dO S^T + dP K
//   dK = V' dS^T - dv S^T + dP^T Q - (N + N^T) K + 2 K diag(dlambda),
// where dlambda follows from da_t = dv_t V'_t / a_t^2: as V'_t = a_t (v_t - S_(t-1)^T k_t), nothing
// else depends on a_t. Where a_t is read, that is its gradient. A warpgroup's four warps take 64 tokens, 16 each.
//
// Precision: where keys are alike, dP K is a small difference of large terms, so dP enters it as the
// sum of two operands.

#include "gradients.cuh"

// a tile of heads of 128 needs the shared memory of Hopper
#if QUASAR_WGMMA || QUASAR_HEAD == 64

namespace quasar::scan {

constexpr int INPUT_WARPS = 4 * PANELS, INPUT_BLOCKS = S > 64 ? 1 : QUASAR_WGMMA ? 3 : 2;
constexpr u32 SQUARE_BYTES = PANEL * ROW_BYTES;  // 64 rows of 64 channels
constexpr u32 MATRIX_BYTES = PANELS * PANELS * SQUARE_BYTES;

// Each matrix is squares: 64 rows (tokens, or value channels of a checkpoint) of 64 channels.
struct InputShared {
  uint4 q[MATRIX_BYTES / 16], k[MATRIX_BYTES / 16], d_o[MATRIX_BYTES / 16];
  uint4 fresh[MATRIX_BYTES / 16], dv[MATRIX_BYTES / 16];
  uint4 state[MATRIX_BYTES / 16], d_state[MATRIX_BYTES / 16];
  float d_beta[INPUT_WARPS];
  u64 arrived[2];
};

__device__ __forceinline__ u32 square(u32 matrix, int row, int column) {
  return matrix + (row * PANELS + column) * SQUARE_BYTES;
}

typedef float Rows64[8][4];           // a warp's 16 rows of a product [64, 64]
typedef u32 Operand[4][4];            // 16 rows of 64 columns
typedef Operand OperandRows[PANELS];  // 16 rows of S columns

// x's rows that this warp owns, of the 64 at `row`
__device__ __forceinline__ void load_operand(OperandRows& out, u32 x, int row, int warp, int lane) {
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t)
      load_rows(out[p][t],
                row_address(square(x, row, p) + (warp & 3) * CHUNK_BYTES, lane) ^ 32 * t);
}

#if QUASAR_WGMMA
__device__ __forceinline__ void settle_all(Rows64& d) { settle(d); }

template <int COUNT>
__device__ __forceinline__ void settle_all(Rows64 (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) settle(d[i]);
}
#endif

// d += a b^T, b a square, or d = a b^T if FIRST; under way on Hopper
template <Scalar T, bool FIRST>
__device__ __forceinline__ void add_by_rows(Rows64& d, const Operand& a, u32 b, int lane) {
#if !QUASAR_WGMMA
  if (FIRST) clear(d);
#endif
#pragma unroll
  for (int t = 0; t < 4; ++t) {
#if QUASAR_WGMMA
    const u64 columns = at_columns(tile_descriptor(b), t);
    if (FIRST && t == 0)
      wgmma_rows<T, true>(d, a[t], columns);
    else
      wgmma_rows<T>(d, a[t], columns);
#else
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 x[4];
      load_rows(x, pair_address(b + j * CHUNK_BYTES, lane) ^ 32 * t);
      mma<T>(d[2 * j], a[t], x[0], x[1]);
      mma<T>(d[2 * j + 1], a[t], x[2], x[3]);
    }
#endif
  }
}

// d += a b
template <Scalar T>
__device__ __forceinline__ void add_by_columns(Rows64& d, const Operand& a, u32 b, int lane) {
#pragma unroll
  for (int t = 0; t < 4; ++t) {
#if QUASAR_WGMMA
    wgmma_columns<T>(d, a[t], tile_descriptor(b + t * CHUNK_BYTES));
#else
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 x[4];
      load_columns(x, row_address(b + t * CHUNK_BYTES, lane) ^ 32 * j);
      mma<T>(d[2 * j], a[t], x[0], x[1]);
      mma<T>(d[2 * j + 1], a[t], x[2], x[3]);
    }
#endif
  }
}

// Wait for all products; d are accumulators of theirs.
template <class... Accumulators>
__device__ __forceinline__ void finish_products(Accumulators&... d) {
#if QUASAR_WGMMA
  warpgroup_wait<0>();
  (settle_all(d), ...);
#endif
}

// d[p] += a b over all columns of a and of d, b a matrix
template <Scalar T>
__device__ __forceinline__ void add_matrix(Rows64 (&d)[PANELS], const OperandRows& a, u32 b,
                                           int lane) {
  open_products();
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int i = 0; i < PANELS; ++i) add_by_columns<T>(d[p], a[i], square(b, i, p), lane);
  close_products();
  finish_products(d);
}

// d[p] += a b over the 64 rows of b at `row`
template <Scalar T>
__device__ __forceinline__ void add_tokens(Rows64 (&d)[PANELS], const Operand& a, u32 b, int row,
                                           int lane) {
  open_products();
#pragma unroll
  for (int p = 0; p < PANELS; ++p) add_by_columns<T>(d[p], a, square(b, row, p), lane);
  close_products();
  finish_products(d);
}

// d = a b^T, b's 64 rows at `row`
template <Scalar T>
__device__ __forceinline__ void find_scores(Rows64& d, const OperandRows& a, u32 b, int row,
                                            int lane) {
  open_products();
  add_by_rows<T, true>(d, a[0], square(b, row, 0), lane);
#pragma unroll
  for (int p = 1; p < PANELS; ++p) add_by_rows<T, false>(d, a[p], square(b, row, p), lane);
  close_products();
  finish_products(d);
}

enum class Keep { all, lower, strictly_lower, upper, strictly_upper };

// two tiles of a product's 16 rows, columns 16 t on, with zeros but where KEEP names
template <Keep KEEP>
__device__ __forceinline__ void keep_entries(float (&out)[2][4], const Rows64& x, int t,
                                             float factor, int warp, int lane) {
  const int row = (warp & 3) * 16 + (lane >> 2) - 2 * (lane & 3);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int below = row + 8 * (e >> 1) - 16 * t - 8 * n - (e & 1);  // the diagonal
      const bool keep = KEEP == Keep::all || (KEEP == Keep::lower && below >= 0) ||
                        (KEEP == Keep::strictly_lower && below > 0) ||
                        (KEEP == Keep::upper && below <= 0) ||
                        (KEEP == Keep::strictly_upper && below < 0);
      out[n][e] = keep ? factor * x[2 * t + n][e] : 0.f;
    }
}

// the same of all columns, as an operand
template <Scalar T, Keep KEEP>
__device__ __forceinline__ void pack_entries(Operand& out, const Rows64& x, float factor, int warp,
                                             int lane) {
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    float kept[2][4];
    keep_entries<KEEP>(kept, x, t, factor, warp, lane);
    pack_tiles<T>(out[t], kept[0], kept[1]);
  }
}

// the same as the sum of two operands
template <Scalar T, Keep KEEP>
__device__ __forceinline__ void split_entries(Operand& high, Operand& low, const Rows64& x,
                                              int warp, int lane) {
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    float kept[2][4];
    keep_entries<KEEP>(kept, x, t, 1.f, warp, lane);
    split<T>(kept, high[t], low[t]);
  }
}

// The diagonal's entries of rows g and g + 8 of these 16.
__device__ __forceinline__ void find_diagonal(float (&out)[2], const Rows64& x, int warp,
                                              int lane) {
  float low = 0.f, high = 0.f;
#pragma unroll
  for (int w = 0; w < 4; ++w)
    if (w == (warp & 3)) {
      low = lane & 4 ? x[2 * w][1] : x[2 * w][0];
      high = lane & 4 ? x[2 * w + 1][3] : x[2 * w + 1][2];
    }
  const int owner = (lane & 28) | (lane >> 3);  // the shuffles read the choice of the same row
  out[0] = __shfl_sync(ALL, low, owner);
  out[1] = __shfl_sync(ALL, high, owner);
}

// d alpha / d lambda and d alpha / d beta; gate.py has the derivation
__device__ __forceinline__ void step_size_slopes(float lambda, float beta, float& by_lambda,
                                                 float& by_beta) {
  const float x = beta * lambda, decay = __expf(-x), total = lambda + 1e-8f;
  float g, h;
  if (x < 0.25f) {
    g = 1.f - x / 2 * (1.f - x / 3 * (1.f - x / 4 * (1.f - x / 5 * (1.f - x / 6))));
    h = 0.5f - x * (1.f / 3 - x * (1.f / 8 - x * (1.f / 30 - x * (1.f / 144 - x / 840))));
  } else {
    g = (1.f - decay) / x;
    h = (1.f - decay * (1.f + x)) / (x * x);
  }
  const float ratio = lambda / total;
  by_lambda = beta * g * (1e-8f / total) / total - beta * beta * h * ratio;
  by_beta = decay * ratio;
}

// Fill a checkpoint's place from an fp32 state [S, S], keys' channels first, or with zeros.
template <Scalar T>
__device__ __forceinline__ void fill_checkpoint(u32 to, const float* state) {
  for (int i = threadIdx.x; i < S * S / 2; i += 32 * INPUT_WARPS) {
    const int v = i % S, k = i / S * 2;
    const u32 pair = state ? pack_saturated<T>(state[k * S + v], state[(k + 1) * S + v]) : 0;
    const u32 at = square(to, v / PANEL, k / PANEL) + v % PANEL * ROW_BYTES +
                   ((k % PANEL / 8 ^ (v & 7)) << 4) + k % 8 * 2;
    asm volatile("st.shared.u32 [%0], %1;" : : "r"(at), "r"(pair) : "memory");
  }
}

// 16 rows of S columns to where their warp's rows of a matrix are
__device__ __forceinline__ void keep_rows(u32 to, const OperandRows& x, int row, int warp,
                                          int lane) {
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const u32 chunk = square(to, row, p) + (warp & 3) * CHUNK_BYTES;
      store_rows(x[p][t], row_address(chunk, lane) ^ 32 * t, chunk, t, lane);
    }
}

#if !QUASAR_READ_STEP

// dK += 2 K diag(dlambda); returns what this lane's rows add to beta's gradient. d_values are
// dv V'^T's diagonal, K lies at `k`.
template <Scalar T>
__device__ __forceinline__ float add_step_sizes(Rows64 (&dK)[PANELS], const float (&d_values)[2],
                                                u32 k, int row, float beta, int warp, int lane) {
  OperandRows keys;
  load_operand(keys, k, row, warp, lane);
  float lambda[2] = {};
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x, y;
        unpack<T>(keys[p][t][i], x, y);
        lambda[i & 1] += x * x + y * y;
      }
  float factor[2], d_beta = 0.f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    lambda[r] += __shfl_xor_sync(ALL, lambda[r], 1);
    lambda[r] += __shfl_xor_sync(ALL, lambda[r], 2);
    const float a = step_size(lambda[r], beta);
    float by_lambda, by_beta;
    step_size_slopes(lambda[r], beta, by_lambda, by_beta);
    const float da = a > 0.f ? d_values[r] / a / a : 0.f;  // of zero keys nothing depends on a
    factor[r] = 2.f * da * by_lambda;
    d_beta += da * by_beta;
  }
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x, y;
        unpack<T>(keys[p][t][i], x, y);
        dK[p][2 * t + (i >> 1)][2 * (i & 1)] += factor[i & 1] * x;
        dK[p][2 * t + (i >> 1)][2 * (i & 1) + 1] += factor[i & 1] * y;
      }
  return d_beta;
}

#endif

// Where a tile's matrices are in shared memory.
struct TileOperands {
  u32 q, k, d_o, fresh, dv, state, d_state;
};

// dQ of the 64 tokens of this warpgroup, the ROW-th, packed
template <Scalar T, int ROW>
__device__ __forceinline__ void find_query_gradient(OperandRows& out, const TileOperands& tile,
                                                    float scale, int warp, int lane) {
  OperandRows own;
  Rows64 dQ[PANELS] = {}, x;
  load_operand(own, tile.d_o, ROW, warp, lane);
  add_matrix<T>(dQ, own, tile.state, lane);
#pragma unroll
  for (int j = 0; j <= ROW; ++j) {
    Operand high, low;
    find_scores<T>(x, own, tile.fresh, j, lane);
    if (j == ROW)
      split_entries<T, Keep::lower>(high, low, x, warp, lane);
    else
      split_entries<T, Keep::all>(high, low, x, warp, lane);
    add_tokens<T>(dQ, high, tile.k, j, lane);
    add_tokens<T>(dQ, low, tile.k, j, lane);
  }
#pragma unroll
  for (int p = 0; p < PANELS; ++p) pack_entries<T, Keep::all>(out[p], dQ[p], scale, warp, lane);
}

// -dv of this warp's rows
__device__ __forceinline__ void load_values(OperandRows& out, const TileOperands& tile, int row,
                                            int warp, int lane) {
  load_operand(out, tile.dv, row, warp, lane);
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[p][t][i] ^= 0x80008000u;
}

// dK, which has -dv S^T, gets all the rest that is products, and d_values the rows of dv . V'
template <Scalar T, int ROW>
__device__ __forceinline__ void add_key_gradient(Rows64 (&dK)[PANELS], float (&d_values)[2],
                                                 const TileOperands& tile, float scale, int warp,
                                                 int lane) {
  OperandRows own;
  Operand below, scores;
  Rows64 x;
  load_values(own, tile, ROW, warp, lane);
#pragma unroll
  for (int j = 0; j <= ROW; ++j) {
    find_scores<T>(x, own, tile.fresh, j, lane);
    if (j == ROW) {
      find_diagonal(d_values, x, warp, lane);
      d_values[0] = -d_values[0], d_values[1] = -d_values[1];
      pack_entries<T, Keep::strictly_lower>(below, x, 1.f, warp, lane);
    } else {
      pack_entries<T, Keep::all>(scores, x, 1.f, warp, lane);
      add_tokens<T>(dK, scores, tile.k, j, lane);
    }
  }
  load_operand(own, tile.fresh, ROW, warp, lane);
  add_matrix<T>(dK, own, tile.d_state, lane);
#pragma unroll
  for (int j = ROW; j < PANELS; ++j) {
    find_scores<T>(x, own, tile.d_o, j, lane);
    if (j == ROW)
      pack_entries<T, Keep::upper>(scores, x, scale, warp, lane);
    else
      pack_entries<T, Keep::all>(scores, x, scale, warp, lane);
    add_tokens<T>(dK, scores, tile.q, j, lane);
    find_scores<T>(x, own, tile.dv, j, lane);
    if (j == ROW) {
      pack_entries<T, Keep::strictly_upper>(scores, x, -1.f, warp, lane);
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[t][i] |= below[t][i];  // one of both is zero
    } else {
      pack_entries<T, Keep::all>(scores, x, -1.f, warp, lane);
    }
    add_tokens<T>(dK, scores, tile.k, j, lane);
  }
}

// One block a tile and head; `parts` of them a segment, neighbouring heads beside one another.
template <Scalar T>
__device__ __forceinline__ void input_gradient(const GradientArguments& arg,
                                               const GradientMaps& maps) {
  extern __shared__ __align__(1024) uint4 raw[];
  InputShared& shared = *(InputShared*)raw;
  const int head = blockIdx.x % arg.heads, lane = threadIdx.x & 31;
  const int index = blockIdx.x / arg.heads / arg.parts, tile = blockIdx.x / arg.heads % arg.parts;
  const int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0);  // known to be the same in all lanes
  const int row = S == 64 ? 0 : warp / 4;                  // this warpgroup's 64 rows
  const Segment segment = find_segment(arg, index);
  const int first = tile * S, left = segment.tokens - first;
  if (left <= 0) {
#if !QUASAR_READ_STEP
    if (threadIdx.x == 0) arg.d_beta[blockIdx.x] = 0.f;
#endif
    return;
  }
#if QUASAR_READ_STEP
  const int token = first + warp * CHUNK;
  const Steps steps = StepSizes(arg, segment, head, lane).of(token);
#else
  const float beta = arg.beta[head];
#endif
  const i64 own = (segment.sequence * arg.heads + head) * S * S;
  const bool starts = segment.is_first && tile == 0, ends = segment.is_last && left <= S;
  const TileOperands at = {shared_address(shared.q),      shared_address(shared.k),
                           shared_address(shared.d_o),    shared_address(shared.fresh),
                           shared_address(shared.dv),     shared_address(shared.state),
                           shared_address(shared.d_state)};

  // one warp copies for all, or each warp of a warpgroup its chunk of that one's rows; what dQ needs
  // comes first
  const Arrivals<2> arrivals{shared_address(shared.arrived)};
  if (threadIdx.x == 0) arrivals.init(1);
  __syncthreads();
  const bool copies = !Tiles::RUN_OVER || warp == 0;
  auto copy = [&](const TensorMap& map, const void* x, const i64(&stride)[3], u32 to, int token,
                  int stage) {
    const Tiles from(map, x, stride, segment, head, warp & 3, lane);
#pragma unroll
    for (int r = 0; r < PANELS; ++r)
      if (Tiles::RUN_OVER || r == row)
#pragma unroll
        for (int p = 0; p < PANELS; ++p)
          from.load(square(to, r, p), token + r * PANEL, p * PANEL, arrivals, stage);
  };
  if (copies) {
    arrivals.open(0, (3 + !starts) * MATRIX_BYTES);
    copy(maps.d_o, arg.d_o, arg.o_stride, at.d_o, first, 0);
    copy(maps.dq, arg.dq, arg.o_stride, at.fresh, first, 0);
    copy(maps.k, arg.k, arg.k_stride, at.k, first, 0);
    if (!starts) copy(maps.checkpoints, arg.checkpoints, arg.o_stride, at.state, first - S, 0);
  }
  arrivals.close();
  if (copies) {
    arrivals.open(1, (2 + !ends) * MATRIX_BYTES);
    copy(maps.dv, arg.dv, arg.o_stride, at.dv, first, 1);
    copy(maps.q, arg.q, arg.q_stride, at.q, first, 1);
    if (!ends) copy(maps.dk, arg.dk, arg.o_stride, at.d_state, first, 1);
  }
  arrivals.close();
  if (starts) fill_checkpoint<T>(at.state, arg.initial_state ? arg.initial_state + own : nullptr);
  if (ends) fill_checkpoint<T>(at.d_state, arg.d_final ? arg.d_final + own : nullptr);
  // where another sequence follows in the tile
  const bool runs_over = Tiles::RUN_OVER && arg.table && left < S;
  auto clear = [&](u32 matrix) {
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
      clear_rows(square(matrix, row, p) + (warp & 3) * CHUNK_BYTES, left - warp * CHUNK, lane);
  };
  arrivals.template wait<1>(0, 0);
  if (runs_over) clear(at.d_o), clear(at.fresh), clear(at.k);
  publish_shared();
  __syncthreads();

  const bool lower = S > 64 && row > 0;  // the same in a warpgroup
  OperandRows rows;
  if (lower)
    find_query_gradient<T, PANELS - 1>(rows, at, arg.scale, warp, lane);
  else
    find_query_gradient<T, 0>(rows, at, arg.scale, warp, lane);
  arrivals.template wait<0>(1, 0);
  if (runs_over) clear(at.dv), clear(at.q);
  publish_shared();
  __syncthreads();
  Rows64 dK[PANELS] = {};
  {
    OperandRows values;
    load_values(values, at, row, warp, lane);
    add_matrix<T>(dK, values, at.state, lane);
  }
  __syncthreads();  // all products with the state are done, whose place dQ takes
  keep_rows(at.state, rows, row, warp, lane);
  float d_values[2];
  if (lower)
    add_key_gradient<T, PANELS - 1>(dK, d_values, at, arg.scale, warp, lane);
  else
    add_key_gradient<T, 0>(dK, d_values, at, arg.scale, warp, lane);
#if QUASAR_READ_STEP
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int place = token + (lane >> 2) + 8 * r;
    const float a = steps.size[r];
    if ((lane & 3) == 0 && place < segment.tokens)
      arg.d_beta[(segment.row * arg.heads + head) * arg.T + segment.begin + place] =
          a > 0.f ? d_values[r] / a / a : 0.f;
  }
#else
  float d_beta = add_step_sizes<T>(dK, d_values, at.k, row, beta, warp, lane);
#endif
#pragma unroll
  for (int p = 0; p < PANELS; ++p) pack_entries<T, Keep::all>(rows[p], dK[p], 1.f, warp, lane);
#if !QUASAR_READ_STEP
  // a row's lanes have the same: one of them counts
  d_beta = lane & 3 ? 0.f : d_beta;
#pragma unroll
  for (int i = 4; i < 32; i *= 2) d_beta += __shfl_xor_sync(ALL, d_beta, i);
  if (lane == 0) shared.d_beta[warp] = d_beta;
#endif
  __syncthreads();  // the same of dS and dK
  keep_rows(at.d_state, rows, row, warp, lane);
  publish_shared();
  __syncthreads();
#if !QUASAR_READ_STEP
  if (threadIdx.x == 0) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < INPUT_WARPS; ++w) sum += shared.d_beta[w];
    arg.d_beta[blockIdx.x] = sum;
  }
#endif
  auto store = [&](const TensorMap& map, void* x, u32 from) {
    if (runs_over || !Tiles::RUN_OVER) {
      const Rows to(x, arg.o_stride, segment, head, lane);
#pragma unroll
      for (int p = 0; p < PANELS; ++p)
        to.store(square(from, row, p) + (warp & 3) * CHUNK_BYTES, first + warp * CHUNK, p * PANEL);
    } else if (warp == 0) {
      const Tiles to(map, x, arg.o_stride, segment, head, warp & 3, lane);
#pragma unroll
      for (int r = 0; r < PANELS; ++r)
#pragma unroll
        for (int p = 0; p < PANELS; ++p) to.store(square(from, r, p), first + r * PANEL, p * PANEL);
      to.finish_stores();
    }
  };
  store(maps.dq, arg.dq, at.state);
  store(maps.dk, arg.dk, at.d_state);
}

QUASAR_LAUNCH(input_gradient, 32 * INPUT_WARPS, sizeof(InputShared), GradientArguments)
QUASAR_KERNEL(input_gradient, __launch_bounds__(32 * INPUT_WARPS, INPUT_BLOCKS),
              (const __grid_constant__ GradientArguments arg,
               const __grid_constant__ GradientMaps maps),
              (arg, maps))

}  // namespace quasar::scan

#endif
