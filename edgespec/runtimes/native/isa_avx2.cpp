// AVX2 with FMA and F16C: byte products add up in 16 bits before they are widened.
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "ggml.h"
#include "half.h"

namespace edgespec {
namespace {

#include "lanes_avx2.inl"
#include "matrices_avx2.inl"

// Rows of one block of nibbles.  Products of a whole block, at most 16 * 15 * 127 per lane, add up in 16 bits.  A block
// is read in two parts, whose weights stay in 8 registers while the rows pass by: a broadcast load serves both halves
// of the tile.  For one row the parts would only cost stores.
template <int Parts, class Put>
EDGESPEC_INLINE void block_q4(const uint8_t* q, const Act* a, int rows, Put put) {
  constexpr int kVectors = 4 / Parts;
  __m256i sums[kRowGroup][2];
#pragma GCC unroll 2
  for (int part = 0; part < Parts; ++part, q += 64 * kVectors) {
    __m256i v[2][2 * kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256i x = load(q + j * 64 + h * 32);
        v[h][j] = low_nibbles(x);
        v[h][j + kVectors] = high_nibbles(x);
      }
#pragma GCC unroll 1
    for (int r = 0; r < rows; ++r) {
      const int8_t* low = a[r].q + part * 4 * kVectors;
      __m256i sum[2];
#pragma GCC unroll 8
      for (int j = 0; j < 2 * kVectors; ++j) {
        const __m256i f = four_bytes(low + (j < kVectors ? 4 * j : 16 + 4 * (j - kVectors)));
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          const __m256i product = _mm256_maddubs_epi16(v[h][j], f);
          sum[h] = j ? _mm256_add_epi16(sum[h], product) : part ? _mm256_add_epi16(sums[r][h], product) : product;
        }
      }
      if (part < Parts - 1) {
        sums[r][0] = sum[0];
        sums[r][1] = sum[1];
        continue;
      }
      const __m256i offset = _mm256_set1_epi32(a[r].offset);
      put(r, {_mm256_add_epi32(widen(sum[0]), offset), _mm256_add_epi32(widen(sum[1]), offset)});
    }
  }
}

template <class Put>
EDGESPEC_INLINE void block_sums(const uint8_t* q, const Act* a, int rows, Put put) {
  if (rows == 1) return block_q4<1>(q, a, 1, put);
  block_q4<2>(q, a, rows, put);
}

template <>
EDGESPEC_INLINE void block_rows<kQ4>(const uint8_t* q, const uint8_t*, const Act* a, int rows,
                                     const __m256 (&scales)[2], __m256 (*acc)[2]) {
  block_sums(q, a, rows, [&](int r, const __m256i(&sum)[2]) __attribute__((always_inline)) {
    const __m256 scale = _mm256_set1_ps(a[r].scale);
    acc[r][0] = finish(sum[0], scales[0], scale, acc[r][0]);
    acc[r][1] = finish(sum[1], scales[1], scale, acc[r][1]);
  });
}

// Rows of half a block of bytes and half a tile: put(r, sums).  Bytes are multiplied as two nibbles, so that nothing
// saturates in 16 bits: what two planes have from the start.
template <class Put>
EDGESPEC_INLINE void nibble_rows(const __m256i (&low)[4], const __m256i (&high)[4], const int8_t* x, int rows,
                                 Put put) {
#pragma GCC unroll 1
  for (int r = 0; r < rows; ++r, x += sizeof(Act)) {
    __m256i a, b;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m256i f = four_bytes(x + 4 * j), p = _mm256_maddubs_epi16(low[j], f),
                    s = _mm256_maddubs_epi16(high[j], f);
      a = j ? _mm256_add_epi16(a, p) : p;
      b = j ? _mm256_add_epi16(b, s) : s;
    }
    put(r, _mm256_add_epi32(widen(a), _mm256_madd_epi16(b, _mm256_set1_epi16(16))));
  }
}

template <class Put>
EDGESPEC_INLINE void quarter_q8(const uint8_t* q, const int8_t* x, int rows, Put put) {
  __m256i low[4], high[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m256i v = load(q + j * 64);
    low[j] = low_nibbles(v);
    high[j] = high_nibbles(v);
  }
  nibble_rows(low, high, x, rows, put);
}

// The same of two planes; of their low nibbles, or of the high ones.
template <bool Second, class Put>
EDGESPEC_INLINE void quarter_p8(const uint8_t* h, const uint8_t* l, const int8_t* x, int rows, Put put) {
  __m256i low[4], high[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    low[j] = Second ? high_nibbles(load(l + j * 64)) : low_nibbles(load(l + j * 64));
    high[j] = Second ? high_nibbles(load(h + j * 64)) : low_nibbles(load(h + j * 64));
  }
  nibble_rows(low, high, x, rows, put);
}

// Rows of one block of bytes or of two planes.
template <Kind kind>
EDGESPEC_INLINE void block_rows(const uint8_t* q, const uint8_t* low, const Act* a, int rows, const __m256 (&scales)[2],
                                __m256 (*acc)[2]) {
  __m256i first[kRowGroup];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const auto begin = [&](int r, __m256i sum) { first[r] = sum; };
    const auto end = [&](int r, __m256i sum) {
      acc[r][h] = finish(_mm256_add_epi32(_mm256_add_epi32(first[r], sum), _mm256_set1_epi32(a[r].offset_of_bytes())),
                         scales[h], _mm256_set1_ps(a[r].scale), acc[r][h]);
    };
    const uint8_t *there = q + 32 * h, *l = low + (kind == kP8 ? 32 * h : 0);
    if constexpr (kind == kP8) {
      quarter_p8<false>(there, l, a->q, rows, begin);
      quarter_p8<true>(there, l, a->q + 16, rows, end);
    } else {
      quarter_q8(there, a->q, rows, begin);
      quarter_q8(there + 256, a->q + 16, rows, end);
    }
  }
}

void linear_c8(const uint8_t* w, int k, const void* act, int rows, float* y, size_t ld, int columns) {
  const Act* a = static_cast<const Act*>(act);
  const int blocks = blocks_of(k);
  __m256i sums[2][kRowGroup];
  for (int r = 0; r < rows; ++r) {
    uint32_t offset = 0;
    for (int block = 0; block < blocks; ++block)
      offset += static_cast<uint32_t>(a[size_t(block) * rows + r].offset_of_bytes());
    sums[0][r] = sums[1][r] = _mm256_set1_epi32(static_cast<int32_t>(offset));
  }
  for (int block = 0; block < blocks; ++block, w += 512) {
    const int8_t* x = a[size_t(block) * rows].q;
    prefetch<8>(w);
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part)
      quarter_q8(w + part / 2 * 256 + part % 2 * 32, x + part / 2 * 16, rows,
                 [&](int r, __m256i sum) { sums[part % 2][r] = _mm256_add_epi32(sums[part % 2][r], sum); });
  }
  const F scales = fload(reinterpret_cast<const float*>(w));
  for (int r = 0; r < rows; ++r)
    fstore_n(y + r * ld, fmul(itof({sums[0][r], sums[1][r]}), fmul(scales, fset(a[r].scale))), columns);
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
