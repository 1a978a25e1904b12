// 16 lanes as one register of AVX-512, for isa_avx512.cpp, which includes it in its anonymous namespace.

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
// With the intrinsic, GCC copies every sum to another register and back.
inline __attribute__((always_inline)) I dot(I acc, __m512i u8, __m512i s8) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(u8), "v"(s8));
  return acc;
}
// acc += x (unsigned) * the four bytes at `four`, repeated.  Compilers do not fold the repetition into the instruction;
// as a separate load it costs registers that 16 rows do not have.
inline __attribute__((always_inline)) void multiply_add(__m512i& acc, __m512i x, const int8_t* four) {
  struct Word {
    int8_t bytes[4];
  };
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(x), "m"(*reinterpret_cast<const Word*>(four)));
}
inline I dot_u8(I acc, B x, const int8_t* four) { return dot(acc, x.v, four_bytes(four)); }
inline I dot_s8(I acc, B x, const int8_t* four) { return dot(acc, four_bytes(four), x.v); }

// ---- what ggml.inl asks for ----------------------------------------------------------------------------------------
inline F fload_s8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline F fload_bfloat(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
// Bytes moved by `Right` bits (below 0: to the left) under a mask.
template <int Right>
inline __m512i moved(const uint8_t* p) {
  const __m512i x = _mm512_loadu_si512(p);
  if constexpr (Right > 0) return _mm512_srli_epi16(x, Right);
  if constexpr (Right < 0) return _mm512_slli_epi16(x, -Right);
  return x;
}
template <int Right, int Mask>
inline B bfield(const uint8_t* p) {
  return {_mm512_and_si512(moved<Right>(p), _mm512_set1_epi8(static_cast<char>(Mask)))};
}
template <int Right, int Mask>
inline B badd(B x, const uint8_t* p) {  // 0xEA: the first and the second, or the third
  return {_mm512_ternarylogic_epi64(moved<Right>(p), _mm512_set1_epi8(static_cast<char>(Mask)), x.v, 0xEA)};
}
inline B blookup(B x, const uint8_t* table) {
  const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(row), x.v)};
}
// acc + N vectors times 4 N bytes; no byte of a vector is above Most.
template <int Most, int N>
inline __attribute__((always_inline)) I dots(I acc, const B* v, const int8_t* q) {
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) multiply_add(acc.v, v[j].v, q + 4 * j);
  return acc;
}

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

// The 16 lanes of each of 8 vectors in one number, by the order of fsum: i and i + 8, then + 4, + 2, + 1.
template <class Function>
inline __attribute__((always_inline)) __m256 across(const F* x, Function both) {
  const auto halves = [&](F a, F b) {  // a part of four lanes is what is left of a vector's half
    return both(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const auto quarters = [&](F a, F b) {
    return both(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  const __m512d low = _mm512_castps_pd(quarters(halves(x[0], x[1]), halves(x[2], x[3])));
  const __m512d high = _mm512_castps_pd(quarters(halves(x[4], x[5]), halves(x[6], x[7])));
  F all = both(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  all = both(all, _mm512_permute_ps(all, 0xb1));  // part i: vectors i, i, i + 4, i + 4
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, all));
}

template <class Function>
inline void across(F* x, int n, float* out, Function both) {
  for (int i = n; i < 8; ++i) x[i] = x[0];
  _mm256_mask_storeu_ps(out, static_cast<__mmask8>((1 << n) - 1), across(x, both));
}
inline void flargest_each(F* x, int n, float* out) {
  if (n > 2) return across(x, n, out, [](F a, F b) { return fmax(a, b); });
  for (int i = 0; i < n; ++i) out[i] = flargest(x[i]);
}
inline void fsum_each(F* x, int n, float* out) {
  if (n > 2) return across(x, n, out, [](F a, F b) { return fadd(a, b); });
  for (int i = 0; i < n; ++i) out[i] = fsum(x[i]);
}

// Weights p [Q][32] times the values' scales in 7 bits, and a level's step, as weight_levels (attention.inl) does: the
// largest numbers of 5 to 8 queries are found together.
template <int Q>
void levels_together(const float* p, size_t ld, F low, F high, int8_t (*levels)[32], float* step) {
  F a[8], b[8], m[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const int q = i < Q ? i : Q - 1;
    a[i] = fmul(fload(p + q * ld), low);
    b[i] = fmul(fload(p + q * ld + 16), high);
    m[i] = fmax_size(a[i], b[i]);
  }
  const __m256 largest = across(m, [](F x, F y) { return fmax_size(x, y); });
  const __mmask8 counts = _mm256_cmp_ps_mask(largest, _mm256_set1_ps(kTiny), _CMP_GT_OQ);
  alignas(32) float inverse[8];
  _mm256_store_ps(inverse, _mm256_maskz_div_ps(counts, _mm256_set1_ps(127.f), largest));
  _mm256_mask_storeu_ps(step, (1 << Q) - 1, _mm256_mul_ps(largest, _mm256_set1_ps(1.f / 127.f)));
  // the low bytes of two queries, as a part of each: 4 and 4 of the one, 4 and 4 of the other
  const __m512i byte = _mm512_set1_epi32(255);
  const __m512i tokens = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 4
  for (int i = 0; i < Q; i += 2) {
    const auto words = [&](int q) {
      const F by = fset(inverse[q]);
      return _mm512_packus_epi32(_mm512_and_si512(ftoi(fmul(a[q], by)).v, byte),
                                 _mm512_and_si512(ftoi(fmul(b[q], by)).v, byte));
    };
    const __m512i bytes = _mm512_permutexvar_epi32(tokens, _mm512_packus_epi16(words(i), words(i + 1)));
    if (i + 1 < Q)
      _mm512_storeu_si512(levels[i], bytes);
    else
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(levels[i]), _mm512_castsi512_si256(bytes));
  }
}
