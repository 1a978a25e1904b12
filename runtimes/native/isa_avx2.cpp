// AVX2 with FMA and F16C: two registers are a vector of 16 lanes; byte products add up in 16 bits before they are widened.
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "half.h"

namespace edgespec {
namespace {

struct F { __m256 a, b; };
struct I { __m256i a, b; };
// `nibbles`: no byte is above 15.  Known when compiling, as everything is inlined, so asking costs nothing.
struct B { __m256i a, b; bool nibbles; };

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256 load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

// The first n of 16 lanes.
struct First {
  __m256i a, b;
  explicit First(int n) {
    alignas(64) static constexpr int32_t kOnes[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    const int32_t* from = kOnes + 16 - std::clamp(n, 0, 16);
    a = load(from);
    b = load(from + 8);
  }
};

inline F fset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F fload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F fload_n(const float* p, int n) {
  const First first(n);
  return {_mm256_maskload_ps(p, first.a), _mm256_maskload_ps(p + 8, first.b)};
}
inline F fload_half(const uint16_t* p) { return {load_half(p), load_half(p + 8)}; }
inline F fload_u16(const uint16_t* p) {
  const auto* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128(q))),
          _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1)))};
}
inline void fstore(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline void fstore_n(float* p, F x, int n) {
  const First first(n);
  _mm256_maskstore_ps(p, first.a, x.a);
  _mm256_maskstore_ps(p + 8, first.b, x.b);
}
inline void fstore_half(uint16_t* p, F x) {
  auto* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(x.a, 0));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.b, 0));
}
inline F fadd(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F fsub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F fmul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F fdiv(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F fnma(F x, F y, F z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
inline F fmax(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F fabs_(F x) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F fneg(F x) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_xor_ps(sign, x.a), _mm256_xor_ps(sign, x.b)};
}
inline F fround(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
// x * 2^r for whole r in -126 to 127: the power is put together from its bits, the product rounds as ldexp does
inline __m256 power2(__m256 r) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(r), _mm256_set1_epi32(127)), 23));
}
inline F fscale2(F x, F r) { return {_mm256_mul_ps(x.a, power2(r.a)), _mm256_mul_ps(x.b, power2(r.b))}; }
inline F fpositive(F x, F a, F b) {
  const __m256 zero = _mm256_setzero_ps();
  return {_mm256_blendv_ps(b.a, a.a, _mm256_cmp_ps(x.a, zero, _CMP_GE_OQ)),
          _mm256_blendv_ps(b.b, a.b, _mm256_cmp_ps(x.b, zero, _CMP_GE_OQ))};
}
inline F fzero_below(F x, F key, float limit) {
  const __m256 by = _mm256_set1_ps(limit);
  return {_mm256_and_ps(x.a, _mm256_cmp_ps(key.a, by, _CMP_GE_OQ)), _mm256_and_ps(x.b, _mm256_cmp_ps(key.b, by, _CMP_GE_OQ))};
}
inline float fsum(F x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float flargest(F x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

inline I iset(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline int32_t isum(I x) {
  const __m256i h = _mm256_add_epi32(x.a, x.b);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
inline F itof(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I ftoi(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline void istore_s8(int8_t* p, I x) {  // the low bytes, without saturation
  const __m256i byte = _mm256_set1_epi32(255);
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(x.a, byte), _mm256_and_si256(x.b, byte));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 0, 0, 0, 0);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(
                                                      _mm256_packus_epi16(words, words), order)));
}
inline __m256i low_nibbles(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline __m256i high_nibbles(__m256i x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
inline B bload(const uint8_t* p) { return {load(p), load(p + 32), false}; }
inline B blow(B x) { return {low_nibbles(x.a), low_nibbles(x.b), true}; }
inline B bhigh(B x) { return {high_nibbles(x.a), high_nibbles(x.b), true}; }
inline __m256i four_bytes(const int8_t* four) {
  int32_t word;
  __builtin_memcpy(&word, four, 4);
  return _mm256_set1_epi32(word);
}
inline __m256i widen(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
inline I dot_u8(I acc, B x, const int8_t* four) {
  const __m256i f = four_bytes(four);
  if (x.nibbles)
    return {_mm256_add_epi32(acc.a, widen(_mm256_maddubs_epi16(x.a, f))),
            _mm256_add_epi32(acc.b, widen(_mm256_maddubs_epi16(x.b, f)))};
  // two products of 255 * 127 would saturate 16 bits: even and odd bytes are multiplied as 16-bit numbers
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(f, 8), 8), odd = _mm256_srai_epi16(f, 8);
  const __m256i byte = _mm256_set1_epi16(255);
  const auto add = [&](__m256i sum, __m256i v) {
    return _mm256_add_epi32(_mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_and_si256(v, byte), even)),
                            _mm256_madd_epi16(_mm256_srli_epi16(v, 8), odd));
  };
  return {add(acc.a, x.a), add(acc.b, x.b)};
}
inline I dot_s8(I acc, B x, const int8_t* four) {  // at most 2 * 127 * 128: nothing saturates
  const __m256i f = four_bytes(four);
  return {_mm256_add_epi32(acc.a, widen(_mm256_maddubs_epi16(f, x.a))),
          _mm256_add_epi32(acc.b, widen(_mm256_maddubs_epi16(f, x.b)))};
}

// Two look-ups are added in 8 bits before they are widened: the even bytes of `sum` minus what the odd ones carried in.
template <int Q>
void nomad_sums(const uint8_t* codes, int subs, const uint8_t* const* tables, uint16_t (*out)[kKvBlock]) {
  if constexpr (Q > 2) {  // as many queries as have registers
    nomad_sums<2>(codes, subs, tables, out);
    nomad_sums<Q - 2>(codes, subs, tables + 2, out + 2);
  } else {
    for (int half = 0; half < 2; ++half) {
      __m256i acc[Q][4];
      for (int q = 0; q < Q; ++q)
        for (__m256i& a : acc[q]) a = _mm256_setzero_si256();
      for (int m = 0; m < subs; m += 2) {
        const uint8_t* at = codes + size_t(m) * 64 + half * 32;
        const __m256i a = load(at), b = load(at + 64);
        const __m256i a0 = low_nibbles(a), a1 = high_nibbles(a), b0 = low_nibbles(b), b1 = high_nibbles(b);
        for (int q = 0; q < Q; ++q) {
          const auto* table = reinterpret_cast<const __m128i*>(tables[q] + m * 16);
          const __m256i ta = _mm256_broadcastsi128_si256(_mm_loadu_si128(table));
          const __m256i tb = _mm256_broadcastsi128_si256(_mm_loadu_si128(table + 1));
          const __m256i low = _mm256_add_epi8(_mm256_shuffle_epi8(ta, a0), _mm256_shuffle_epi8(tb, b0));
          const __m256i high = _mm256_add_epi8(_mm256_shuffle_epi8(ta, a1), _mm256_shuffle_epi8(tb, b1));
          acc[q][0] = _mm256_add_epi16(acc[q][0], low);
          acc[q][1] = _mm256_add_epi16(acc[q][1], _mm256_srli_epi16(low, 8));
          acc[q][2] = _mm256_add_epi16(acc[q][2], high);
          acc[q][3] = _mm256_add_epi16(acc[q][3], _mm256_srli_epi16(high, 8));
        }
      }
      for (int q = 0; q < Q; ++q)
        for (int i = 0; i < 4; ++i) {
          const __m256i sum = i & 1 ? acc[q][i] : _mm256_sub_epi16(acc[q][i], _mm256_slli_epi16(acc[q][i + 1], 8));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[q] + i * 32 + half * 16), sum);
        }
    }
  }
}

// ---- matrices ------------------------------------------------------------------------------------------------------

constexpr int kAhead = 4608;  // bytes: how far weights are fetched before they are used

template <int Lines>
inline void prefetch(const uint8_t* w) {
#pragma GCC unroll 9
  for (int i = 0; i < Lines; ++i) _mm_prefetch(reinterpret_cast<const char*>(w + kAhead + i * 64), _MM_HINT_T0);
}

// Blocks of nibbles: sums of a whole block, at most 16 * 15 * 127 a lane, fit in 16 bits.  Bytes are taken as two nibbles:
// half the products of a sign trick's widening come for free that way, and the offset is the same.
template <int N>
inline __attribute__((always_inline)) void block_q4(const uint8_t* q, const Act* a, __m256i (*sum)[2]) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m256i x = load(q + j * 64), y = load(q + j * 64 + 32);
    const __m256i x0 = low_nibbles(x), y0 = low_nibbles(y), x1 = high_nibbles(x), y1 = high_nibbles(y);
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) {
      const __m256i f0 = four_bytes(a[r].q + 4 * j), f1 = four_bytes(a[r].q + 16 + 4 * j);
      const __m256i sx = _mm256_add_epi16(_mm256_maddubs_epi16(x0, f0), _mm256_maddubs_epi16(x1, f1));
      const __m256i sy = _mm256_add_epi16(_mm256_maddubs_epi16(y0, f0), _mm256_maddubs_epi16(y1, f1));
      sum[r][0] = j ? _mm256_add_epi16(sum[r][0], sx) : sx;
      sum[r][1] = j ? _mm256_add_epi16(sum[r][1], sy) : sy;
    }
  }
}

// 8 columns of a block of bytes, as the 32-bit sums of N rows.
template <int N>
inline __attribute__((always_inline)) void block_bytes(const uint8_t* q, const Act* a, __m256i* sum) {
  __m256i low[N], high[N];
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    const __m256i x = load(q + j * 64), x0 = low_nibbles(x), x1 = high_nibbles(x);
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) {
      const __m256i f = four_bytes(a[r].q + 4 * j), p0 = _mm256_maddubs_epi16(x0, f), p1 = _mm256_maddubs_epi16(x1, f);
      low[r] = j ? _mm256_add_epi16(low[r], p0) : p0;
      high[r] = j ? _mm256_add_epi16(high[r], p1) : p1;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < N; ++r)
    sum[r] = _mm256_add_epi32(widen(low[r]), _mm256_madd_epi16(high[r], _mm256_set1_epi16(16)));
}

inline __m256 finish(__m256i sum, int32_t offset, __m256 scales, float scale, __m256 acc) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(sum, _mm256_set1_epi32(offset))),
                         _mm256_mul_ps(scales, _mm256_set1_ps(scale)), acc);
}

template <int N>
inline __attribute__((always_inline)) void rows_q4(const uint8_t* q, const Act* a, const __m256 (&scales)[2], __m256 (*acc)[2]) {
  __m256i sum[N][2];
  block_q4<N>(q, a, sum);
#pragma GCC unroll 4
  for (int r = 0; r < N; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) acc[r][h] = finish(widen(sum[r][h]), a[r].offset, scales[h], a[r].scale, acc[r][h]);
}

template <int N>
inline __attribute__((always_inline)) void rows_q8(const uint8_t* q, const Act* a, const __m256 (&scales)[2], __m256 (*acc)[2]) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    __m256i sum[N];
    block_bytes<N>(q + h * 32, a, sum);
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) acc[r][h] = finish(sum[r], a[r].offset * 16, scales[h], a[r].scale, acc[r][h]);
  }
}

template <bool Four, int N>
inline __attribute__((always_inline)) void rows_of(const uint8_t* q, const Act* a, const __m256 (&scales)[2], __m256 (*acc)[2]) {
  if constexpr (Four) rows_q4<N>(q, a, scales, acc); else rows_q8<N>(q, a, scales, acc);
}

template <bool Four, int R>
void linear_rows(const uint8_t* w, int blocks, const Act* a, float* y, size_t ld, int columns) {
  constexpr int kVectors = Four ? 4 : 8, kQuads = R / 4 * 4;
  __m256 acc[R][2];
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
  for (int pair = 0; pair < blocks / 2; ++pair) {
    prefetch<1>(w);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half, a += R) {
      const auto* s = reinterpret_cast<const uint16_t*>(w + half * 32);
      const __m256 scales[2] = {load_half(s), load_half(s + 8)};
      const uint8_t* q = w + 64 + half * 64 * kVectors;
      prefetch<kVectors>(q);
#pragma GCC unroll 1
      for (int r = 0; r < kQuads; r += 4) rows_of<Four, 4>(q, a + r, scales, acc + r);
      if constexpr (R % 4 != 0) rows_of<Four, R % 4>(q, a + kQuads, scales, acc + kQuads);
    }
    w += 64 + 128 * kVectors;
  }
  for (int r = 0; r < R; ++r) fstore_n(y + r * ld, {acc[r][0], acc[r][1]}, columns);
}

template <int R>
void channel_rows(const uint8_t* w, int blocks, const Act* a, float* y, size_t ld, int columns) {
  constexpr int kQuads = R / 4 * 4;
  __m256i c[2][R];
  for (int r = 0; r < R; ++r) {
    int32_t offset = 0;
    for (int block = 0; block < blocks; ++block) offset += a[size_t(block) * R + r].offset * 16;
    c[0][r] = c[1][r] = _mm256_set1_epi32(offset);
  }
  const Act* x = a;
  for (int block = 0; block < blocks; ++block, x += R, w += 512) {
    prefetch<8>(w);
    const auto add = [&](auto count, int from) __attribute__((always_inline)) {
      constexpr int N = decltype(count)::value;
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        __m256i sum[N];
        block_bytes<N>(w + h * 32, x + from, sum);
#pragma GCC unroll 4
        for (int r = 0; r < N; ++r) c[h][from + r] = _mm256_add_epi32(c[h][from + r], sum[r]);
      }
    };
#pragma GCC unroll 1
    for (int r = 0; r < kQuads; r += 4) add(std::integral_constant<int, 4>(), r);
    if constexpr (R % 4 != 0) add(std::integral_constant<int, R % 4>(), kQuads);
  }
  const F scales = fload(reinterpret_cast<const float*>(w));
  for (int r = 0; r < R; ++r)
    fstore_n(y + r * ld, fmul(itof({c[0][r], c[1][r]}), fmul(scales, fset(a[r].scale))), columns);
}

// Columns 8 * From to 8 * (From + Halves): four partial sums each leave registers for one row of 16 or three of 8.
template <int R, int Halves>
void float_rows(const float* w, int k, const float* x, __m256 (*out)[2], int from) {
  __m256 acc[R][4][Halves];
  for (int r = 0; r < R; ++r)
    for (auto& a : acc[r])
      for (__m256& h : a) h = _mm256_setzero_ps();
  int i = 0;
  for (; i + 4 <= k; i += 4, w += 64) {
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      if (!from) _mm_prefetch(reinterpret_cast<const char*>(w + s * 16) + kAhead, _MM_HINT_T0);
#pragma GCC unroll 2
      for (int h = 0; h < Halves; ++h) {
        const __m256 v = _mm256_loadu_ps(w + s * 16 + (from + h) * 8);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[r][s][h] = _mm256_fmadd_ps(v, _mm256_set1_ps(x[size_t(r) * k + i + s]), acc[r][s][h]);
      }
    }
  }
#pragma GCC unroll 4
  for (int s = 0; s < 3; ++s)
    if (i + s < k)
      for (int h = 0; h < Halves; ++h)
        for (int r = 0; r < R; ++r)
          acc[r][s][h] = _mm256_fmadd_ps(_mm256_loadu_ps(w + s * 16 + (from + h) * 8), _mm256_set1_ps(x[size_t(r) * k + i + s]),
                                         acc[r][s][h]);
  for (int r = 0; r < R; ++r)
    for (int h = 0; h < Halves; ++h)
      out[r][from + h] = _mm256_add_ps(_mm256_add_ps(acc[r][0][h], acc[r][1][h]), _mm256_add_ps(acc[r][2][h], acc[r][3][h]));
}

template <int R>
void float_halves(const float* w, int k, const float* x, __m256 (*out)[2]) {
  float_rows<R, 1>(w, k, x, out, 0);
  float_rows<R, 1>(w, k, x, out, 1);
}

using Rows = void (*)(const uint8_t*, int, const Act*, float*, size_t, int);
#define EDGESPEC_ROWS(f) \
  { nullptr, f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15), f(16) }
#define EDGESPEC_Q4(r) linear_rows<true, r>
#define EDGESPEC_Q8(r) linear_rows<false, r>
#define EDGESPEC_C8(r) channel_rows<r>
constexpr Rows kQ4Rows[] = EDGESPEC_ROWS(EDGESPEC_Q4);
constexpr Rows kQ8Rows[] = EDGESPEC_ROWS(EDGESPEC_Q8);
constexpr Rows kC8Rows[] = EDGESPEC_ROWS(EDGESPEC_C8);

void linear_q4(const uint8_t* t, int k, const void* a, int rows, float* y, size_t ld, int columns) {
  kQ4Rows[rows](t, blocks_of(k), static_cast<const Act*>(a), y, ld, columns);
}
void linear_q8(const uint8_t* t, int k, const void* a, int rows, float* y, size_t ld, int columns) {
  kQ8Rows[rows](t, blocks_of(k), static_cast<const Act*>(a), y, ld, columns);
}
void linear_c8(const uint8_t* t, int k, const void* a, int rows, float* y, size_t ld, int columns) {
  kC8Rows[rows](t, blocks_of(k), static_cast<const Act*>(a), y, ld, columns);
}
void linear_f32(const uint8_t* t, int k, const void* a, int rows, float* y, size_t ld, int columns) {
  const float* w = reinterpret_cast<const float*>(t);
  const float* x = static_cast<const float*>(a);
  __m256 out[3][2];
  for (int n; rows > 0; rows -= n, x += size_t(n) * k, y += n * ld) {
    n = rows == 4 ? 2 : std::min(rows, 3);
    if (n == 3) float_halves<3>(w, k, x, out);
    if (n == 2) float_halves<2>(w, k, x, out);
    if (n == 1) float_rows<1, 2>(w, k, x, out, 0);
    for (int r = 0; r < n; ++r) fstore_n(y + r * ld, {out[r][0], out[r][1]}, columns);
  }
}

#include "kernels.inl"

const Kernels table = kTable("avx2");

}  // namespace

const Kernels* avx2_kernels() { return &table; }

}  // namespace edgespec

#else
namespace edgespec {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace edgespec
#endif
