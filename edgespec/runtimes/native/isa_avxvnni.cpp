// AVX2 with the dot products of AVX-VNNI: four products of bytes add up in 32 bits at once.
#include "kernels.h"

#if defined(__AVXVNNI__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "ggml.h"
#include "half.h"

namespace edgespec {
namespace {

#include "lanes_avx2.inl"
#include "matrices_avx2.inl"

// N rows times half of a block's vectors, both halves of the tile: their chains of dot products run side by side, which
// hides the instruction's latency, and one broadcast serves both halves.
template <bool Four, int N>
EDGESPEC_INLINE void some_rows(const __m256i (&v)[2][4], const int8_t* x, __m256i (&sum)[N][2]) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j)
#pragma GCC unroll 2
    for (int r = 0; r < N; ++r) {
      const __m256i f = four_bytes(x + r * sizeof(Act) + (Four && j >= 2 ? 16 + 4 * (j - 2) : 4 * j));
      sum[r][0] = _mm256_dpbusd_avx_epi32(sum[r][0], v[0][j], f);
      sum[r][1] = _mm256_dpbusd_avx_epi32(sum[r][1], v[1][j], f);
    }
}

// Bytes of two planes: of their low nibbles, or of the high ones.
EDGESPEC_INLINE __m256i joined(__m256i high, __m256i low, int part) {
  const __m256i nibble = _mm256_set1_epi8(15);
  if (part) return _mm256_or_si256(_mm256_andnot_si256(nibble, high), high_nibbles(low));
  return _mm256_or_si256(_mm256_andnot_si256(nibble, _mm256_slli_epi16(high, 4)), low_nibbles(low));
}

// All rows times one block, in two parts, whose weights stay in eight registers while the rows pass by: put(r, sum).
// With four rows side by side, or eight vectors of half a tile, registers do not suffice.
template <Kind kind, class Put>
EDGESPEC_INLINE void whole_block(const uint8_t* q, const uint8_t* low, const Act* a, int rows, Put put) {
  constexpr bool Four = kind == kQ4;
  constexpr int kVectors = Four ? 2 : 4;
  __m256i sums[kRowGroup][2];
#pragma GCC unroll 2
  for (int part = 0; part < 2; ++part, q += kind == kP8 ? 0 : 64 * kVectors) {
    __m256i v[2][4];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256i x = load(q + j * 64 + h * 32);
        if constexpr (kind == kP8) {
          v[h][j] = joined(x, load(low + j * 64 + h * 32), part);
          continue;
        }
        v[h][j] = Four ? low_nibbles(x) : x;
        if (Four) v[h][j + 2] = high_nibbles(x);
      }
    const auto pass = [&](int r, auto& sum) __attribute__((always_inline)) {
      constexpr int kRows = sizeof(sum) / sizeof(sum[0]);
      for (int i = 0; i < kRows; ++i) {
        sum[i][0] = part ? sums[r + i][0] : _mm256_set1_epi32(Four ? a[r + i].offset : a[r + i].offset_of_bytes());
        sum[i][1] = part ? sums[r + i][1] : sum[i][0];
      }
      some_rows<Four, kRows>(v, a[r].q + part * 4 * kVectors, sum);
      for (int i = 0; i < kRows; ++i) {
        if (part) {
          put(r + i, sum[i]);
        } else {
          sums[r + i][0] = sum[i][0];
          sums[r + i][1] = sum[i][1];
        }
      }
    };
    __m256i two[2][2], one[1][2];
    int r = 0;
#pragma GCC unroll 1
    for (; r + 2 <= rows; r += 2) pass(r, two);
    if (r < rows) pass(r, one);
  }
}

template <class Put>
EDGESPEC_INLINE void block_sums(const uint8_t* q, const Act* a, int rows, Put put) {
  whole_block<kQ4>(q, nullptr, a, rows, put);
}

template <Kind kind>
EDGESPEC_INLINE void block_rows(const uint8_t* q, const uint8_t* low, const Act* a, int rows, const __m256 (&scales)[2],
                                __m256 (*acc)[2]) {
  whole_block<kind>(q, low, a, rows, [&](int r, const __m256i(&sum)[2]) __attribute__((always_inline)) {
    const __m256 scale = _mm256_set1_ps(a[r].scale);
    acc[r][0] = finish(sum[0], scales[0], scale, acc[r][0]);
    acc[r][1] = finish(sum[1], scales[1], scale, acc[r][1]);
  });
}

void linear_c8(const uint8_t* w, int k, const void* act, int rows, float* y, size_t ld, int columns) {
  const Act *a = static_cast<const Act*>(act), *x = a;
  __m256i sums[kRowGroup][2];
  for (int r = 0; r < rows; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
  for (int block = 0; block < blocks_of(k); ++block, w += 512, x += rows) {
    prefetch<8>(w);
    whole_block<kQ8>(w, nullptr, x, rows, [&](int r, const __m256i(&sum)[2]) __attribute__((always_inline)) {
      sums[r][0] = _mm256_add_epi32(sums[r][0], sum[0]);
      sums[r][1] = _mm256_add_epi32(sums[r][1], sum[1]);
    });
  }
  const F scales = fload(reinterpret_cast<const float*>(w));
  for (int r = 0; r < rows; ++r)
    fstore_n(y + r * ld, fmul(itof({sums[r][0], sums[r][1]}), fmul(scales, fset(a[r].scale))), columns);
}

#include "kernels.inl"

const Kernels table = kTable("avxvnni");

}  // namespace

const Kernels* avxvnni_kernels() { return &table; }

}  // namespace edgespec

#else
namespace edgespec {
const Kernels* avxvnni_kernels() { return nullptr; }
}  // namespace edgespec
#endif
