// AVX-512 with VNNI: one register is a vector of 16 lanes or a whole payload vector.
#include "kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include <immintrin.h>

#include <cmath>

#include "half.h"

namespace edgespec {
namespace {

using F = __m512;
struct I {
  __m512i v;
};
struct B {
  __m512i v;
};

inline __mmask16 first(int n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << (n < 0 ? 0 : n)) - 1); }

inline F fset(float x) { return _mm512_set1_ps(x); }
inline F fload(const float* p) { return _mm512_loadu_ps(p); }
inline F fload_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline F fload_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline F fload_u16(const uint16_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
inline void fstore(float* p, F x) { _mm512_storeu_ps(p, x); }
inline void fstore_n(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
inline void fstore_half(uint16_t* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, 0)); }
inline F fadd(F a, F b) { return _mm512_add_ps(a, b); }
inline F fsub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F fmul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F fdiv(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
inline F fmax(F a, F b) { return _mm512_max_ps(a, b); }
inline F fmax_size(F a, F b) {
  return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
inline F fabs_(F a) { return _mm512_abs_ps(a); }
inline F fneg(F a) {
  return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), _mm512_set1_epi32(int(0x80000000u))));
}
inline F fround(F a) { return _mm512_roundscale_ps(a, 8); }
inline F fscale2(F a, F r) { return _mm512_scalef_ps(a, r); }
inline F fpositive(F x, F a, F b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ), b, a);
}
inline F fzero_below(F x, F key, float limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(key, _mm512_set1_ps(limit), _CMP_NLT_UQ), x);
}
inline bool fexceeds(F x, float limit) { return _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLE_UQ); }
inline float fsum(F a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float flargest(F a) {
  __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float flargest_size(F a) {
  const __m512i v = _mm512_castps_si512(a);
  const __m256i h = _mm256_max_epu32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
  __m128i q = _mm_max_epu32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_max_epu32(q, _mm_shuffle_epi32(q, 0x4e));
  q = _mm_max_epu32(q, _mm_shuffle_epi32(q, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(q));
}

inline I iset(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I iadd(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline int32_t isum(I a) {  // the compiler's own sum may not wrap
  const __m256i h = _mm256_add_epi32(_mm512_castsi512_si256(a.v), _mm512_extracti64x4_epi64(a.v, 1));
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
inline F itof(I a) { return _mm512_cvtepi32_ps(a.v); }
inline I ftoi(F a) { return {_mm512_cvtps_epi32(a)}; }
inline void istore_s8(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v)); }
inline B bload(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline B blow(B a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline B bhigh(B a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
inline __m512i four_bytes(const int8_t* four) {
  int32_t word;
  __builtin_memcpy(&word, four, 4);
  return _mm512_set1_epi32(word);
}
inline I dot_u8(I acc, B x, const int8_t* four) { return {_mm512_dpbusd_epi32(acc.v, x.v, four_bytes(four))}; }
inline I dot_s8(I acc, B x, const int8_t* four) { return {_mm512_dpbusd_epi32(acc.v, four_bytes(four), x.v)}; }

// Two look-ups are added in 8 bits before they are widened: the even bytes of `sum` minus what the odd ones carried in.
template <int Q>
void nomad_sums(const uint8_t* codes, int subs, const uint8_t* const* tables, uint16_t (*out)[kKvBlock]) {
  if constexpr (Q > 4) {
    nomad_sums<4>(codes, subs, tables, out);
    nomad_sums<Q - 4>(codes, subs, tables + 4, out + 4);
  } else {
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i acc[Q][4];
    for (int q = 0; q < Q; ++q)
      for (__m512i& a : acc[q]) a = _mm512_setzero_si512();
    for (int m = 0; m < subs; m += 2) {
      const __m512i a = _mm512_loadu_si512(codes + size_t(m) * 64), b = _mm512_loadu_si512(codes + size_t(m) * 64 + 64);
      const __m512i a0 = _mm512_and_si512(a, mask), a1 = _mm512_and_si512(_mm512_srli_epi16(a, 4), mask);
      const __m512i b0 = _mm512_and_si512(b, mask), b1 = _mm512_and_si512(_mm512_srli_epi16(b, 4), mask);
      for (int q = 0; q < Q; ++q) {
        const auto* table = reinterpret_cast<const __m128i*>(tables[q] + m * 16);
        const __m512i ta = _mm512_broadcast_i32x4(_mm_loadu_si128(table));
        const __m512i tb = _mm512_broadcast_i32x4(_mm_loadu_si128(table + 1));
        const __m512i low = _mm512_add_epi8(_mm512_shuffle_epi8(ta, a0), _mm512_shuffle_epi8(tb, b0));
        const __m512i high = _mm512_add_epi8(_mm512_shuffle_epi8(ta, a1), _mm512_shuffle_epi8(tb, b1));
        acc[q][0] = _mm512_add_epi16(acc[q][0], low);
        acc[q][1] = _mm512_add_epi16(acc[q][1], _mm512_srli_epi16(low, 8));
        acc[q][2] = _mm512_add_epi16(acc[q][2], high);
        acc[q][3] = _mm512_add_epi16(acc[q][3], _mm512_srli_epi16(high, 8));
      }
    }
    for (int q = 0; q < Q; ++q) {
      _mm512_storeu_si512(out[q], _mm512_sub_epi16(acc[q][0], _mm512_slli_epi16(acc[q][1], 8)));
      _mm512_storeu_si512(out[q] + 32, acc[q][1]);
      _mm512_storeu_si512(out[q] + 64, _mm512_sub_epi16(acc[q][2], _mm512_slli_epi16(acc[q][3], 8)));
      _mm512_storeu_si512(out[q] + 96, acc[q][3]);
    }
  }
}

struct Roof {
  __m512i v;
};
constexpr int kRoofMacs = 64;
inline Roof roof_start() { return {_mm512_setzero_si512()}; }
inline void roof_step(Roof& sum, const Roof& x) { asm volatile("vpdpbusd %1, %1, %0" : "+v"(sum.v) : "v"(x.v)); }

// ---- matrices ------------------------------------------------------------------------------------------------------

constexpr int kAhead = 4608;  // bytes: how far weights are fetched before they are used

// acc += x (unsigned) * the four bytes at `four`, repeated.  Compilers do not fold the repetition into the instruction;
// as a separate load it costs registers that 16 rows do not have.
inline __attribute__((always_inline)) void multiply_add(__m512i& acc, __m512i x, const int8_t* four) {
  struct Word {
    int8_t bytes[4];
  };
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(x), "m"(*reinterpret_cast<const Word*>(four)));
}

template <bool Four>
inline __m512i offset(const Act& a) {
  const __m512i eight = _mm512_set1_epi32(a.offset);
  return Four ? eight : _mm512_slli_epi32(eight, 4);
}

// N rows of one block: their chains of dot products run side by side, which hides the instruction's latency.
template <int N, bool Four>
inline __attribute__((always_inline)) void block_rows(const __m512i (&v)[8], const Act* a, __m512 scales, __m512* acc) {
  __m512i c[N];
#pragma GCC unroll 4
  for (int r = 0; r < N; ++r) c[r] = offset<Four>(a[r]);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j)
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) multiply_add(c[r], v[j], a[r].q + 4 * j);
#pragma GCC unroll 4
  for (int r = 0; r < N; ++r)
    acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(c[r]), _mm512_mul_ps(scales, _mm512_set1_ps(a[r].scale)), acc[r]);
}

template <bool Four, int R>
void linear_rows(const uint8_t* w, int blocks, const Act* a, float* y, size_t ld, __mmask16 columns) {
  constexpr int kVectors = Four ? 4 : 8, kQuads = R / 4 * 4;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
  for (int pair = 0; pair < blocks / 2; ++pair) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half, a += R) {
      const __m512 scales = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + half * 32)));
      const uint8_t* q = w + 64 + half * 64 * kVectors;
      if (!half) _mm_prefetch(reinterpret_cast<const char*>(w + kAhead), _MM_HINT_T0);
      __m512i v[8];
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) {
        _mm_prefetch(reinterpret_cast<const char*>(q + j * 64 + kAhead), _MM_HINT_T0);
        const __m512i x = _mm512_loadu_si512(q + j * 64);
        if constexpr (Four) {
          v[j] = _mm512_and_si512(x, low);
          v[j + 4] = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
        } else {
          v[j] = x;
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kQuads; r += 4) block_rows<4, Four>(v, a + r, scales, acc + r);
      if constexpr (R % 4 != 0) block_rows<R % 4, Four>(v, a + kQuads, scales, acc + kQuads);
    }
    w += 64 + 128 * kVectors;
  }
  for (int r = 0; r < R; ++r) _mm512_mask_storeu_ps(y + r * ld, columns, acc[r]);
}

template <int R>
void channel_rows(const uint8_t* w, int blocks, const Act* a, float* y, size_t ld, __mmask16 columns) {
  __m512i c[R];
  for (int r = 0; r < R; ++r) c[r] = _mm512_setzero_si512();
  const Act* x = a;
  for (int block = 0; block < blocks; ++block, x += R, w += 512) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) c[r] = _mm512_add_epi32(c[r], offset<false>(x[r]));
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      _mm_prefetch(reinterpret_cast<const char*>(w + j * 64 + kAhead), _MM_HINT_T0);
      const __m512i v = _mm512_loadu_si512(w + j * 64);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) c[r] = _mm512_dpbusd_epi32(c[r], v, four_bytes(x[r].q + 4 * j));
    }
  }
  const __m512 scales = _mm512_loadu_ps(w);
  for (int r = 0; r < R; ++r)
    _mm512_mask_storeu_ps(y + r * ld, columns,
                          _mm512_mul_ps(_mm512_cvtepi32_ps(c[r]), _mm512_mul_ps(scales, _mm512_set1_ps(a[r].scale))));
}

template <int R>
void float_rows(const float* w, int k, const float* x, float* y, size_t ld, __mmask16 columns) {
  __m512 acc[R][4];
  for (int r = 0; r < R; ++r)
    for (__m512& a : acc[r]) a = _mm512_setzero_ps();
  int i = 0;
  for (; i + 4 <= k; i += 4, w += 64) {
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      _mm_prefetch(reinterpret_cast<const char*>(w + s * 16) + kAhead, _MM_HINT_T0);
      const __m512 v = _mm512_loadu_ps(w + s * 16);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][s] = _mm512_fmadd_ps(v, _mm512_set1_ps(x[size_t(r) * k + i + s]), acc[r][s]);
    }
  }
  for (int s = 0; i < k; ++i, ++s, w += 16)
    for (int r = 0; r < R; ++r)
      acc[r][s] = _mm512_fmadd_ps(_mm512_loadu_ps(w), _mm512_set1_ps(x[size_t(r) * k + i]), acc[r][s]);
  for (int r = 0; r < R; ++r)
    _mm512_mask_storeu_ps(y + r * ld, columns,
                          _mm512_add_ps(_mm512_add_ps(acc[r][0], acc[r][1]), _mm512_add_ps(acc[r][2], acc[r][3])));
}

using Rows = void (*)(const uint8_t*, int, const Act*, float*, size_t, __mmask16);
#define EDGESPEC_ROWS(f) \
  {nullptr, f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15), f(16)}
#define EDGESPEC_Q4(r) linear_rows<true, r>
#define EDGESPEC_Q8(r) linear_rows<false, r>
#define EDGESPEC_C8(r) channel_rows<r>
constexpr Rows kQ4Rows[] = EDGESPEC_ROWS(EDGESPEC_Q4);
constexpr Rows kQ8Rows[] = EDGESPEC_ROWS(EDGESPEC_Q8);
constexpr Rows kC8Rows[] = EDGESPEC_ROWS(EDGESPEC_C8);

void linear_q4(const uint8_t* t, int k, const void* a, int rows, float* y, size_t ld, int columns) {
  kQ4Rows[rows](t, blocks_of(k), static_cast<const Act*>(a), y, ld, first(columns));
}
void linear_q8(const uint8_t* t, int k, const void* a, int rows, float* y, size_t ld, int columns) {
  kQ8Rows[rows](t, blocks_of(k), static_cast<const Act*>(a), y, ld, first(columns));
}
void linear_c8(const uint8_t* t, int k, const void* a, int rows, float* y, size_t ld, int columns) {
  kC8Rows[rows](t, blocks_of(k), static_cast<const Act*>(a), y, ld, first(columns));
}
void linear_f32(const uint8_t* t, int k, const void* a, int rows, float* y, size_t ld, int columns) {
  const float* w = reinterpret_cast<const float*>(t);
  const float* x = static_cast<const float*>(a);
  for (; rows >= 4; rows -= 4, x += size_t(4) * k, y += 4 * ld) float_rows<4>(w, k, x, y, ld, first(columns));
  if (rows == 3) float_rows<3>(w, k, x, y, ld, first(columns));
  if (rows == 2) float_rows<2>(w, k, x, y, ld, first(columns));
  if (rows == 1) float_rows<1>(w, k, x, y, ld, first(columns));
}

#define EDGESPEC_SCORE_TILES 2
#include "kernels.inl"

const Kernels table = kTable("avx512");

}  // namespace

const Kernels* avx512_kernels() { return &table; }

}  // namespace edgespec

#else
namespace edgespec {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace edgespec
#endif
