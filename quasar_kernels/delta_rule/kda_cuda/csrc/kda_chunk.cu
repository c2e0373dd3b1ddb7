// Kimi Delta Attention: what a chunk of 64 tokens needs before the state is known.
//
// The names are those of kda_triton/forward.py: W, U, P, A, and the decayed k and q. One block
// computes one chunk of one head, each of its four warps one group of 16 tokens.
//
// Pairs of tokens in a group are divided into levels, as exponents.py explains. A lane has tokens
// g and g + 8 of its group (g = lane / 4) and four adjacent channels of each 16, which form the
// same registers of an A operand and of a B operand: products need no exchange between lanes. The
// factors of a level are products of decays, each at most 1:
//     since  from the start of a token's block of 2^level tokens to the token, the token included,
//     after  from the token to the block's end, the token excluded,
//     whole  of the block.
// A level doubles the blocks: each lane multiplies by `whole` of the neighbouring block. Pairs of
// different groups have the factor `since` of one token, `after` of the other, and `whole` of each
// group in between.

#ifndef QUASAR_HEAD
#define QUASAR_HEAD 128
#endif

#include "../../../overlay/fla/ops/quasar/cuda/csrc/fragments.cuh"

namespace quasar::kda {

constexpr int TOKENS = 64, GROUPS = TOKENS / CHUNK, THREADS = 32 * GROUPS;
constexpr int UNITS = S / 16;        // a unit has 16 channels
constexpr int COLUMNS = S / GROUPS;  // columns of W and U that a warp computes
constexpr int LEVELS = 3;            // levels of pairs among 8 tokens
constexpr int AHEAD = 2;             // units whose loads are in flight
constexpr int BLOCKS = 3;            // of a multiprocessor; four would leave too little L1 cache

// Mirrored by launch.py. Tensors are contiguous: q and k [B, T, heads / shared, S], v, g, reads,
// values, writes and queries [B, T, heads, S], beta [B, T, heads], scores and inverse
// [B, T, heads, 64]; inverse may be null. Chunk n of segment s, whose first token is t, has
// decays [t / 64 + s + n, heads, S].
struct Arguments {
  const void *q, *k, *v;
  const float *g, *beta;
  const i64* table;  // of packed sequences, [segments, 4]; otherwise null
  void *reads, *values, *writes, *queries, *scores, *inverse;
  float* decays;
  i64 T, length;                            // length: tokens of a segment
  int per_sequence, chunks, heads, shared;  // chunks: of the longest segment
  float scale;
};

// Blocks [16, 16] are stored as A operands, a lane's four registers in one uint4.
struct Shared {
  unsigned char keys[PANELS][TOKENS * ROW_BYTES];    // k times `since`, then k decayed since the
                                                     // chunk's start
  unsigned char values[PANELS][TOKENS * ROW_BYTES];  // q times `since`, then v
  uint4 after[GROUPS][UNITS][32];                    // k times `after`; later A diag(beta)
  float whole[GROUPS][S];
  uint4 inverses[GROUPS][32];  // of I + M's diagonal blocks, fp16
  uint4 below[6][32];          // M's blocks below them, fp16
};

// the place of block (a, b), b < a, in `below`; of b <= a with a + 1 for a
__device__ __forceinline__ constexpr int place(int a, int b) { return a * (a - 1) / 2 + b; }

template <Scalar T>
__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
  return T == Scalar::bf16 ? multiply_bf16(a, b) : multiply_fp16(a, b);
}

// the two numbers of x times low and high, rounded once
template <Scalar T>
__device__ __forceinline__ u32 scaled(u32 x, float low, float high) {
  float a, b;
  unpack<T>(x, a, b);
  return pack<T>(a * low, b * high);
}

__device__ __forceinline__ u32 transposed(u32 x) {
  u32 turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(x));
  return turned;
}

__device__ __forceinline__ void transpose(u32 (&out)[4], const u32 (&x)[4]) {
  out[0] = transposed(x[0]), out[1] = transposed(x[2]);
  out[2] = transposed(x[1]), out[3] = transposed(x[3]);
}

// d [16, 16] += a b^T of blocks
template <Scalar T>
__device__ __forceinline__ void add_product(float (&d)[2][4], const u32 (&a)[4],
                                            const u32 (&b)[4]) {
  mma<T>(d[0], a, b[0], b[2]);
  mma<T>(d[1], a, b[1], b[3]);
}

__device__ __forceinline__ void load_block(u32 (&out)[4], const uint4& from) {
  const uint4 x = from;
  out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w;
}
__device__ __forceinline__ void store_block(uint4& to, const u32 (&x)[4]) {
  to = make_uint4(x[0], x[1], x[2], x[3]);
}

// (I + M)^-1 of a block from -M, both fp16: the inverses of blocks of 2, 4 and 8 rows are joined by
// A <- A - A M_off A, which fills elements that were zero
__device__ __forceinline__ void invert(u32 (&A)[4], const u32 (&minus)[4], int lane) {
  constexpr Scalar H = Scalar::fp16;
  const int g = lane >> 2, c = lane & 3, x = (g ^ 2 * c) & 6;  // the same for column 2 c + 1
  const u32 one = g == 2 * c ? 0x00003c00u : g == 2 * c + 1 ? 0x3c000000u : 0u;
  const u32 pair = g == 2 * c + 1 ? 0x0000ffffu : 0u;
  A[0] = one | (minus[0] & pair), A[3] = one | (minus[3] & pair);
  A[1] = A[2] = 0;
  u32 turned[4];
  transpose(turned, minus);  // turned[1], the transposed upper right, is zero
#pragma unroll
  for (int level = 1; level <= LEVELS; ++level) {
    // the transposed M_off: row g and columns 2c, 2c + 1 are columns and rows of M
    const u32 off = x >= 1 << level && x < 2 << level && g < 2 * c ? ALL : 0u;
    const bool last = level == LEVELS;
    const u32 m[4] = {last ? 0u : turned[0] & off, 0u, last ? turned[2] : 0u,
                      last ? 0u : turned[3] & off};
    float y[2][4] = {}, z[2][4] = {};
    add_product<H>(y, A, m);
    u32 left[4], right[4];
    pack_tiles<H>(left, y[0], y[1]);
    transpose(right, A);
    add_product<H>(z, left, right);
    u32 more[4];
    pack_tiles<H>(more, z[0], z[1]);
#pragma unroll
    for (int e = 0; e < 4; ++e) A[e] |= more[e];
  }
}

// one store of 8 bytes
__device__ __forceinline__ void store_pair(void* to, u32 low, u32 high) {
  *(u64*)to = (u64)high << 32 | low;
}

// Grid: (segments * chunks * heads); the heads of a chunk are neighbours.
template <Scalar T>
__device__ __forceinline__ void kda_chunk(const Arguments& arg) {
  constexpr Scalar H = Scalar::fp16;
  extern __shared__ __align__(1024) uint4 raw[];
  Shared& shared = *(Shared*)raw;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int head = blockIdx.x % arg.heads, cell = blockIdx.x / arg.heads;
  const int number = cell % arg.chunks, segment = cell / arg.chunks;
  i64 row = 0, begin, tokens;
  if (arg.table) {
    begin = arg.table[4 * segment + 1], tokens = arg.table[4 * segment + 2];
  } else {
    row = segment / arg.per_sequence;
    begin = (segment % arg.per_sequence) * arg.length;
    tokens = arg.T - begin < arg.length ? arg.T - begin : arg.length;
  }
  if (tokens <= number * TOKENS) return;
  const int left = (int)(tokens - number * TOKENS);
  const i64 first = row * arg.T + begin + number * TOKENS;  // the chunk's first token
  const i64 own = first + CHUNK * warp + g;
  const bool inside[2] = {CHUNK * warp + g < left, CHUNK * warp + g + 8 < left};
  // 16-bit tensors are addressed in elements of this size
  typedef unsigned short Element;
  const i64 at = (own * arg.heads + head) * S + 4 * c, next = (i64)8 * arg.heads * S;
  const float* const p_g = arg.g + at;
  // A token outside of the sequence has decays of 1 and the last token's key and query. They reach
  // no other row: its step size is 0, and its rows are not stored.
  const Element *p_k[2], *p_q[2];
  float beta[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const i64 token = first + min(CHUNK * warp + g + 8 * h, left - 1);
    const i64 key = (token * (arg.heads / arg.shared) + head / arg.shared) * S + 4 * c;
    p_k[h] = (const Element*)arg.k + key, p_q[h] = (const Element*)arg.q + key;
    beta[h] = inside[h] ? arg.beta[token * arg.heads + head] : 0.f;
  }
  // the 8 x 8 blocks of a warp's rows in tiles: a lane's four channels of unit u
  auto tile_place = [&](int u, int h) {
    const int piece = (2 * (u % 4) + (c >> 1)) ^ g;
    return (u / 4) * TOKENS * ROW_BYTES + (CHUNK * warp + 8 * h + g) * ROW_BYTES + 16 * piece +
           8 * (c & 1);
  };
  uint4(&q_since)[GROUPS][UNITS][32] = *(uint4(*)[GROUPS][UNITS][32])shared.values;
  unsigned char* const keys = shared.keys[0];

  // stores a block's two columns 2c and two columns 8 + 2c of P or A, given as an A operand
  const i64 corner = ((first + g) * arg.heads + head) * TOKENS + 2 * c;
  const int step = 8 * arg.heads * TOKENS;
  auto store_matrix = [&](void* to, int a, int b, const u32(&x)[4]) {
    Element* const place = (Element*)to + corner + (i64)(2 * a) * step + CHUNK * b;
    if (CHUNK * a + g < left) *(u32*)place = x[0], *(u32*)(place + 8) = x[2];
    if (CHUNK * a + g + 8 < left) *(u32*)(place + step) = x[1], *(u32*)(place + step + 8) = x[3];
  };

  // ---- within groups ----
  struct Unit {
    uint2 k[2], q[2];
    float4 g[2];
  } coming[AHEAD];
  auto load = [&](Unit& to, int u) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      to.k[h] = *(const uint2*)(p_k[h] + 16 * u);
      to.q[h] = *(const uint2*)(p_q[h] + 16 * u);
      to.g[h] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (inside[h]) to.g[h] = *(const float4*)(p_g + h * next + 16 * u);
    }
  };
  // of the products' elements, 0 and 1 belong to k k, 2 and 3 to q k; of `self` to tokens g, g + 8
  float pairs[LEVELS][2][4] = {}, across[4] = {}, self[4] = {};
#pragma unroll
  for (int u = 0; u < AHEAD; ++u) load(coming[u], u);
#pragma unroll AHEAD
  for (int u = 0; u < UNITS; ++u) {
    u32 k[2][2], q[2][2];
    float since[2][4], after[2][4], whole[2][4];
    Unit& unit = coming[u % AHEAD];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      k[h][0] = unit.k[h].x, k[h][1] = unit.k[h].y;
      q[h][0] = unit.q[h].x, q[h][1] = unit.q[h].y;
      const float decay[4] = {unit.g[h].x, unit.g[h].y, unit.g[h].z, unit.g[h].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        since[h][e] = whole[h][e] = exp2_of(decay[e] * 1.44269504f);
        after[h][e] = 1.f;
      }
    }
    if (u + AHEAD < UNITS) load(unit, u + AHEAD);
    const u32 upper[4] = {q[0][0], 0, q[0][1], 0}, lower[4] = {0, q[1][0], 0, q[1][1]};
    mma<T>(self, upper, k[0][0], k[0][1]);
    mma<T>(self, lower, k[1][0], k[1][1]);
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) {
      const bool odd = g >> level & 1;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u32 x[2], y[2];
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          const u32 factor = pack<T>(odd ? since[h][2 * p] : after[h][2 * p],
                                     odd ? since[h][2 * p + 1] : after[h][2 * p + 1]);
          x[p] = multiply<T>(k[h][p], factor), y[p] = multiply<T>(q[h][p], factor);
        }
        const u32 both[4] = {x[0], y[0], x[1], y[1]};
        mma<T>(pairs[level][h], both, x[0], x[1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float other = __shfl_xor_sync(ALL, whole[h][e], 4 << level);
          if (odd)
            since[h][e] *= other;
          else
            after[h][e] *= other;
          whole[h][e] *= other;
        }
      }
    }
    u32 x[2], y[2], earlier[2];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const u32 factor = pack<T>(since[1][2 * p], since[1][2 * p + 1]);
      x[p] = multiply<T>(k[1][p], factor), y[p] = multiply<T>(q[1][p], factor);
      earlier[p] = multiply<T>(k[0][p], pack<T>(after[0][2 * p], after[0][2 * p + 1]));
    }
    const u32 both[4] = {x[0], y[0], x[1], y[1]};
    mma<T>(across, both, earlier[0], earlier[1]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      since[1][e] *= whole[0][e], after[0][e] *= whole[1][e];
      whole[0][e] *= whole[1][e];
    }
    if (g == 0)
      *(float4*)(shared.whole[warp] + 16 * u + 4 * c) =
          make_float4(whole[0][0], whole[0][1], whole[0][2], whole[0][3]);
    u32 q_out[4], k_out[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      u32 k_since[2];
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        k_since[p] = scaled<T>(k[h][p], since[h][2 * p], since[h][2 * p + 1]);
        q_out[2 * h + p] = scaled<T>(q[h][p], since[h][2 * p], since[h][2 * p + 1]);
        k_out[2 * h + p] = scaled<T>(k[h][p], after[h][2 * p], after[h][2 * p + 1]);
      }
      store_pair(keys + tile_place(u, h), k_since[0], k_since[1]);
    }
    store_block(q_since[warp][u][lane], q_out);
    store_block(shared.after[warp][u][lane], k_out);
  }

  u32 inverse[4];
  {
    // the blocks (0, 0), (1, 1) and (1, 0) of 8 x 8 entries of the group
    float kk[3][2], qk[3][2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 2 * c + e, x = g ^ column;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float (&one)[4] = pairs[0][h], (&two)[4] = pairs[1][h], (&four)[4] = pairs[2][h];
        kk[h][e] = x >= 4 ? four[e] : x >= 2 ? two[e] : one[e];
        qk[h][e] = x >= 4 ? four[2 + e] : x >= 2 ? two[2 + e] : one[2 + e];
        if (g <= column) kk[h][e] = 0.f, qk[h][e] = g == column ? self[2 * h + e] : 0.f;
      }
      kk[2][e] = across[e], qk[2][e] = across[2 + e];
    }
    const u32 P[4] = {pack_saturated<T>(qk[0][0] * arg.scale, qk[0][1] * arg.scale),
                      pack_saturated<T>(qk[2][0] * arg.scale, qk[2][1] * arg.scale), 0,
                      pack_saturated<T>(qk[1][0] * arg.scale, qk[1][1] * arg.scale)};
    store_matrix(arg.scores, warp, warp, P);
    const u32 minus[4] = {pack_saturated<H>(kk[0][0] * -beta[0], kk[0][1] * -beta[0]),
                          pack_saturated<H>(kk[2][0] * -beta[1], kk[2][1] * -beta[1]), 0,
                          pack_saturated<H>(kk[1][0] * -beta[1], kk[1][1] * -beta[1])};
    invert(inverse, minus, lane);
    store_block(shared.inverses[warp][lane], inverse);
  }
  __syncthreads();  // `after`, `whole` and `inverses` are complete

  // ---- between groups ----
  if (threadIdx.x < S) {
    float decay = 1.f;
#pragma unroll
    for (int b = 0; b < GROUPS; ++b) decay *= shared.whole[b][threadIdx.x];
    const i64 chunk = (row * arg.T + begin) / TOKENS + segment + number;
    arg.decays[(chunk * arg.heads + head) * S + threadIdx.x] = decay;
  }
  float kk[GROUPS - 1][2][4] = {}, qk[GROUPS - 1][2][4] = {};
#pragma unroll 1
  for (int u = 0; u < UNITS; ++u) {
    const uint2 upper = *(const uint2*)(keys + tile_place(u, 0));
    const uint2 lower = *(const uint2*)(keys + tile_place(u, 1));
    const u32 k[2][2] = {{upper.x, upper.y}, {lower.x, lower.y}};
    u32 q[4];
    load_block(q, q_since[warp][u][lane]);
    float before[4] = {1.f, 1.f, 1.f, 1.f}, behind[4] = {1.f, 1.f, 1.f, 1.f};
#pragma unroll
    for (int b = GROUPS - 1; b >= 0; --b) {
      if (b == warp) continue;
      const float4 decay = *(const float4*)(shared.whole[b] + 16 * u + 4 * c);
      if (b < warp && b < GROUPS - 1) {
        const u32 between[2] = {pack<T>(before[0], before[1]), pack<T>(before[2], before[3])};
        const u32 x[4] = {multiply<T>(k[0][0], between[0]), multiply<T>(k[1][0], between[0]),
                          multiply<T>(k[0][1], between[1]), multiply<T>(k[1][1], between[1])};
        const u32 y[4] = {multiply<T>(q[0], between[0]), multiply<T>(q[2], between[0]),
                          multiply<T>(q[1], between[1]), multiply<T>(q[3], between[1])};
        const uint4 z = shared.after[b][u][lane];
        mma<T>(kk[b][0], x, z.x, z.y);
        mma<T>(kk[b][1], x, z.z, z.w);
        mma<T>(qk[b][0], y, z.x, z.y);
        mma<T>(qk[b][1], y, z.z, z.w);
        before[0] *= decay.x, before[1] *= decay.y, before[2] *= decay.z, before[3] *= decay.w;
      } else {
        behind[0] *= decay.x, behind[1] *= decay.y, behind[2] *= decay.z, behind[3] *= decay.w;
      }
    }
    u32 write[4];
    load_block(write, shared.after[warp][u][lane]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      store_pair(keys + tile_place(u, h), scaled<T>(k[h][0], before[0], before[1]),
                 scaled<T>(k[h][1], before[2], before[3]));
      if (!inside[h]) continue;
      const i64 to = at + h * next + 16 * u;
      store_pair((Element*)arg.queries + to,
                 scaled<T>(q[2 * h], before[0] * arg.scale, before[1] * arg.scale),
                 scaled<T>(q[2 * h + 1], before[2] * arg.scale, before[3] * arg.scale));
      store_pair((Element*)arg.writes + to, scaled<T>(write[2 * h], behind[0], behind[1]),
                 scaled<T>(write[2 * h + 1], behind[2], behind[3]));
    }
  }
  const u32 zero[4] = {};
#pragma unroll
  for (int b = 0; b < GROUPS; ++b) {
    if (b == warp) continue;
    if (b > warp || b == GROUPS - 1) {
      store_matrix(arg.scores, warp, b, zero);
      if (arg.inverse) store_matrix(arg.inverse, warp, b, zero);
    } else {
      float (&x)[2][4] = kk[b], (&y)[2][4] = qk[b];
      u32 M[4], P[4];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[n][e] *= beta[e >> 1], y[n][e] *= arg.scale;
      pack_tiles<H>(M, x[0], x[1]);
      pack_tiles<T>(P, y[0], y[1]);
      store_block(shared.below[place(warp, b)][lane], M);
      store_matrix(arg.scores, warp, b, P);
    }
  }
  __syncthreads();  // `below` and the decayed keys are complete, `after` and q_since are unused

  // ---- the inverse's column of blocks below the warp's diagonal block, transposed ----
#pragma unroll
  for (u32 n = threadIdx.x; n < TOKENS * S / 8; n += THREADS) {
    const int token = n / (S / 8), piece = n % (S / 8), panel = piece / 8;
    unsigned char* const to =
        shared.values[panel] + token * ROW_BYTES + (((piece % 8) ^ (token & 7)) << 4);
    if (token < left) {
      copy16(shared_address(to),
             (const Element*)arg.v + ((first + token) * arg.heads + head) * S + 8 * piece);
    } else {
      *(uint4*)to = make_uint4(0, 0, 0, 0);
    }
  }
  commit_loads();
  uint4(&products)[10][32] = *(uint4(*)[10][32])shared.after;  // A diag(beta), by blocks
  u32 turned[GROUPS][4];
#pragma unroll
  for (int a = 0; a < GROUPS; ++a) {
    if (a < warp) continue;
    float x[2][4] = {};
    if (a == warp) {
      transpose(turned[a], inverse);
      unpack<H>(turned[a][0], x[0][0], x[0][1]);
      unpack<H>(turned[a][1], x[0][2], x[0][3]);
      unpack<H>(turned[a][2], x[1][0], x[1][1]);
      unpack<H>(turned[a][3], x[1][2], x[1][3]);
    } else {
      float sum[2][4] = {};
      u32 block[4], packed[4];
#pragma unroll
      for (int b = 0; b < GROUPS - 1; ++b) {
        if (b < warp || b >= a) continue;
        load_block(block, shared.below[place(a, b)][lane]);
        add_product<H>(sum, turned[b], block);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[n][e] = -sum[n][e];
      pack_tiles<H>(packed, sum[0], sum[1]);
      load_block(block, shared.inverses[a][lane]);
      add_product<H>(x, packed, block);
      pack_tiles<H>(turned[a], x[0], x[1]);
    }
    u32 packed[4], block[4];
    if (arg.inverse) {
      pack_tiles<T>(packed, x[0], x[1]);
      transpose(block, packed);
      store_matrix(arg.inverse, a, warp, block);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] *= beta[e >> 1];
    pack_tiles<T>(packed, x[0], x[1]);
    transpose(block, packed);
    store_block(products[place(a + 1, warp)][lane], block);
  }
  wait_loads<0>();
  __syncthreads();  // `products` and v are complete

  // ---- W = A diag(beta) k and U = A diag(beta) v: each warp computes some columns ----
  const int panel = COLUMNS * warp / PANEL, column = COLUMNS * warp % PANEL;
#pragma unroll 1
  for (int n = 0; n < 2; ++n) {
    unsigned char* const tile = n ? shared.values[panel] : shared.keys[panel];
    Element* const out = (Element*)(n ? arg.values : arg.reads);
    const u32 address = shared_address(tile);
    float sums[GROUPS][COLUMNS / 8][4] = {};
#pragma unroll
    for (int b = 0; b < GROUPS; ++b) {
      u32 right[COLUMNS / 16][4];
#pragma unroll
      for (int x = 0; x < COLUMNS / 16; ++x)
        load_columns(right[x],
                     row_address(address + b * CHUNK_BYTES, lane) ^ 2 * (column + 16 * x));
#pragma unroll
      for (int a = b; a < GROUPS; ++a) {
        u32 left_block[4];
        load_block(left_block, products[place(a + 1, b)][lane]);
#pragma unroll
        for (int x = 0; x < COLUMNS / 16; ++x) {
          mma<T>(sums[a][2 * x], left_block, right[x][0], right[x][1]);
          mma<T>(sums[a][2 * x + 1], left_block, right[x][2], right[x][3]);
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int a = 0; a < GROUPS; ++a)
#pragma unroll
      for (int x = 0; x < COLUMNS / 16; ++x) {
        u32 packed[4];
        pack_tiles<T>(packed, sums[a][2 * x], sums[a][2 * x + 1]);
        const u32 chunk = address + a * CHUNK_BYTES;
        store_rows(packed, row_address(chunk, lane) ^ 2 * (column + 16 * x), chunk, column / 16 + x,
                   lane);
      }
    __syncwarp();
    constexpr int LANES = COLUMNS / 8;  // of a row
#pragma unroll
    for (int token = lane / LANES; token < TOKENS; token += 32 / LANES) {
      const int piece = column / 8 + lane % LANES;
      if (token < left)
        *(uint4*)(out + ((first + token) * arg.heads + head) * S + PANEL * panel + 8 * piece) =
            *(const uint4*)(tile + token * ROW_BYTES + ((piece ^ (token & 7)) << 4));
    }
  }
}

QUASAR_LAUNCH(kda_chunk, THREADS, sizeof(Shared), Arguments)
QUASAR_KERNEL(kda_chunk, __launch_bounds__(THREADS, BLOCKS),
              (const __grid_constant__ Arguments arg), (arg))

}  // namespace quasar::kda

// SPDX-FileCopyrightText: 2026 The QUASAR miner authors
// SPDX-License-Identifier: MIT
