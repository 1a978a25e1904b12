// 16 lanes as four registers of NEON, for isa_neon.cpp and isa_i8mm.cpp, which include it in their anonymous namespace.

struct F {
  float32x4_t v[4];
};
struct I {
  int32x4_t v[4];
};
// `nibbles`: no byte is above 15.  Known when compiling, as everything is inlined, so asking costs nothing.
struct B {
  uint8x16_t v[4];
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

inline F fset(float x) {
  return each([&](int) { return vdupq_n_f32(x); });
}
inline F fload(const float* p) {
  return each([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline F fload_n(const float* p, int n) {
  float all[16] = {};
  if (n > 0) std::memcpy(all, p, size_t(std::min(n, 16)) * 4);
  return fload(all);
}
inline F fload_half(const uint16_t* p) {
  return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline F fload_u16(const uint16_t* p) {
  return each([&](int i) { return vcvtq_f32_u32(vmovl_u16(vld1_u16(p + 4 * i))); });
}
inline void fstore(float* p, F x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
inline void fstore_n(float* p, F x, int n) {
  if (n >= 16) return fstore(p, x);
  float all[16];
  fstore(all, x);
  if (n > 0) std::memcpy(p, all, size_t(n) * 4);
}
inline void fstore_half(uint16_t* p, F x) {
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i])));
}
inline F fadd(F x, F y) {
  return each([&](int i) { return vaddq_f32(x.v[i], y.v[i]); });
}
inline F fsub(F x, F y) {
  return each([&](int i) { return vsubq_f32(x.v[i], y.v[i]); });
}
inline F fmul(F x, F y) {
  return each([&](int i) { return vmulq_f32(x.v[i], y.v[i]); });
}
inline F fdiv(F x, F y) {
  return each([&](int i) { return vdivq_f32(x.v[i], y.v[i]); });
}
inline F fma(F x, F y, F z) {
  return each([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); });
}
inline F fnma(F x, F y, F z) {
  return each([&](int i) { return vfmsq_f32(z.v[i], x.v[i], y.v[i]); });
}
// x > y ? x : y, also for NaN and zeros of different sign, which FMAX treats otherwise
inline float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline F fmax(F x, F y) {
  return each([&](int i) { return larger(x.v[i], y.v[i]); });
}
inline float32x4_t larger_size(float32x4_t x, float32x4_t y) {
  return vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(x), vreinterpretq_u32_f32(y)));
}
inline F fmax_size(F x, F y) {
  return each([&](int i) { return larger_size(x.v[i], y.v[i]); });
}
inline F fabs_(F x) {
  return each([&](int i) { return vabsq_f32(x.v[i]); });
}
inline F fneg(F x) {
  return each([&](int i) { return vnegq_f32(x.v[i]); });
}
inline F fround(F x) {
  return each([&](int i) { return vrndnq_f32(x.v[i]); });
}
// x * 2^r for whole r in -126 to 127: the power is put together from its bits, the product rounds as ldexp does
inline F fscale2(F x, F r) {
  return each([&](int i) {
    const int32x4_t bits = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(r.v[i]), vdupq_n_s32(127)), 23);
    return vmulq_f32(x.v[i], vreinterpretq_f32_s32(bits));
  });
}
inline F fpositive(F x, F a, F b) {
  return each([&](int i) { return vbslq_f32(vcgezq_f32(x.v[i]), a.v[i], b.v[i]); });
}
inline F fzero_below(F x, F key, float limit) {
  const float32x4_t by = vdupq_n_f32(limit);
  return each(
      [&](int i) { return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x.v[i]), vcltq_f32(key.v[i], by))); });
}
inline bool fexceeds(F x, float limit) {
  const float32x4_t by = vdupq_n_f32(limit);
  const uint32x4_t below = vandq_u32(vandq_u32(vcleq_f32(x.v[0], by), vcleq_f32(x.v[1], by)),
                                     vandq_u32(vcleq_f32(x.v[2], by), vcleq_f32(x.v[3], by)));
  return vminvq_u32(below) == 0;
}
inline float fsum(F x) {
  const float32x4_t q = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
  return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
inline float flargest(F x) {
  const float32x4_t q = larger(larger(x.v[0], x.v[2]), larger(x.v[1], x.v[3]));
  const float32x2_t low = vget_low_f32(q), high = vget_high_f32(q), d = vbsl_f32(vcgt_f32(low, high), low, high);
  const float a = vget_lane_f32(d, 0), b = vget_lane_f32(d, 1);
  return a > b ? a : b;
}
inline float flargest_size(F x) {
  const float32x4_t q = larger_size(larger_size(x.v[0], x.v[2]), larger_size(x.v[1], x.v[3]));
  return vget_lane_f32(vreinterpret_f32_u32(vdup_n_u32(vmaxvq_u32(vreinterpretq_u32_f32(q)))), 0);
}

inline I iset(int32_t x) {
  return each_int([&](int) { return vdupq_n_s32(x); });
}
inline I iadd(I x, I y) {
  return each_int([&](int i) { return vaddq_s32(x.v[i], y.v[i]); });
}
inline int32_t isum(I x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3]))); }
inline F itof(I x) {
  return each([&](int i) { return vcvtq_f32_s32(x.v[i]); });
}
inline I ftoi(F x) {
  return each_int([&](int i) { return vcvtnq_s32_f32(x.v[i]); });
}
inline void istore_s8(int8_t* p, I x) {  // the low bytes, without saturation
  const int16x8_t a = vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1])),
                  b = vcombine_s16(vmovn_s32(x.v[2]), vmovn_s32(x.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(a), vmovn_s16(b)));
}
inline uint8x16_t low_nibbles(uint8x16_t x) { return vandq_u8(x, vdupq_n_u8(15)); }
inline uint8x16_t high_nibbles(uint8x16_t x) { return vshrq_n_u8(x, 4); }
inline B bload(const uint8_t* p) {
  return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}, false};
}
inline B blow(B x) {
  return {{low_nibbles(x.v[0]), low_nibbles(x.v[1]), low_nibbles(x.v[2]), low_nibbles(x.v[3])}, true};
}
inline B bhigh(B x) {
  return {{high_nibbles(x.v[0]), high_nibbles(x.v[1]), high_nibbles(x.v[2]), high_nibbles(x.v[3])}, true};
}

// lane c: acc + sum over i < 4 of x[4 c + i] * y[4 c + i].  No two products of bytes are both (-128)^2 here: where one
// side may be -128, the other is at least -127.
inline int32x4_t dot(int32x4_t acc, int8x16_t x, int8x16_t y) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(acc, x, y);
#else
  return vpadalq_s16(acc, vpaddq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y)));
#endif
}
// the same with four bytes of y for every lane
template <int Lane>
inline int32x4_t dot_lane(int32x4_t acc, int8x16_t x, int8x16_t y) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_laneq_s32(acc, x, y, Lane);
#else
  return dot(acc, x, vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(y), Lane)));
#endif
}
inline int8x16_t four_bytes(const int8_t* four) {
  int32_t word;
  std::memcpy(&word, four, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(word));
}
inline int8x16_t as_signed(uint8x16_t x) { return vreinterpretq_s8_u8(x); }
inline int8x16_t less_128(uint8x16_t x) { return as_signed(veorq_u8(x, vdupq_n_u8(128))); }
inline I dot_u8(I acc, B x, const int8_t* four) {
  const int8x16_t f = four_bytes(four);
  if (x.nibbles) return each_int([&](int i) { return dot(acc.v[i], as_signed(x.v[i]), f); });
  const int32x4_t taken = dot(vdupq_n_s32(0), vdupq_n_s8(-128), f);  // correction for the 128 that was subtracted
  return each_int([&](int i) { return vsubq_s32(dot(acc.v[i], less_128(x.v[i]), f), taken); });
}
inline I dot_s8(I acc, B x, const int8_t* four) {
  const int8x16_t f = four_bytes(four);
  return each_int([&](int i) { return dot(acc.v[i], as_signed(x.v[i]), f); });
}

// ---- what ggml.inl asks for ----------------------------------------------------------------------------------------
inline F fload_s8(const int8_t* p) {
  const int8x16_t x = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_s8(vget_high_s8(x));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
inline F fload_bfloat(const uint16_t* p) {
  return each([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
// Bytes moved by `Right` bits (below 0: to the left) under a mask.
template <int Right, int Mask>
inline uint8x16_t moved(const uint8_t* p) {
  uint8x16_t x = vld1q_u8(p);
  if constexpr (Right > 0) x = vshrq_n_u8(x, Right);
  if constexpr (Right < 0) x = vshlq_n_u8(x, -Right);
  return vandq_u8(x, vdupq_n_u8(Mask));
}
template <int Right, int Mask>
inline B bfield(const uint8_t* p) {
  return {{moved<Right, Mask>(p), moved<Right, Mask>(p + 16), moved<Right, Mask>(p + 32), moved<Right, Mask>(p + 48)},
          true};
}
template <int Right, int Mask>
inline B badd(B x, const uint8_t* p) {
  return {{vorrq_u8(x.v[0], moved<Right, Mask>(p)), vorrq_u8(x.v[1], moved<Right, Mask>(p + 16)),
           vorrq_u8(x.v[2], moved<Right, Mask>(p + 32)), vorrq_u8(x.v[3], moved<Right, Mask>(p + 48))},
          true};
}
inline B blookup(B x, const uint8_t* table) {
  const uint8x16_t row = vld1q_u8(table);
  return {{vqtbl1q_u8(row, x.v[0]), vqtbl1q_u8(row, x.v[1]), vqtbl1q_u8(row, x.v[2]), vqtbl1q_u8(row, x.v[3])}, false};
}
// acc + N vectors times 4 N bytes; no byte of a vector is above Most.
template <int Most, int N>
inline __attribute__((always_inline)) I dots(I acc, const B* v, const int8_t* q) {
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    B x = v[j];
    x.nibbles = Most < 128;  // a signed byte
    acc = dot_u8(acc, x, q + 4 * j);
  }
  return acc;
}

struct Roof {
  int32x4_t v;
};
inline Roof roof_start() { return {vdupq_n_s32(0)}; }
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kRoofMacs = 32;
inline void roof_step(Roof& sum, const Roof& x) {
  asm volatile("smmla %0.4s, %1.16b, %1.16b" : "+w"(sum.v) : "w"(x.v));
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kRoofMacs = 16;
inline void roof_step(Roof& sum, const Roof& x) { asm volatile("sdot %0.4s, %1.16b, %1.16b" : "+w"(sum.v) : "w"(x.v)); }
#else  // as dot does it
constexpr int kRoofMacs = 16;
inline void roof_step(Roof& sum, const Roof& x) {
  const int8x16_t v = vreinterpretq_s8_s32(x.v);
  sum.v = dot(sum.v, v, v);
  asm volatile("" : "+w"(sum.v));
}
#endif

// Two look-ups are added in 8 bits before they are widened: the even bytes of `sum` minus what the odd ones carried in.
template <int Q>
void nomad_sums(const uint8_t* codes, int subs, const uint8_t* const* tables, uint16_t (*out)[kKvBlock]) {
  if constexpr (Q > 4) {
    nomad_sums<4>(codes, subs, tables, out);
    nomad_sums<Q - 4>(codes, subs, tables + 4, out + 4);
  } else {
    for (int quarter = 0; quarter < 4; ++quarter) {
      uint16x8_t acc[Q][4];
      for (int q = 0; q < Q; ++q)
        for (uint16x8_t& a : acc[q]) a = vdupq_n_u16(0);
      for (int m = 0; m < subs; m += 2) {
        const uint8_t* at = codes + size_t(m) * 64 + quarter * 16;
        const uint8x16_t a = vld1q_u8(at), b = vld1q_u8(at + 64);
        const uint8x16_t a0 = low_nibbles(a), a1 = high_nibbles(a), b0 = low_nibbles(b), b1 = high_nibbles(b);
        for (int q = 0; q < Q; ++q) {
          const uint8x16_t ta = vld1q_u8(tables[q] + m * 16), tb = vld1q_u8(tables[q] + m * 16 + 16);
          const uint16x8_t low = vreinterpretq_u16_u8(vaddq_u8(vqtbl1q_u8(ta, a0), vqtbl1q_u8(tb, b0)));
          const uint16x8_t high = vreinterpretq_u16_u8(vaddq_u8(vqtbl1q_u8(ta, a1), vqtbl1q_u8(tb, b1)));
          acc[q][0] = vaddq_u16(acc[q][0], low);
          acc[q][1] = vsraq_n_u16(acc[q][1], low, 8);
          acc[q][2] = vaddq_u16(acc[q][2], high);
          acc[q][3] = vsraq_n_u16(acc[q][3], high, 8);
        }
      }
      for (int q = 0; q < Q; ++q)
        for (int i = 0; i < 4; ++i) {
          const uint16x8_t sum = i & 1 ? acc[q][i] : vsubq_u16(acc[q][i], vshlq_n_u16(acc[q][i + 1], 8));
          vst1q_u16(out[q] + i * 32 + quarter * 8, sum);
        }
    }
  }
}
