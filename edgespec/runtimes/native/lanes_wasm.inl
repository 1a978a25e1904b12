// 16 lanes as four registers of WebAssembly's SIMD128, for isa_simd128.cpp and isa_relaxed.cpp, which include it in
// their anonymous namespace.  Relaxed SIMD has fused multiply-adds and dot products of bytes, where the processor does;
// without it a multiply-add is rounded twice, so that numbers differ from those of the specification.

struct F {
  v128_t v[4];
};
struct I {
  v128_t v[4];
};
// `nibbles`: no byte is above 127.  Known when compiling, as everything is inlined, so asking costs nothing.
struct B {
  v128_t v[4];
  bool nibbles;
};

template <class Function>
inline F each(Function f) {
  return {{f(0), f(1), f(2), f(3)}};
}
template <class Function>
inline I each_int(Function f) {
  return {{f(0), f(1), f(2), f(3)}};
}
inline v128_t madd(v128_t x, v128_t y, v128_t z) {
#if defined(__wasm_relaxed_simd__)
  return wasm_f32x4_relaxed_madd(x, y, z);
#else
  return wasm_f32x4_add(wasm_f32x4_mul(x, y), z);
#endif
}
inline v128_t nmadd(v128_t x, v128_t y, v128_t z) {
#if defined(__wasm_relaxed_simd__)
  return wasm_f32x4_relaxed_nmadd(x, y, z);
#else
  return wasm_f32x4_sub(z, wasm_f32x4_mul(x, y));
#endif
}
// Four float16 in 32 bits each to float32: the product also makes subnormal ones normal.
inline v128_t half4(v128_t h) {
  const v128_t sign = wasm_i32x4_shl(wasm_v128_and(h, wasm_i32x4_splat(0x8000)), 16);
  const v128_t size = wasm_i32x4_shl(wasm_v128_and(h, wasm_i32x4_splat(0x7fff)), 13);
  const v128_t value = wasm_f32x4_mul(size, wasm_f32x4_splat(0x1p112f));
  // infinities and NaN: exponent 143 after the product
  const v128_t big = wasm_f32x4_ge(value, wasm_f32x4_splat(65536.f));
  return wasm_v128_or(wasm_v128_or(value, wasm_v128_and(big, wasm_i32x4_splat(0x7f800000))), sign);
}
inline F fset(float x) {
  const v128_t v = wasm_f32x4_splat(x);
  return {{v, v, v, v}};
}
inline F fload(const float* p) {
  return each([&](int i) { return wasm_v128_load(p + 4 * i); });
}
inline F fload_n(const float* p, int n) {
  float all[16] = {};
  if (n > 0) std::memcpy(all, p, size_t(std::min(n, 16)) * 4);
  return fload(all);
}
inline F fload_half(const uint16_t* p) {
  return each([&](int i) { return half4(wasm_u32x4_load16x4(p + 4 * i)); });
}
inline F fload_u16(const uint16_t* p) {
  return each([&](int i) { return wasm_f32x4_convert_u32x4(wasm_u32x4_load16x4(p + 4 * i)); });
}
inline void fstore(float* p, F x) {
  for (int i = 0; i < 4; ++i) wasm_v128_store(p + 4 * i, x.v[i]);
}
inline void fstore_n(float* p, F x, int n) {
  if (n >= 16) return fstore(p, x);
  float all[16];
  fstore(all, x);
  if (n > 0) std::memcpy(p, all, size_t(n) * 4);
}
inline void fstore_half(uint16_t* p, F x) {
  float all[16];
  fstore(all, x);
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(all[i]);
}
inline F fadd(F x, F y) {
  return each([&](int i) { return wasm_f32x4_add(x.v[i], y.v[i]); });
}
inline F fsub(F x, F y) {
  return each([&](int i) { return wasm_f32x4_sub(x.v[i], y.v[i]); });
}
inline F fmul(F x, F y) {
  return each([&](int i) { return wasm_f32x4_mul(x.v[i], y.v[i]); });
}
inline F fdiv(F x, F y) {
  return each([&](int i) { return wasm_f32x4_div(x.v[i], y.v[i]); });
}
inline F fma(F x, F y, F z) {
  return each([&](int i) { return madd(x.v[i], y.v[i], z.v[i]); });
}
inline F fnma(F x, F y, F z) {
  return each([&](int i) { return nmadd(x.v[i], y.v[i], z.v[i]); });
}
inline v128_t larger(v128_t x, v128_t y) { return wasm_f32x4_pmax(y, x); }  // y < x ? x : y
inline F fmax(F x, F y) {
  return each([&](int i) { return larger(x.v[i], y.v[i]); });
}
inline v128_t larger_size(v128_t x, v128_t y) { return wasm_u32x4_max(x, y); }
inline F fmax_size(F x, F y) {
  return each([&](int i) { return larger_size(x.v[i], y.v[i]); });
}
inline F fabs_(F x) {
  return each([&](int i) { return wasm_f32x4_abs(x.v[i]); });
}
inline F fneg(F x) {
  return each([&](int i) { return wasm_f32x4_neg(x.v[i]); });
}
inline F fround(F x) {
  return each([&](int i) { return wasm_f32x4_nearest(x.v[i]); });
}
inline F fscale2(F x, F r) {
  return each([&](int i) {
    const v128_t bits = wasm_i32x4_shl(wasm_i32x4_add(wasm_i32x4_trunc_sat_f32x4(r.v[i]), wasm_i32x4_splat(127)), 23);
    return wasm_f32x4_mul(x.v[i], bits);
  });
}
inline F fpositive(F x, F a, F b) {
  return each([&](int i) { return wasm_v128_bitselect(a.v[i], b.v[i], wasm_f32x4_ge(x.v[i], wasm_f32x4_splat(0.f))); });
}
inline F fzero_below(F x, F key, float limit) {
  const v128_t by = wasm_f32x4_splat(limit);
  return each([&](int i) { return wasm_v128_andnot(x.v[i], wasm_f32x4_lt(key.v[i], by)); });
}
inline bool fexceeds(F x, float limit) {
  const v128_t by = wasm_f32x4_splat(limit);
  const v128_t below = wasm_v128_and(wasm_v128_and(wasm_f32x4_le(x.v[0], by), wasm_f32x4_le(x.v[1], by)),
                                     wasm_v128_and(wasm_f32x4_le(x.v[2], by), wasm_f32x4_le(x.v[3], by)));
  return !wasm_i32x4_all_true(below);
}
inline float fsum(F x) {
  const v128_t q = wasm_f32x4_add(wasm_f32x4_add(x.v[0], x.v[2]), wasm_f32x4_add(x.v[1], x.v[3]));
  const v128_t d = wasm_f32x4_add(q, wasm_i32x4_shuffle(q, q, 2, 3, 0, 1));
  return wasm_f32x4_extract_lane(d, 0) + wasm_f32x4_extract_lane(d, 1);
}
inline float flargest(F x) {
  const v128_t q = larger(larger(x.v[0], x.v[2]), larger(x.v[1], x.v[3]));
  const v128_t d = larger(q, wasm_i32x4_shuffle(q, q, 2, 3, 0, 1));
  const float a = wasm_f32x4_extract_lane(d, 0), b = wasm_f32x4_extract_lane(d, 1);
  return a > b ? a : b;
}
inline float flargest_size(F x) {
  v128_t q = larger_size(larger_size(x.v[0], x.v[2]), larger_size(x.v[1], x.v[3]));
  q = larger_size(q, wasm_i32x4_shuffle(q, q, 2, 3, 0, 1));
  q = larger_size(q, wasm_i32x4_shuffle(q, q, 1, 0, 3, 2));
  return wasm_f32x4_extract_lane(q, 0);
}
inline I iset(int32_t x) {
  const v128_t v = wasm_i32x4_splat(x);
  return {{v, v, v, v}};
}
inline I iadd(I x, I y) {
  return each_int([&](int i) { return wasm_i32x4_add(x.v[i], y.v[i]); });
}
inline int32_t isum(I x) {
  v128_t q = wasm_i32x4_add(wasm_i32x4_add(x.v[0], x.v[1]), wasm_i32x4_add(x.v[2], x.v[3]));
  q = wasm_i32x4_add(q, wasm_i32x4_shuffle(q, q, 2, 3, 0, 1));
  return wasm_i32x4_extract_lane(q, 0) + wasm_i32x4_extract_lane(q, 1);
}
inline F itof(I x) {
  return each([&](int i) { return wasm_f32x4_convert_i32x4(x.v[i]); });
}
inline I ftoi(F x) {
  return each_int([&](int i) { return wasm_i32x4_trunc_sat_f32x4(wasm_f32x4_nearest(x.v[i])); });
}
inline void istore_s8(int8_t* p, I x) {
  wasm_v128_store(
      p, wasm_i8x16_shuffle(wasm_i8x16_shuffle(x.v[0], x.v[1], 0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0),
                            wasm_i8x16_shuffle(x.v[2], x.v[3], 0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0), 0,
                            1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23));
}
inline v128_t low_nibbles(v128_t x) { return wasm_v128_and(x, wasm_i8x16_splat(15)); }
inline v128_t high_nibbles(v128_t x) { return wasm_u8x16_shr(x, 4); }
inline B bload(const uint8_t* p) {
  return {{wasm_v128_load(p), wasm_v128_load(p + 16), wasm_v128_load(p + 32), wasm_v128_load(p + 48)}, false};
}
inline B blow(B x) {
  return {{low_nibbles(x.v[0]), low_nibbles(x.v[1]), low_nibbles(x.v[2]), low_nibbles(x.v[3])}, true};
}
inline B bhigh(B x) {
  return {{high_nibbles(x.v[0]), high_nibbles(x.v[1]), high_nibbles(x.v[2]), high_nibbles(x.v[3])}, true};
}
inline v128_t four_bytes(const int8_t* four) { return wasm_v128_load32_splat(four); }
// lane c: acc + sum over i < 4 of s8[4 c + i] * u7[4 c + i], u7 in 0 to 127
inline v128_t dot7(v128_t acc, v128_t s8, v128_t u7) {
#if defined(__wasm_relaxed_simd__)
  return wasm_i32x4_relaxed_dot_i8x16_i7x16_add(s8, u7, acc);
#else
  const v128_t even =
      wasm_i32x4_dot_i16x8(wasm_i16x8_shr(wasm_i16x8_shl(s8, 8), 8), wasm_v128_and(u7, wasm_i16x8_splat(255)));
  const v128_t odd = wasm_i32x4_dot_i16x8(wasm_i16x8_shr(s8, 8), wasm_u16x8_shr(u7, 8));
  return wasm_i32x4_add(acc, wasm_i32x4_add(even, odd));
#endif
}
// Where a dot product of four is three instructions, sums of two in 16 bits are two: the probe of isa_relaxed.cpp says
// so of processors. Without relaxed SIMD they are always less work.
#if defined(__wasm_relaxed_simd__)
bool pairs = false;
#else
constexpr bool pairs = true;
#endif
// acc + lane c: sum over i < 2 of s8[2 c + i] * u7[2 c + i], in 16 bits
inline v128_t dot_pairs(v128_t acc, v128_t s8, v128_t u7) {
#if defined(__wasm_relaxed_simd__)
  return wasm_i16x8_add(acc, wasm_i16x8_relaxed_dot_i8x16_i7x16(s8, u7));
#else
  const v128_t even =
      wasm_i16x8_mul(wasm_i16x8_shr(wasm_i16x8_shl(s8, 8), 8), wasm_v128_and(u7, wasm_i16x8_splat(255)));
  const v128_t odd = wasm_i16x8_mul(wasm_i16x8_shr(s8, 8), wasm_u16x8_shr(u7, 8));
  return wasm_i16x8_add(acc, wasm_i16x8_add(even, odd));
#endif
}
// How many products of two bytes, of which one is at most Most, 16 bits hold the sums of: 1, 2, 4 or 8.
constexpr int pairs_that_fit(int most) {
  const int fit = 32767 / (2 * 128 * most);
  return fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}
inline I dot_u8(I acc, B x, const int8_t* four) {
  const v128_t f = four_bytes(four);
  if (x.nibbles) return each_int([&](int i) { return dot7(acc.v[i], f, x.v[i]); });
  return each_int([&](int i) {
    const v128_t zero = wasm_i32x4_splat(0);
    return wasm_i32x4_add(dot7(acc.v[i], f, low_nibbles(x.v[i])),
                          wasm_i32x4_shl(dot7(zero, f, high_nibbles(x.v[i])), 4));
  });
}
inline I dot_s8(I acc, B x, const int8_t* four) {  // four is never negative
  const v128_t f = four_bytes(four);
  return each_int([&](int i) { return dot7(acc.v[i], x.v[i], f); });
}

// ---- what ggml.inl asks for ----------------------------------------------------------------------------------------
inline F fload_s8(const int8_t* p) {
  return each([&](int i) {
    const v128_t words = wasm_i16x8_extend_low_i8x16(wasm_v128_load32_zero(p + 4 * i));
    return wasm_f32x4_convert_i32x4(wasm_i32x4_extend_low_i16x8(words));
  });
}
inline F fload_bfloat(const uint16_t* p) {
  return each([&](int i) { return wasm_i32x4_shl(wasm_u32x4_load16x4(p + 4 * i), 16); });
}
// Bytes moved by `Right` bits (below 0: to the left) under a mask.
template <int Right, int Mask>
inline v128_t moved(const uint8_t* p) {
  v128_t x = wasm_v128_load(p);
  if constexpr (Right > 0) x = wasm_u8x16_shr(x, Right);
  if constexpr (Right < 0) x = wasm_i8x16_shl(x, -Right);
  return wasm_v128_and(x, wasm_i8x16_splat(static_cast<int8_t>(Mask)));
}
template <int Right, int Mask>
inline B bfield(const uint8_t* p) {
  return {{moved<Right, Mask>(p), moved<Right, Mask>(p + 16), moved<Right, Mask>(p + 32), moved<Right, Mask>(p + 48)},
          true};
}
template <int Right, int Mask>
inline B badd(B x, const uint8_t* p) {
  return {{wasm_v128_or(x.v[0], moved<Right, Mask>(p)), wasm_v128_or(x.v[1], moved<Right, Mask>(p + 16)),
           wasm_v128_or(x.v[2], moved<Right, Mask>(p + 32)), wasm_v128_or(x.v[3], moved<Right, Mask>(p + 48))},
          true};
}
inline B blookup(B x, const uint8_t* table) {
  const v128_t row = wasm_v128_load(table);
  return {{wasm_i8x16_swizzle(row, x.v[0]), wasm_i8x16_swizzle(row, x.v[1]), wasm_i8x16_swizzle(row, x.v[2]),
           wasm_i8x16_swizzle(row, x.v[3])},
          false};
}
// acc + N vectors times 4 N bytes, by sums in 16 bits; no byte of a vector that `part` gives is above Most.
template <int Most, int N, class Part>
inline __attribute__((always_inline)) I dots_by_pairs(I acc, const int8_t* q, Part part) {
  constexpr int kTogether = pairs_that_fit(Most) < N ? pairs_that_fit(Most) : N;
#pragma GCC unroll 8
  for (int from = 0; from < N; from += kTogether)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      v128_t sums = wasm_i32x4_splat(0);
#pragma GCC unroll 8
      for (int j = from; j < from + kTogether; ++j) sums = dot_pairs(sums, four_bytes(q + 4 * j), part(j, i));
      acc.v[i] = wasm_i32x4_add(acc.v[i], wasm_i32x4_extadd_pairwise_i16x8(sums));
    }
  return acc;
}
// acc + N vectors times 4 N bytes; no byte of a vector is above Most.
template <int Most, int N>
inline __attribute__((always_inline)) I dots(I acc, const B* v, const int8_t* q) {
  if (pairs && Most > 127) {
    acc = dots_by_pairs<15, N>(acc, q, [&](int j, int i) { return low_nibbles(v[j].v[i]); });
    const I high = dots_by_pairs<15, N>(iset(0), q, [&](int j, int i) { return high_nibbles(v[j].v[i]); });
    return each_int([&](int i) { return wasm_i32x4_add(acc.v[i], wasm_i32x4_shl(high.v[i], 4)); });
  }
  if (pairs && pairs_that_fit(Most) > 1) return dots_by_pairs<Most, N>(acc, q, [&](int j, int i) { return v[j].v[i]; });
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    B x = v[j];
    x.nibbles = Most < 128;
    acc = dot_u8(acc, x, q + 4 * j);
  }
  return acc;
}

struct Roof {
  v128_t v;
};
constexpr int kRoofMacs = 16;
inline Roof roof_start() { return {wasm_i32x4_splat(0)}; }
inline void roof_step(Roof& sum, const Roof& x) { sum.v = dot7(sum.v, x.v, x.v); }

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
