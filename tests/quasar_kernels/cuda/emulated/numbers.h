// PTX arithmetic on a CPU: pairs of 16-bit numbers in a register, approximations, and the products of
// a warp, which are rounded only at their end.

#pragma once

#include "threads.h"

inline u16 rounded(bool bf16, float x) {
  if (!bf16) return bits_as<u16>((_Float16)x);
  const u32 bits = bits_as<u32>(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float widened(bool bf16, u16 x) {
  return bf16 ? bits_as<float>((u32)x << 16) : (float)bits_as<_Float16>(x);
}

template <bool BF16>
void pack_pair(u32& out, float high, float low) {
  out = rounded(BF16, low) | (u32)rounded(BF16, high) << 16;
}
// the same with saturation; NaN stays NaN
template <bool BF16>
void pack_finite_pair(u32& out, float high, float low) {
  const float most = BF16 ? 0x1.fep127f : 65504.f;
  float x[2] = {low, high};
  for (float& one : x)
    if (one > most) one = most;
    else if (one < -most) one = -most;
  pack_pair<BF16>(out, x[1], x[0]);
}
template <bool BF16>
void unpack_pair(float& low, float& high, u32 x) {
  low = widened(BF16, (u16)x), high = widened(BF16, x >> 16);
}
// a <- a b; the ignored addend of fma is -0
template <bool BF16>
void multiply_pair(u32& a, u32 b, u32 = 0) {
  float x, y, z, w;
  unpack_pair<BF16>(x, y, a), unpack_pair<BF16>(z, w, b);
  pack_pair<BF16>(a, y * w, x * z);
}
// c <- c + a b, rounded once
template <bool BF16>
void add_product_pair(u32& c, u32 a, u32 b) {
  float x, y, z, w, u, v;
  unpack_pair<BF16>(x, y, a), unpack_pair<BF16>(z, w, b), unpack_pair<BF16>(u, v, c);
  pack_pair<BF16>(c, (float)((double)y * w + v), (float)((double)x * z + u));
}
// the lesser of both, or the greater; NaN stays NaN
template <bool LESSER>
void choose_pair(u32& a, u32 b) {
  float x[2], y[2];
  unpack_pair<false>(x[0], x[1], a), unpack_pair<false>(y[0], y[1], b);
  for (int i = 0; i < 2; ++i)
    if (LESSER ? y[i] < x[i] : y[i] > x[i]) x[i] = y[i];
  pack_pair<false>(a, x[1], x[0]);
}

// subnormal numbers become zero (.ftz)
inline float flushed(float x) { return fabsf(x) < FLT_MIN ? 0 * x : x; }
inline void find_exp2(float& out, float x) { out = flushed(exp2f(x)); }
inline void find_inverse(float& out, float x) { out = flushed(1 / flushed(x)); }
inline void find_root(float& out, float x) { out = sqrtf(flushed(x)); }
inline void find_inverse_root(float& out, float x) { out = flushed(1 / sqrtf(flushed(x))); }
inline void find_tanh(float& out, float x) { out = tanhf(x); }

// ---- products: PTX ISA, "Matrix Fragments"; g = lane / 4, c = lane % 4 ----

struct Product {
  float* d[4];
  float a[4][2], b[2][2];
};

// d [16, 8] += a b; place_a and place_b write an element of a lane's registers into a matrix
template <int DEPTH, class PlaceA, class PlaceB>
void product(Product& own, const PlaceA& place_a, const PlaceB& place_b) {
  with_warp(own, [&](Product** all) {
    float a[16][DEPTH] = {}, b[8][DEPTH] = {};  // b transposed
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, c = lane % 4;
      for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e) place_a(a, g, c, i, e, all[lane]->a[i][e]);
      for (int i = 0; i < 2; ++i)
        for (int e = 0; e < 2; ++e) place_b(b, g, c, i, e, all[lane]->b[i][e]);
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int e = 0; e < 4; ++e) {
        const float *x = a[lane / 4 + 8 * (e / 2)], *y = b[2 * (lane % 4) + e % 2];
        double sum = *all[lane]->d[e];
        for (int k = 0; k < DEPTH; ++k) sum += (double)x[k] * y[k];
        // a GPU's NaN has these bits; a CPU's would survive integer arithmetic that loses them
        *all[lane]->d[e] = sum == sum ? (float)sum : bits_as<float>(0x7fffffffu);
      }
  });
}

// m16n8k16
template <bool BF16>
void product16(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
               u32 b1) {
  Product own{{&d0, &d1, &d2, &d3}, {}, {}};
  const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  for (int i = 0; i < 4; ++i) unpack_pair<BF16>(own.a[i][0], own.a[i][1], a[i]);
  for (int i = 0; i < 2; ++i) unpack_pair<BF16>(own.b[i][0], own.b[i][1], b[i]);
  product<16>(
      own,
      [](auto& m, int g, int c, int i, int e, float x) {
        m[g + 8 * (i % 2)][2 * c + e + 8 * (i / 2)] = x;
      },
      [](auto& m, int g, int c, int i, int e, float x) { m[g][2 * c + e + 8 * i] = x; });
}

// m16n8k8: the same with zeros in a2, a3 and b1
template <bool BF16>
void product8(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 b0) {
  product16<BF16>(d0, d1, d2, d3, a0, a1, 0, 0, b0, 0);
}

// m16n8k8 of tf32, to which the hardware truncates
inline void product_tf32(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3,
                         u32 b0, u32 b1) {
  auto cut = [](u32 x) { return bits_as<float>(x & 0xffffe000u); };
  Product own{{&d0, &d1, &d2, &d3}, {{cut(a0)}, {cut(a1)}, {cut(a2)}, {cut(a3)}},
              {{cut(b0)}, {cut(b1)}}};
  product<8>(
      own,
      [](auto& m, int g, int c, int i, int e, float x) {
        if (e == 0) m[g + 8 * (i % 2)][c + 4 * (i / 2)] = x;
      },
      [](auto& m, int g, int c, int i, int e, float x) {
        if (e == 0) m[g][c + 4 * i] = x;
      });
}
