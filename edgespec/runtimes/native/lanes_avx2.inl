// 16 lanes as two registers of AVX2, for isa_avx2.cpp and isa_avxvnni.cpp, which include it in their anonymous
// namespace: code compiled for one processor must never be linked into another's path.

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
// `nibbles`: no byte is above 15.  Known when compiling, as everything is inlined, so asking costs nothing.
struct B {
  __m256i a, b;
  bool nibbles;
};

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256 load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

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
inline __m256 larger_size(__m256 x, __m256 y) {
  return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(x), _mm256_castps_si256(y)));
}
inline __m128 larger_size(__m128 x, __m128 y) {
  return _mm_castsi128_ps(_mm_max_epu32(_mm_castps_si128(x), _mm_castps_si128(y)));
}
inline F fmax_size(F x, F y) { return {larger_size(x.a, y.a), larger_size(x.b, y.b)}; }
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
  return {_mm256_andnot_ps(_mm256_cmp_ps(key.a, by, _CMP_LT_OQ), x.a),
          _mm256_andnot_ps(_mm256_cmp_ps(key.b, by, _CMP_LT_OQ), x.b)};
}
inline bool fexceeds(F x, float limit) {
  const __m256 by = _mm256_set1_ps(limit);
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, by, _CMP_NLE_UQ), _mm256_cmp_ps(x.b, by, _CMP_NLE_UQ)));
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
inline float flargest_size(F x) {
  const __m256 h = larger_size(x.a, x.b);
  __m128 q = larger_size(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = larger_size(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(larger_size(q, _mm_shuffle_ps(q, q, 1)));
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
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(_mm256_packus_epi16(words, words), order)));
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
#if defined(__AVXVNNI__)
// With the intrinsic, GCC copies every sum to another register and back.
inline __attribute__((always_inline)) __m256i dot(__m256i acc, __m256i u8, __m256i s8) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(u8), "x"(s8));
  return acc;
}
inline I dot_u8(I acc, B x, const int8_t* four) {
  const __m256i f = four_bytes(four);
  return {dot(acc.a, x.a, f), dot(acc.b, x.b, f)};
}
inline I dot_s8(I acc, B x, const int8_t* four) {
  const __m256i f = four_bytes(four);
  return {dot(acc.a, f, x.a), dot(acc.b, f, x.b)};
}
#else
// acc + v * f. Two products of 255 * 127 would saturate 16 bits: even and odd bytes are multiplied as 16-bit numbers.
inline __m256i dot_bytes(__m256i acc, __m256i v, __m256i f) {
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(f, 8), 8), odd = _mm256_srai_epi16(f, 8);
  const __m256i lows = _mm256_madd_epi16(_mm256_and_si256(v, _mm256_set1_epi16(255)), even);
  return _mm256_add_epi32(_mm256_add_epi32(acc, lows), _mm256_madd_epi16(_mm256_srli_epi16(v, 8), odd));
}
inline I dot_u8(I acc, B x, const int8_t* four) {
  const __m256i f = four_bytes(four);
  if (x.nibbles)
    return {_mm256_add_epi32(acc.a, widen(_mm256_maddubs_epi16(x.a, f))),
            _mm256_add_epi32(acc.b, widen(_mm256_maddubs_epi16(x.b, f)))};
  return {dot_bytes(acc.a, x.a, f), dot_bytes(acc.b, x.b, f)};
}
inline I dot_s8(I acc, B x, const int8_t* four) {  // at most 2 * 127 * 128: nothing saturates
  const __m256i f = four_bytes(four);
  return {_mm256_add_epi32(acc.a, widen(_mm256_maddubs_epi16(f, x.a))),
          _mm256_add_epi32(acc.b, widen(_mm256_maddubs_epi16(f, x.b)))};
}
#endif

// ---- what ggml.inl asks for ----------------------------------------------------------------------------------------
inline F fload_s8(const int8_t* p) {
  const auto eight = [](const int8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
  };
  return {eight(p), eight(p + 8)};
}
inline F fload_bfloat(const uint16_t* p) {
  const auto eight = [](const uint16_t* at) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  };
  return {eight(p), eight(p + 8)};
}
// Bytes moved by `Right` bits (below 0: to the left) under a mask.
template <int Right, int Mask>
inline __m256i moved(const uint8_t* p) {
  __m256i x = load(p);
  if constexpr (Right > 0) x = _mm256_srli_epi16(x, Right);
  if constexpr (Right < 0) x = _mm256_slli_epi16(x, -Right);
  return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(Mask)));
}
template <int Right, int Mask>
inline B bfield(const uint8_t* p) {
  return {moved<Right, Mask>(p), moved<Right, Mask>(p + 32), Mask <= 15};
}
template <int Right, int Mask>
inline B badd(B x, const uint8_t* p) {
  return {_mm256_or_si256(x.a, moved<Right, Mask>(p)), _mm256_or_si256(x.b, moved<Right, Mask>(p + 32)), false};
}
inline B blookup(B x, const uint8_t* table) {
  const __m256i row = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(row, x.a), _mm256_shuffle_epi8(row, x.b), false};
}
// How many of n vectors, a power of 2, 16 bits hold the sum of; 0: not even one.
constexpr int pairs_that_fit(int most, int n) {
  const int fit = std::min(32767 / (2 * 127 * most), n);
  return fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : fit;
}
// acc + N vectors times 4 N bytes; no byte of a vector is above Most.
template <int Most, int N>
inline __attribute__((always_inline)) I dots(I acc, const B* v, const int8_t* q) {
#if defined(__AVXVNNI__)
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) acc = dot_u8(acc, v[j], q + 4 * j);
#else
  constexpr int kTogether = pairs_that_fit(Most, N);
  if constexpr (kTogether == 0) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) acc = dot_u8(acc, {v[j].a, v[j].b, false}, q + 4 * j);
  } else {
#pragma GCC unroll 8
    for (int from = 0; from < N; from += kTogether) {
      __m256i a, b;
#pragma GCC unroll 8
      for (int j = from; j < from + kTogether; ++j) {
        const __m256i f = four_bytes(q + 4 * j);
        const __m256i first = _mm256_maddubs_epi16(v[j].a, f), second = _mm256_maddubs_epi16(v[j].b, f);
        a = j == from ? first : _mm256_add_epi16(a, first);
        b = j == from ? second : _mm256_add_epi16(b, second);
      }
      acc = {_mm256_add_epi32(acc.a, widen(a)), _mm256_add_epi32(acc.b, widen(b))};
    }
  }
#endif
  return acc;
}

// ---- several rows at once, whose sums stay in registers, for ggml.inl -----------------------------------------------
#define EDGESPEC_ROWS

template <int from, int to, class Call>
inline __attribute__((always_inline)) void each(Call call) {
  if constexpr (from < to) {
    call(std::integral_constant<int, from>());
    each<from + 1, to>(call);
  }
}

// sums[r] += N vectors times 4 N bytes of row r, from `at` on.  No byte of a vector is above Most; vector(j) makes one.
template <int Most, int N, int R, class Vector>
inline __attribute__((always_inline)) void dots_of_rows(I (&sums)[R], Vector vector, const Act* a, int at) {
#if defined(__AVXVNNI__)
  each<0, N>([&](auto j) __attribute__((always_inline)) {
    const B v = vector(j);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r] = dot_u8(sums[r], v, a[r].q + at + 4 * j);
  });
#else
  constexpr int kTogether = pairs_that_fit(Most, N);
  if constexpr (kTogether == 0) {
    each<0, N>([&](auto j) __attribute__((always_inline)) {
      const B v = vector(j);
      const __m256i byte = _mm256_set1_epi16(255);
      const I even = {_mm256_and_si256(v.a, byte), _mm256_and_si256(v.b, byte)};
      const I odd = {_mm256_srli_epi16(v.a, 8), _mm256_srli_epi16(v.b, 8)};
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256i f = four_bytes(a[r].q + at + 4 * j);
        const __m256i f0 = _mm256_srai_epi16(_mm256_slli_epi16(f, 8), 8), f1 = _mm256_srai_epi16(f, 8);
        sums[r] = iadd(sums[r], {_mm256_madd_epi16(even.a, f0), _mm256_madd_epi16(even.b, f0)});
        sums[r] = iadd(sums[r], {_mm256_madd_epi16(odd.a, f1), _mm256_madd_epi16(odd.b, f1)});
        asm volatile("" : "+x"(sums[r].a), "+x"(sums[r].b));  // or GCC keeps all products, and adds them at the end
      }
    });
  } else {
    each<0, N / kTogether>([&](auto chunk) __attribute__((always_inline)) {
      constexpr int from = decltype(chunk)::value * kTogether;
      I pairs[R];
      each<from, from + kTogether>([&](auto j) __attribute__((always_inline)) {
        const B v = vector(j);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m256i f = four_bytes(a[r].q + at + 4 * j);
          const I product = {_mm256_maddubs_epi16(v.a, f), _mm256_maddubs_epi16(v.b, f)};
          pairs[r].a = j == from ? product.a : _mm256_add_epi16(pairs[r].a, product.a);
          pairs[r].b = j == from ? product.b : _mm256_add_epi16(pairs[r].b, product.b);
          asm volatile("" : "+x"(pairs[r].a), "+x"(pairs[r].b));  // as above
        }
      });
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r] = iadd(sums[r], {widen(pairs[r].a), widen(pairs[r].b)});
    });
  }
#endif
}

struct Roof {
  __m256i v;
};
constexpr int kRoofMacs = 32;
inline Roof roof_start() { return {_mm256_setzero_si256()}; }
inline void roof_step(Roof& sum, const Roof& x) {
#if defined(__AVXVNNI__)
  asm volatile("%{vex%} vpdpbusd %1, %1, %0" : "+x"(sum.v) : "x"(x.v));
#else  // a block's products add up in 16 bits
  asm volatile("vpmaddubsw %1, %1, %%ymm15\n\tvpaddw %%ymm15, %0, %0" : "+x"(sum.v) : "x"(x.v) : "xmm15");
#endif
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
