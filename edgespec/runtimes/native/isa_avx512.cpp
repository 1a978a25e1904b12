// AVX-512 with VNNI: one register is a vector of 16 lanes or a whole payload vector.
#include "kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include <immintrin.h>

#include <cmath>
#include <utility>

#include "ggml.h"
#include "half.h"

namespace edgespec {
namespace {

#include "lanes_avx512.inl"

// ---- matrices ------------------------------------------------------------------------------------------------------

// Fetches weights long before they are used.  Far: to the second cache, because lines that memory still owes would take
// the places that the first has for what loads wait for.  Loops that wait for products gain nothing by that.
template <bool Far>
inline __attribute__((always_inline)) void fetch_ahead(const void* w) {
  if constexpr (Far)
    _mm_prefetch(static_cast<const char*>(w) + 9216, _MM_HINT_T1);
  else
    _mm_prefetch(static_cast<const char*>(w) + 4608, _MM_HINT_T0);
}
constexpr bool waits_for_memory(int rows, bool four_bits) { return !four_bits || rows <= 8; }

template <bool Four>
inline __m512i offset(const Act& a) {
  const __m512i eight = _mm512_set1_epi32(a.offset);
  return Four ? eight : _mm512_slli_epi32(eight, 4);
}

// N rows of one block: their chains of dot products run side by side, which hides the instruction's latency.
template <int N>
inline __attribute__((always_inline)) void block_sums(const __m512i (&v)[8], const Act* a, __m512i (&c)[N]) {
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j)
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) multiply_add(c[r], v[j], a[r].q + 4 * j);
}

template <int N, bool Four>
inline __attribute__((always_inline)) void block_rows(const __m512i (&v)[8], const Act* a, __m512 scales, __m512* acc) {
  __m512i c[N];
#pragma GCC unroll 4
  for (int r = 0; r < N; ++r) c[r] = offset<Four>(a[r]);
  block_sums<N>(v, a, c);
#pragma GCC unroll 4
  for (int r = 0; r < N; ++r)
    acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(c[r]), _mm512_mul_ps(scales, _mm512_set1_ps(a[r].scale)), acc[r]);
}

// A whole block: bytes, nibbles, or the bytes of two planes.  0xCA: bits of the second where the first has ones, else
// of the third.
template <Kind kind, bool Far>
inline __attribute__((always_inline)) void load_block(const uint8_t* q, const uint8_t* low, __m512i (&v)[8]) {
  const __m512i nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 8
  for (int j = 0; j < (kind == kQ8 ? 8 : 4); ++j) {
    fetch_ahead<Far>(q + j * 64);
    const __m512i x = _mm512_loadu_si512(q + j * 64);
    if constexpr (kind == kQ8) {
      v[j] = x;
    } else if constexpr (kind == kP8) {
      fetch_ahead<Far>(low + j * 64);
      const __m512i z = _mm512_loadu_si512(low + j * 64);
      v[j] = _mm512_ternarylogic_epi64(nibble, z, _mm512_slli_epi16(x, 4), 0xCA);
      v[j + 4] = _mm512_ternarylogic_epi64(nibble, _mm512_srli_epi16(z, 4), x, 0xCA);
    } else {
      v[j] = _mm512_and_si512(x, nibble);
      v[j + 4] = _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble);
    }
  }
}

template <Kind kind, int R>
void linear_rows(Weights tile, int blocks, const Act* a, float* y, size_t ld, __mmask16 columns) {
  constexpr bool kFour = kind == kQ4;
  constexpr int kQuads = R / 4 * 4;
  constexpr size_t kPayload = payload_bytes(kind);
  constexpr bool kFar = waits_for_memory(R, kFour);
  const uint8_t *w = tile.high, *low = tile.low;
  __m512 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
  for (int pair = 0; pair < blocks / 2; ++pair) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half, a += R) {
      const __m512 scales = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + half * 32)));
      if (!half) fetch_ahead<kFar>(w);
      __m512i v[8];
      load_block<kind, kFar>(w + 64 + half * kPayload, low, v);
      if (kind == kP8) low += kPayload;
#pragma GCC unroll 4
      for (int r = 0; r < kQuads; r += 4) block_rows<4, kFour>(v, a + r, scales, acc + r);
      if constexpr (R % 4 != 0) block_rows<R % 4, kFour>(v, a + kQuads, scales, acc + kQuads);
    }
    w += 64 + 2 * kPayload;
  }
  for (int r = 0; r < R; ++r) _mm512_mask_storeu_ps(y + r * ld, columns, acc[r]);
}

template <int R>
void channel_rows(Weights tile, int blocks, const Act* a, float* y, size_t ld, __mmask16 columns) {
  const uint8_t* w = tile.high;
  __m512i c[R];
  for (int r = 0; r < R; ++r) c[r] = _mm512_setzero_si512();
  const Act* x = a;
  for (int block = 0; block < blocks; ++block, x += R, w += 512) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) c[r] = _mm512_add_epi32(c[r], offset<false>(x[r]));
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      fetch_ahead<(R > 1)>(w + j * 64);  // one row was 5 % slower from the second cache
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

using Rows = void (*)(Weights, int, const Act*, float*, size_t, __mmask16);
template <Kind kind, int R>
constexpr Rows rows_of() {
  if constexpr (R == 0)
    return nullptr;
  else if constexpr (kind == kC8)
    return channel_rows<R>;
  else
    return linear_rows<kind, R>;
}
template <Kind kind, class = std::make_integer_sequence<int, kRowGroup + 1>>
struct RowsOf;
template <Kind kind, int... R>
struct RowsOf<kind, std::integer_sequence<int, R...>> {
  static constexpr Rows all[] = {rows_of<kind, R>()...};
};

void linear_high(const uint8_t* tile, int k, const void* act, int rows, float* y, size_t ld, int columns);

#define EDGESPEC_INLINE inline __attribute__((always_inline))
constexpr int kFloatRows = 4, kChainRows = 0;
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
    RowsOf<kind>::all[rows](t, blocks_of(k), static_cast<const Act*>(a), y, ld, first(columns));
}

#define EDGESPEC_SCORE_TILES 2
#define EDGESPEC_WEIGH_QUERIES 8
#define EDGESPEC_WEIGH_SUMS 16
#define EDGESPEC_LANES_TOGETHER
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
