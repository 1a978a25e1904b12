// NEON on 64-bit Arm: four registers are a vector of 16 lanes.  The dot product instructions of Armv8.2 are used where
// the compiler may assume them.
#include "kernels.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"

namespace edgespec {
namespace {

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
      [&](int i) { return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x.v[i]), vcgeq_f32(key.v[i], by))); });
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
  const int32x4_t taken = dot(vdupq_n_s32(0), vdupq_n_s8(-128), f);  // what the 128 less take away
  return each_int([&](int i) { return vsubq_s32(dot(acc.v[i], less_128(x.v[i]), f), taken); });
}
inline I dot_s8(I acc, B x, const int8_t* four) {
  const int8x16_t f = four_bytes(four);
  return each_int([&](int i) { return dot(acc.v[i], as_signed(x.v[i]), f); });
}

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

// ---- matrices ------------------------------------------------------------------------------------------------------

constexpr int kAhead = 2048;  // bytes: how far weights are fetched before they are used

#define EDGESPEC_INLINE inline __attribute__((always_inline))

// Vector J of a block's payload times N rows, for the four quarters of the tile; x[r] are the 32 levels of a row.
template <Kind kind, int N, int J>
EDGESPEC_INLINE void vector_rows(const uint8_t* q, const int8x16_t (&x)[N][2], int32x4_t (&sum)[N][4]) {
  __builtin_prefetch(q + J * 64 + kAhead);
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const uint8x16_t v = vld1q_u8(q + J * 64 + c * 16);
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) {
      if constexpr (kind == kQ4) {
        sum[r][c] = dot_lane<J>(sum[r][c], as_signed(low_nibbles(v)), x[r][0]);
        sum[r][c] = dot_lane<J>(sum[r][c], as_signed(high_nibbles(v)), x[r][1]);
      } else {
        sum[r][c] = dot_lane<J % 4>(sum[r][c], less_128(v), x[r][J / 4]);
      }
    }
  }
}

template <Kind kind, int N>
EDGESPEC_INLINE void block_rows(const uint8_t* q, const Act* a, int32x4_t (&sum)[N][4]) {
  int8x16_t x[N][2];
  for (int r = 0; r < N; ++r) {
    x[r][0] = vld1q_s8(a[r].q);
    x[r][1] = vld1q_s8(a[r].q + 16);
  }
  vector_rows<kind, N, 0>(q, x, sum);
  vector_rows<kind, N, 1>(q, x, sum);
  vector_rows<kind, N, 2>(q, x, sum);
  vector_rows<kind, N, 3>(q, x, sum);
  if constexpr (kind != kQ4) {
    vector_rows<kind, N, 4>(q, x, sum);
    vector_rows<kind, N, 5>(q, x, sum);
    vector_rows<kind, N, 6>(q, x, sum);
    vector_rows<kind, N, 7>(q, x, sum);
  }
}

// N of `rows` rows.  Bytes become signed by taking 128 off, so only nibbles need the offset.
template <Kind kind, int N>
void linear_rows(const uint8_t* w, int blocks, const Act* a, int rows, float* y, size_t ld, int columns) {
  constexpr size_t payload = kind == kQ4 ? 256 : 512;
  float32x4_t acc[N][4];
  for (auto& row : acc)
    for (auto& v : row) v = vdupq_n_f32(0);
  for (int pair = 0; pair < blocks / 2; ++pair, w += 64 + 2 * payload)
    for (int half = 0; half < 2; ++half, a += rows) {
      int32x4_t sum[N][4];
      for (int r = 0; r < N; ++r)
        for (auto& v : sum[r]) v = vdupq_n_s32(kind == kQ4 ? a[r].offset : 0);
      block_rows<kind, N>(w + 64 + half * payload, a, sum);
      const F scales = fload_half(reinterpret_cast<const uint16_t*>(w + half * 32));
      for (int r = 0; r < N; ++r)
        for (int c = 0; c < 4; ++c)
          acc[r][c] = vfmaq_f32(acc[r][c], vcvtq_f32_s32(sum[r][c]), vmulq_n_f32(scales.v[c], a[r].scale));
    }
  for (int r = 0; r < N; ++r) fstore_n(y + r * ld, {{acc[r][0], acc[r][1], acc[r][2], acc[r][3]}}, columns);
}

template <int N>
void channel_rows(const uint8_t* w, int blocks, const Act* a, int rows, float* y, size_t ld, int columns) {
  int32x4_t sum[N][4];
  for (auto& row : sum)
    for (auto& v : row) v = vdupq_n_s32(0);
  for (int block = 0; block < blocks; ++block, w += 512) block_rows<kC8, N>(w, a + size_t(block) * rows, sum);
  const F scales = fload(reinterpret_cast<const float*>(w));
  for (int r = 0; r < N; ++r)
    fstore_n(y + r * ld, fmul(itof({{sum[r][0], sum[r][1], sum[r][2], sum[r][3]}}), fmul(scales, fset(a[r].scale))),
             columns);
}

template <Kind kind, int N>
EDGESPEC_INLINE void some_rows(const uint8_t* w, int blocks, const Act* a, int rows, float* y, size_t ld, int columns) {
  if constexpr (kind == kC8)
    channel_rows<N>(w, blocks, a, rows, y, ld, columns);
  else
    linear_rows<kind, N>(w, blocks, a, rows, y, ld, columns);
}

// Four rows at a time fill the registers; a tile stays in the nearest cache meanwhile.
template <Kind kind>
EDGESPEC_INLINE void all_rows(const uint8_t* w, int k, const void* act, int rows, float* y, size_t ld, int columns) {
  const Act* a = static_cast<const Act*>(act);
  const int blocks = blocks_of(k);
  int r = 0;
  for (; r + 4 <= rows; r += 4) some_rows<kind, 4>(w, blocks, a + r, rows, y + r * ld, ld, columns);
  if (rows - r == 3) some_rows<kind, 3>(w, blocks, a + r, rows, y + r * ld, ld, columns);
  if (rows - r == 2) some_rows<kind, 2>(w, blocks, a + r, rows, y + r * ld, ld, columns);
  if (rows - r == 1) some_rows<kind, 1>(w, blocks, a + r, rows, y + r * ld, ld, columns);
}

void linear_q4(const uint8_t* t, int k, const void* a, int rows, float* y, size_t ld, int columns) {
  all_rows<kQ4>(t, k, a, rows, y, ld, columns);
}
void linear_q8(const uint8_t* t, int k, const void* a, int rows, float* y, size_t ld, int columns) {
  all_rows<kQ8>(t, k, a, rows, y, ld, columns);
}
void linear_c8(const uint8_t* t, int k, const void* a, int rows, float* y, size_t ld, int columns) {
  all_rows<kC8>(t, k, a, rows, y, ld, columns);
}

// Vectors `from` to `from + V` of the tile: four partial sums each leave registers for one row of 4 or three of 2.
template <int R, int V>
EDGESPEC_INLINE void float_rows(const float* w, int k, const float* x, F* out, int from) {
  float32x4_t acc[R][4][V];
  for (auto& row : acc)
    for (auto& part : row)
      for (auto& v : part) v = vdupq_n_f32(0);
  const auto add = [&](const float* line, int i, int s) __attribute__((always_inline)) {
    for (int c = 0; c < V; ++c) {
      const float32x4_t v = vld1q_f32(line + (from + c) * 4);
      for (int r = 0; r < R; ++r) acc[r][s][c] = vfmaq_n_f32(acc[r][s][c], v, x[size_t(r) * k + i]);
    }
  };
  int i = 0;
  for (; i + 4 <= k; i += 4, w += 64)
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      __builtin_prefetch(reinterpret_cast<const char*>(w + s * 16) + kAhead);
      add(w + s * 16, i + s, s);
    }
#pragma GCC unroll 3
  for (int s = 0; s < 3; ++s)
    if (i + s < k) add(w + s * 16, i + s, s);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < V; ++c)
      out[r].v[from + c] = vaddq_f32(vaddq_f32(acc[r][0][c], acc[r][1][c]), vaddq_f32(acc[r][2][c], acc[r][3][c]));
}

void linear_f32(const uint8_t* t, int k, const void* a, int rows, float* y, size_t ld, int columns) {
  const float* w = reinterpret_cast<const float*>(t);
  const float* x = static_cast<const float*>(a);
  F out[3];
  for (int n; rows > 0; rows -= n, x += size_t(n) * k, y += n * ld) {
    n = rows < 3 ? 1 : 3;
    if (n == 1) {
      float_rows<1, 4>(w, k, x, out, 0);
    } else {
      float_rows<3, 2>(w, k, x, out, 0);
      float_rows<3, 2>(w, k, x, out, 2);
    }
    for (int r = 0; r < n; ++r) fstore_n(y + r * ld, out[r], columns);
  }
}

#include "kernels.inl"

const Kernels table = kTable("neon");

}  // namespace

const Kernels* neon_kernels() { return &table; }

}  // namespace edgespec

#else
namespace edgespec {
const Kernels* neon_kernels() { return nullptr; }
}  // namespace edgespec
#endif
