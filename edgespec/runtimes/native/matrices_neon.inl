// Matrices on lanes_neon.inl, included after it, for isa_neon.cpp and isa_i8mm.cpp: by dot products, and two rows at a
// time by the matrix products of Armv8.6 where the compiler may assume them.

constexpr int kAhead = 2048;  // bytes: how far weights are fetched before they are used

#define EDGESPEC_INLINE inline __attribute__((always_inline))

// Keeps the compiler from loading the next rows early, which would move sums to memory.
EDGESPEC_INLINE void in_order() { asm volatile("" ::: "memory"); }

// Operands of four columns of a block: v[j] holds k = 4 j to 4 j + 3 of each.
template <Kind kind>
EDGESPEC_INLINE void four_columns(const uint8_t* q, const uint8_t* low, int8x16_t (&v)[8]) {
#pragma GCC unroll 8
  for (int j = 0; j < (is_four(kind) ? 4 : 8); ++j) {
    const uint8x16_t x = vld1q_u8(q + j * 64);
    if constexpr (kind == kP8) {
      const uint8x16_t z = vld1q_u8(low + j * 64);
      v[j] = less_128(vsliq_n_u8(z, x, 4));
      v[j + 4] = less_128(vsriq_n_u8(x, z, 4));
      continue;
    }
    v[j] = is_four(kind) ? as_signed(low_nibbles(x)) : less_128(x);
    if (is_four(kind)) v[j + 4] = as_signed(high_nibbles(x));
  }
}

// A block of N rows: their chains of products run side by side, which hides the instruction's latency.
template <int N, int J = 0>
EDGESPEC_INLINE void row_sums(const int8x16_t (&v)[8], const Act* a, int32x4_t* sums) {
  for (int r = 0; r < N; ++r) sums[r] = dot_lane<J % 4>(sums[r], v[J], vld1q_s8(a[r].q + J / 4 * 16));
  if constexpr (J < 7) row_sums<N, J + 1>(v, a, sums);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kPairs = true;
// A block of two rows by smmla: a register is two columns (or the two rows) of 8 numbers along k each, the sums are
// those of the first column for both rows, then of the second: of columns 0 and 1 in sums[0], of 2 and 3 in sums[1].
EDGESPEC_INLINE void pair_sums(const int8x16_t (&w)[8], const Act* a, int32x4_t (&sums)[2]) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const int64x2_t x = vreinterpretq_s64_s8(vld1q_s8(a[0].q + 16 * half));
    const int64x2_t y = vreinterpretq_s64_s8(vld1q_s8(a[1].q + 16 * half));
    const int8x16_t first = vreinterpretq_s8_s64(vzip1q_s64(x, y)), second = vreinterpretq_s8_s64(vzip2q_s64(x, y));
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      sums[i] = vmmlaq_s32(sums[i], w[4 * half + i], first);
      sums[i] = vmmlaq_s32(sums[i], w[4 * half + 2 + i], second);
    }
  }
}
// From the order of four_columns: two neighbours along k are interleaved.
EDGESPEC_INLINE void pairs_of_columns(int8x16_t (&v)[8]) {
#pragma GCC unroll 4
  for (int e = 0; e < 8; e += 2) {
    const int32x4_t a = vreinterpretq_s32_s8(v[e]), b = vreinterpretq_s32_s8(v[e + 1]);
    v[e] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
    v[e + 1] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
  }
}
// Scales and offsets of two rows, interleaved.
struct TwoRows {
  float32x4_t scales;
  int32x4_t offsets;
};
EDGESPEC_INLINE TwoRows two_rows(const Act* a) {
  const int32x4_t both = vreinterpretq_s32_s8(vcombine_s8(vld1_s8(reinterpret_cast<const int8_t*>(&a[0].scale)),
                                                          vld1_s8(reinterpret_cast<const int8_t*>(&a[1].scale))));
  return {vreinterpretq_f32_s32(vuzp1q_s32(both, both)), vuzp2q_s32(both, both)};
}
#else
constexpr bool kPairs = false;
#endif

// Four columns of N rows.
template <int N>
EDGESPEC_INLINE void store_columns(const float32x4_t (&v)[N], float* y, size_t ld, int columns) {
  for (int r = 0; r < N; ++r, y += ld) {
    float32x4_t row = v[r];
    if (kPairs && N % 2 == 0) row = r % 2 ? vuzp2q_f32(v[r - 1], v[r]) : vuzp1q_f32(v[r], v[r + 1]);
    if (columns >= 4) {
      vst1q_f32(y, row);
    } else if (columns > 0) {
      float all[4];
      vst1q_f32(all, row);
      std::memcpy(y, all, size_t(columns) * 4);
    }
  }
}

// Up to 16 columns for up to 4 rows, fewer for more, so that the sums fit the registers.  The tile stays in the nearest
// cache.
constexpr int quarters_of(int rows) { return rows > 8 ? 1 : rows > 4 ? 2 : 4; }

// N of `rows` rows.  Bytes become signed by taking 128 off, so only nibbles need the offset.
template <Kind kind, int N>
void linear_rows(Weights weights, int blocks, const Act* acts, int rows, float* y, size_t ld, int columns) {
  constexpr bool kFour = is_four(kind) && kind != kP8;
  constexpr size_t payload = payload_bytes(kind);
  constexpr int kQuarters = quarters_of(N), kTogether = N % 2 ? N : N < 4 ? N : 4;
  for (int from = 0; from < 4; from += kQuarters) {
    float32x4_t acc[kQuarters][N];
    for (auto& quarter : acc)
      for (auto& v : quarter) v = vdupq_n_f32(0);
    const uint8_t *w = weights.high, *low = weights.low;
    const Act* a = acts;
    for (int pair = 0; pair < blocks / 2; ++pair, w += 64 + 2 * payload)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half, a += rows) {
        const uint8_t *q = w + 64 + half * payload, *own = w + half * 32;
#pragma GCC unroll 8
        for (size_t line = 0; line < payload; line += 64) {
          __builtin_prefetch(q + line + kAhead);
          if (kind == kP8) __builtin_prefetch(low + line + kAhead);
        }
        const uint8_t* beside = low;
        if (kind == kP8) low += payload;
#pragma GCC unroll 4
        for (int c = 0; c < kQuarters; ++c) {
          int8x16_t v[8];
          four_columns<kind>(q + (from + c) * 16, kind == kP8 ? beside + (from + c) * 16 : nullptr, v);
          const uint16_t* halves = reinterpret_cast<const uint16_t*>(own) + (from + c) * 4;
          const float32x4_t scales = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
#if defined(__ARM_FEATURE_MATMUL_INT8)
          if constexpr (N % 2 == 0) {
            pairs_of_columns(v);
            const float32x4_t by[2] = {vzip1q_f32(scales, scales), vzip2q_f32(scales, scales)};
#pragma GCC unroll 8
            for (int r = 0; r < N; r += 2) {
              const TwoRows two = two_rows(a + r);
              int32x4_t sums[2];
              for (auto& sum : sums) sum = kFour ? two.offsets : vdupq_n_s32(0);
              pair_sums(v, a + r, sums);
              in_order();
              for (int i = 0; i < 2; ++i)
                acc[c][r + i] = vfmaq_f32(acc[c][r + i], vcvtq_f32_s32(sums[i]), vmulq_f32(by[i], two.scales));
            }
            continue;
          }
#endif
#pragma GCC unroll 16
          for (int r = 0; r < N; r += kTogether) {
            int32x4_t sums[kTogether];
            for (int i = 0; i < kTogether; ++i) sums[i] = vdupq_n_s32(kFour ? a[r + i].offset : 0);
            row_sums<kTogether>(v, a + r, sums);
            in_order();
            for (int i = 0; i < kTogether; ++i)
              acc[c][r + i] = vfmaq_f32(acc[c][r + i], vcvtq_f32_s32(sums[i]), vmulq_n_f32(scales, a[r + i].scale));
          }
        }
      }
    for (int c = 0; c < kQuarters; ++c) store_columns<N>(acc[c], y + 4 * (from + c), ld, columns - 4 * (from + c));
  }
}

template <int N>
void channel_rows(const uint8_t* tile, int blocks, const Act* acts, int rows, float* y, size_t ld, int columns) {
  constexpr int kQuarters = quarters_of(N), kTogether = N % 2 ? N : N < 4 ? N : 4;
  for (int from = 0; from < 4; from += kQuarters) {
    int32x4_t sum[kQuarters][N];
    for (auto& quarter : sum)
      for (auto& v : quarter) v = vdupq_n_s32(0);
    const Act* a = acts;
    const uint8_t* w = tile;
    for (int block = 0; block < blocks; ++block, w += 512, a += rows) {
#pragma GCC unroll 8
      for (int line = 0; line < 512; line += 64) __builtin_prefetch(w + line + kAhead);
#pragma GCC unroll 4
      for (int c = 0; c < kQuarters; ++c) {
        int8x16_t v[8];
        four_columns<kC8>(w + (from + c) * 16, nullptr, v);
#if defined(__ARM_FEATURE_MATMUL_INT8)
        if constexpr (N % 2 == 0) {
          pairs_of_columns(v);
#pragma GCC unroll 8
          for (int r = 0; r < N; r += 2) {
            int32x4_t sums[2] = {sum[c][r], sum[c][r + 1]};
            pair_sums(v, a + r, sums);
            sum[c][r] = sums[0];
            sum[c][r + 1] = sums[1];
          }
          continue;
        }
#endif
#pragma GCC unroll 16
        for (int r = 0; r < N; r += kTogether) row_sums<kTogether>(v, a + r, sum[c] + r);
      }
    }
    for (int c = 0; c < kQuarters; ++c) {
      const float32x4_t scales = vld1q_f32(reinterpret_cast<const float*>(w) + 4 * (from + c));
      float32x4_t found[N];
      for (int r = 0; r < N; ++r) {
        float32x4_t by = vmulq_n_f32(scales, acts[r].scale);
#if defined(__ARM_FEATURE_MATMUL_INT8)
        if constexpr (N % 2 == 0) {
          const float32x4_t two = r % 2 ? vzip2q_f32(scales, scales) : vzip1q_f32(scales, scales);
          by = vmulq_f32(two, two_rows(acts + r / 2 * 2).scales);
        }
#endif
        found[r] = vmulq_f32(vcvtq_f32_s32(sum[c][r]), by);
      }
      store_columns<N>(found, y + 4 * (from + c), ld, columns - 4 * (from + c));
    }
  }
}

template <Kind kind, int N>
EDGESPEC_INLINE void some_rows(Weights w, int blocks, const Act* a, int rows, float* y, size_t ld, int columns) {
  if constexpr (kind == kC8)
    channel_rows<N>(w.high, blocks, a, rows, y, ld, columns);
  else
    linear_rows<kind, N>(w, blocks, a, rows, y, ld, columns);
}

template <Kind kind>
EDGESPEC_INLINE void all_rows(Weights w, int k, const void* act, int rows, float* y, size_t ld, int columns) {
  const Act* a = static_cast<const Act*>(act);
  const int blocks = blocks_of(k);
  int r = 0;
  const auto take = [&](auto count) __attribute__((always_inline)) {
    for (constexpr int n = decltype(count)::value; r + n <= rows; r += n)
      some_rows<kind, n>(w, blocks, a + r, rows, y + r * ld, ld, columns);
  };
  take(std::integral_constant<int, 16>());
  take(std::integral_constant<int, 8>());
  take(std::integral_constant<int, 4>());
  if (!kPairs) take(std::integral_constant<int, 3>());  // two rows and one take less otherwise
  take(std::integral_constant<int, 2>());
  take(std::integral_constant<int, 1>());
}

void linear_high(const uint8_t* tile, int k, const void* act, int rows, float* y, size_t ld, int columns);

constexpr int kFloatRows = 1, kChainRows = 6;  // of four registers
#include "floats.inl"
#include "ggml.inl"

template <Kind kind>
void linear(Weights t, int k, const void* a, int rows, float* y, size_t ld, int columns) {
  if (kind == kP8 && !t.low) return linear_high(t.high, k, a, rows, y, ld, columns);
  if constexpr (takes_floats(kind))
    linear_floats<kind>(t.high, k, a, rows, y, ld, columns);
  else if constexpr (is_ggml(kind))
    ggml_rows<kind>(t.high, k, static_cast<const Act*>(a), rows, y, ld, columns);
  else
    all_rows<kind>(t, k, a, rows, y, ld, columns);
}
