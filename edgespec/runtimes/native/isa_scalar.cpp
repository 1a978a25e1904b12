// The specification: 16 lanes in plain C++.  Every other isa_*.cpp file defines the same types and functions.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "fused.h"
#include "ggml.h"
#include "half.h"
#include "kernels.h"

namespace edgespec {
namespace {

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};
struct B {
  uint8_t v[64];
};

template <class Function>
inline F each(Function f) {
  F y;
  for (int i = 0; i < 16; ++i) y.v[i] = f(i);
  return y;
}

// ---- float32 -------------------------------------------------------------------------------------------------------
inline F fset(float x) {
  return each([&](int) { return x; });
}
inline F fload(const float* p) {
  return each([&](int i) { return p[i]; });
}
inline F fload_n(const float* p, int n) {
  return each([&](int i) { return i < n ? p[i] : 0.f; });
}
inline F fload_half(const uint16_t* p) {
  return each([&](int i) { return half_to_float(p[i]); });
}
inline F fload_u16(const uint16_t* p) {
  return each([&](int i) { return static_cast<float>(p[i]); });
}
inline void fstore(float* p, const F& x) { std::memcpy(p, x.v, sizeof x.v); }
inline void fstore_n(float* p, const F& x, int n) {
  if (n > 0) std::memcpy(p, x.v, size_t(n) * 4);
}
inline void fstore_half(uint16_t* p, const F& x) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(x.v[i]);
}
inline F fadd(const F& a, const F& b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline F fsub(const F& a, const F& b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline F fmul(const F& a, const F& b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline F fdiv(const F& a, const F& b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline F fma(const F& a, const F& b, const F& c) {
  return each([&](int i) { return fused(a.v[i], b.v[i], c.v[i]); });
}
inline F fnma(const F& a, const F& b, const F& c) {
  return each([&](int i) { return fused(-a.v[i], b.v[i], c.v[i]); });
}
inline F fmax(const F& a, const F& b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline float larger_size(float a, float b) {
  uint32_t x, y;
  std::memcpy(&x, &a, 4);
  std::memcpy(&y, &b, 4);
  return x > y ? a : b;
}
// The larger of numbers that are not negative, by their bits: a NaN is larger than all of them.
inline F fmax_size(const F& a, const F& b) {
  return each([&](int i) { return larger_size(a.v[i], b.v[i]); });
}
inline F fabs_(const F& a) {
  return each([&](int i) { return std::fabs(a.v[i]); });
}
inline F fneg(const F& a) {
  return each([&](int i) { return -a.v[i]; });
}
inline F fround(const F& a) {
  return each([&](int i) { return std::nearbyint(a.v[i]); });
}
// a * 2^r for whole r in -126 to 127; NaN where a is
inline F fscale2(const F& a, const F& r) {
  return each([&](int i) { return std::ldexp(a.v[i], std::fabs(r.v[i]) < 128 ? static_cast<int>(r.v[i]) : 0); });
}
// a where x >= 0, else b
inline F fpositive(const F& x, const F& a, const F& b) {
  return each([&](int i) { return x.v[i] >= 0 ? a.v[i] : b.v[i]; });
}
// 0 where key < limit, else x: also where key is NaN
inline F fzero_below(const F& x, const F& key, float limit) {
  return each([&](int i) { return key.v[i] < limit ? 0.f : x.v[i]; });
}
// Whether any number is not at most the limit: larger or NaN.
inline bool fexceeds(const F& x, float limit) {
  return std::any_of(x.v, x.v + 16, [&](float v) { return !(v <= limit); });
}
// Sums and maxima halve the lanes: i and i + 8, then + 4, + 2, + 1.
inline float fsum(F a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  return a.v[0];
}
inline float flargest(F a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  return a.v[0];
}
inline float flargest_size(F a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = larger_size(a.v[i], a.v[i + half]);
  return a.v[0];
}

// ---- int32 and bytes -----------------------------------------------------------------------------------------------
inline I iset(int32_t x) {
  I y;
  for (int32_t& v : y.v) v = x;
  return y;
}
// Sums wrap, as those of vectors: what has become of a NaN is the smallest number of all.
inline int32_t wrapped(int32_t a, int32_t b) { return static_cast<int32_t>(uint32_t(a) + uint32_t(b)); }
inline I iadd(const I& a, const I& b) {
  I y;
  for (int i = 0; i < 16; ++i) y.v[i] = wrapped(a.v[i], b.v[i]);
  return y;
}
inline int32_t isum(const I& a) {
  int32_t sum = 0;
  for (int32_t v : a.v) sum = wrapped(sum, v);
  return sum;
}
inline F itof(const I& a) {
  return each([&](int i) { return static_cast<float>(a.v[i]); });
}
inline I ftoi(const F& a) {
  I y;
  for (int i = 0; i < 16; ++i) {
    const float x = std::nearbyint(a.v[i]);
    y.v[i] = x >= -0x1p31f && x < 0x1p31f ? static_cast<int32_t>(x) : INT32_MIN;
  }
  return y;
}
inline void istore_s8(int8_t* p, const I& a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}
inline B bload(const uint8_t* p) {
  B y;
  std::memcpy(y.v, p, 64);
  return y;
}
inline B blow(const B& a) {
  B y;
  for (int i = 0; i < 64; ++i) y.v[i] = a.v[i] & 15;
  return y;
}
// bytes of their nibbles
inline B bjoin(const B& high, const B& low) {
  B y;
  for (int i = 0; i < 64; ++i) y.v[i] = static_cast<uint8_t>(high.v[i] << 4 | low.v[i]);
  return y;
}
inline B bhigh(const B& a) {
  B y;
  for (int i = 0; i < 64; ++i) y.v[i] = a.v[i] >> 4;
  return y;
}
// lane c: acc + sum over i < 4 of unsigned x[4 c + i] * four[i]
inline I dot_u8(const I& acc, const B& x, const int8_t* four) {
  I y = acc;
  for (int c = 0; c < 16; ++c)
    for (int i = 0; i < 4; ++i) y.v[c] = wrapped(y.v[c], int32_t(x.v[c * 4 + i]) * four[i]);
  return y;
}
// the same with signed x; four is never negative
inline I dot_s8(const I& acc, const B& x, const int8_t* four) {
  I y = acc;
  for (int c = 0; c < 16; ++c)
    for (int i = 0; i < 4; ++i) y.v[c] = wrapped(y.v[c], int32_t(static_cast<int8_t>(x.v[c * 4 + i])) * four[i]);
  return y;
}

// out[q][token] = sum over sub-vectors of the table's entry for the token's code; entries have 7 bits
template <int Q>
void nomad_sums(const uint8_t* codes, int subs, const uint8_t* const* tables, uint16_t (*out)[kKvBlock]) {
  for (int q = 0; q < Q; ++q)
    for (int token = 0; token < kKvBlock; ++token) {
      const int in_half = token & 63, byte = (in_half & 31) * 2 + (in_half >> 5);
      unsigned sum = 0;
      for (int m = 0; m < subs; ++m) {
        const uint8_t code = codes[size_t(m) * 64 + byte];
        sum += tables[q][m * 16 + (token < 64 ? code & 15 : code >> 4)];
      }
      out[q][token] = static_cast<uint16_t>(sum);
    }
}

// Operand of k_dots.
struct Roof {
  int32_t v;
};
constexpr int kRoofMacs = 1;
inline Roof roof_start() { return {1}; }
inline void roof_step(Roof& sum, const Roof& x) {
  sum.v += x.v * x.v;
  asm volatile("" : "+r"(sum.v));
}

// ---- matrices ------------------------------------------------------------------------------------------------------

inline void put(const F& acc, float* y, int columns) { fstore_n(y, acc, columns); }

template <Kind kind>
void linear_blocks(Weights w, int k, const void* act, int rows, float* y, size_t ld, int columns) {
  constexpr bool four = kind == kQ4;
  constexpr size_t payload = payload_bytes(kind);
  const Act* a = static_cast<const Act*>(act);
  for (int r = 0; r < rows; ++r) {
    F acc = fset(0.f);
    for (int block = 0; block < blocks_of(k); ++block) {
      const uint8_t* pair = w.high + size_t(block / 2) * (64 + 2 * payload);
      const uint8_t* q = pair + 64 + (block & 1) * payload;
      const Act& x = a[size_t(block) * rows + r];
      I sum = iset(four ? x.offset : x.offset_of_bytes());
      for (int j = 0; j < (kind == kQ8 ? 8 : 4); ++j) {
        const B v = bload(q + j * 64);
        if (kind == kQ8) {
          sum = dot_u8(sum, v, x.q + j * 4);
          continue;
        }
        B first = blow(v), second = bhigh(v);
        if (kind == kP8) {
          const B low = bload(w.low + size_t(block) * payload + j * 64);
          first = bjoin(first, blow(low));
          second = bjoin(second, bhigh(low));
        }
        sum = dot_u8(dot_u8(sum, first, x.q + j * 4), second, x.q + 16 + j * 4);
      }
      const F scales = fload_half(reinterpret_cast<const uint16_t*>(pair + (block & 1) * 32));
      acc = fma(itof(sum), fmul(scales, fset(x.scale)), acc);
    }
    put(acc, y + r * ld, columns);
  }
}

void linear_c8(const uint8_t* tile, int k, const void* act, int rows, float* y, size_t ld, int columns) {
  const Act* a = static_cast<const Act*>(act);
  const int blocks = blocks_of(k);
  for (int r = 0; r < rows; ++r) {
    I sum = iset(0);
    for (int block = 0; block < blocks; ++block) {
      const Act& x = a[size_t(block) * rows + r];
      sum = iadd(sum, iset(x.offset_of_bytes()));
      for (int j = 0; j < 8; ++j) sum = dot_u8(sum, bload(tile + size_t(block) * 512 + j * 64), x.q + j * 4);
    }
    const F scales = fload(reinterpret_cast<const float*>(tile + size_t(blocks) * 512));
    put(fmul(itof(sum), fmul(scales, fset(a[r].scale))), y + r * ld, columns);
  }
}

// Four partial sums, k modulo 4, added as (0 + 1) + (2 + 3).
void linear_f32(const uint8_t* tile, int k, const void* act, int rows, float* y, size_t ld, int columns) {
  const float* w = reinterpret_cast<const float*>(tile);
  for (int r = 0; r < rows; ++r) {
    const float* x = static_cast<const float*>(act) + size_t(r) * k;
    F acc[4] = {fset(0.f), fset(0.f), fset(0.f), fset(0.f)};
    for (int i = 0; i < k; ++i) acc[i % 4] = fma(fload(w + size_t(i) * 16), fset(x[i]), acc[i % 4]);
    put(fadd(fadd(acc[0], acc[1]), fadd(acc[2], acc[3])), y + r * ld, columns);
  }
}

// Sums of levels are whole before they are scaled, of each share of a block; then comes what is added to all of them.
template <Kind kind>
void linear_ggml(const uint8_t* tile, int k, const void* act, int rows, float* y, size_t ld, int columns) {
  constexpr GgmlFacts f = ggml(kind);
  const Act* a = static_cast<const Act*>(act);
  const size_t groups = size_t(k) / f.group;
  for (int r = 0; r < rows; ++r) {
    F acc = fset(0.f);
    for (int at = 0; at < k; at += f.share) {
      const Act& x = a[size_t(at / kBlock) * rows + r];
      const uint8_t* codes = tile + at / f.group * ggml_codes(f);
      const uint8_t* scales = tile + groups * ggml_codes(f) + at / f.group * ggml_scales(f);
      const int8_t* q = x.q + at % kBlock;
      int32_t all = 0;
      for (int i = 0; i < f.share; ++i) all += q[i];
      I sum = iset(0);
      for (int c = 0; c < kTile; ++c)
        for (int i = 0; i < f.share; ++i) sum.v[c] += (ggml_level(kind, codes, at % f.group + i, c) - f.zero) * q[i];
      const auto by = [&](int c) { return ggml_scale(kind, scales, at % f.group / f.share, c); };
      acc = fma(itof(sum), fmul(each([&](int c) { return by(c).scale; }), fset(x.scale)), acc);
      if (f.minimum)
        acc = fma(each([&](int c) { return by(c).minimum; }), fset(x.scale * static_cast<float>(all)), acc);
    }
    put(acc, y + r * ld, columns);
  }
}

// As of float32: a 16-bit number is one.
template <Kind kind>
void linear_half(const uint8_t* tile, int k, const void* act, int rows, float* y, size_t ld, int columns) {
  for (int r = 0; r < rows; ++r) {
    const float* x = static_cast<const float*>(act) + size_t(r) * k;
    F acc[4] = {fset(0.f), fset(0.f), fset(0.f), fset(0.f)};
    for (int i = 0; i < k; ++i)
      acc[i % 4] =
          fma(each([&](int c) { return float_at(kind, tile, size_t(i) * kTile + c); }), fset(x[i]), acc[i % 4]);
    put(fadd(fadd(acc[0], acc[1]), fadd(acc[2], acc[3])), y + r * ld, columns);
  }
}

void linear_high(const uint8_t* tile, int k, const void* act, int rows, float* y, size_t ld, int columns);

template <Kind kind>
void linear(Weights w, int k, const void* act, int rows, float* y, size_t ld, int columns) {
  if (kind == kP8 && !w.low) return linear_high(w.high, k, act, rows, y, ld, columns);
  if constexpr (kind == kF32)
    linear_f32(w.high, k, act, rows, y, ld, columns);
  else if constexpr (takes_floats(kind))
    linear_half<kind>(w.high, k, act, rows, y, ld, columns);
  else if constexpr (is_ggml(kind))
    linear_ggml<kind>(w.high, k, act, rows, y, ld, columns);
  else if constexpr (kind == kC8)
    linear_c8(w.high, k, act, rows, y, ld, columns);
  else
    linear_blocks<kind>(w, k, act, rows, y, ld, columns);
}

#include "kernels.inl"

const Kernels table = kTable("scalar");

}  // namespace

const Kernels* scalar_kernels() { return &table; }

}  // namespace edgespec
