// Matrices on lanes_neon.inl, included after it, for isa_neon.cpp and isa_i8mm.cpp: by dot products, and two rows at a
// time by the matrix products of Armv8.6 where the compiler may assume them.

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

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Two rows of a block by smmla: a register is two columns (or the two rows) of 8 numbers along k each, the result 2 x 2
// sums.  The tile's order has 4 numbers of 4 columns in a register; two neighbours along k are interleaved.
template <Kind kind>
EDGESPEC_INLINE void pairs_of_columns(const uint8_t* q, int8x16_t (&w)[2][4]) {
  int8x16_t v[8];
#pragma GCC unroll 8
  for (int j = 0; j < (kind == kQ4 ? 4 : 8); ++j) {
    const uint8x16_t x = vld1q_u8(q + j * 64);
    v[j] = kind == kQ4 ? as_signed(low_nibbles(x)) : less_128(x);
    if (kind == kQ4) v[j + 4] = as_signed(high_nibbles(x));
  }
#pragma GCC unroll 4
  for (int e = 0; e < 4; ++e) {
    const int32x4_t a = vreinterpretq_s32_s8(v[2 * e]), b = vreinterpretq_s32_s8(v[2 * e + 1]);
    w[0][e] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
    w[1][e] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
  }
}

template <Kind kind, int N>
EDGESPEC_INLINE void paired_rows(const uint8_t* q, const Act* a, int32x4_t (&sum)[N][4]) {
  constexpr int kPairs = N / 2;
  int8x16_t x[kPairs][4];
#pragma GCC unroll 2
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 4
    for (int e = 0; e < 4; ++e) x[p][e] = vcombine_s8(vld1_s8(a[2 * p].q + 8 * e), vld1_s8(a[2 * p + 1].q + 8 * e));
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    __builtin_prefetch(q + c * (kind == kQ4 ? 64 : 128) + kAhead);
    if (kind != kQ4) __builtin_prefetch(q + c * 128 + 64 + kAhead);
    int8x16_t w[2][4];
    pairs_of_columns<kind>(q + c * 16, w);
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; ++p) {
      int32x4_t left = vdupq_n_s32(0), right = left;
#pragma GCC unroll 4
      for (int e = 0; e < 4; ++e) {
        left = vmmlaq_s32(left, w[0][e], x[p][e]);
        right = vmmlaq_s32(right, w[1][e], x[p][e]);
      }
      sum[2 * p][c] = vaddq_s32(sum[2 * p][c], vuzp1q_s32(left, right));
      sum[2 * p + 1][c] = vaddq_s32(sum[2 * p + 1][c], vuzp2q_s32(left, right));
    }
  }
}
#endif

template <Kind kind, int N>
EDGESPEC_INLINE void block_rows(const uint8_t* q, const Act* a, int32x4_t (&sum)[N][4]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  if constexpr (N % 2 == 0) return paired_rows<kind, N>(q, a, sum);
#endif
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
#if !defined(__ARM_FEATURE_MATMUL_INT8)  // there two rows and one take less
  if (rows - r == 3) return some_rows<kind, 3>(w, blocks, a + r, rows, y + r * ld, ld, columns);
#endif
  if (rows - r >= 2) {
    some_rows<kind, 2>(w, blocks, a + r, rows, y + r * ld, ld, columns);
    r += 2;
  }
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
