// Matrices on lanes_avx2.inl, included after it: what isa_avx2.cpp and isa_avxvnni.cpp share.  Each of them defines how
// the rows of one block are multiplied, and the kernel of a scale a column.

#define EDGESPEC_INLINE inline __attribute__((always_inline))

constexpr int kAhead = 9216;  // bytes: how far weights are fetched before they are used, to the second cache

// GCC takes out calls of a function that only fetches, if it does not put it in place first.
template <int Lines>
EDGESPEC_INLINE void prefetch(const uint8_t* w) {
#pragma GCC unroll 9
  for (int i = 0; i < Lines; ++i) _mm_prefetch(reinterpret_cast<const char*>(w + kAhead + i * 64), _MM_HINT_T1);
}

EDGESPEC_INLINE __m256 finish(__m256i sum, __m256 scales, __m256 scale, __m256 acc) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scales, scale), acc);
}

// put(r, sums) for each row r < rows: its products with the payload q of a block of nibbles, and its offset, [2].
template <class Put>
EDGESPEC_INLINE void block_sums(const uint8_t* q, const Act* a, int rows, Put put);

// acc[r] += the products of rows r < rows with the payload of one block, q and of two planes low, times its scales; acc
// is [rows][2].
template <Kind kind>
EDGESPEC_INLINE void block_rows(const uint8_t* q, const uint8_t* low, const Act* a, int rows, const __m256 (&scales)[2],
                                __m256 (*acc)[2]);

template <Kind kind>
EDGESPEC_INLINE void linear_rows(Weights tile, int blocks, const Act* a, int rows, float* y, size_t ld, int columns) {
  constexpr int kVectors = kind == kQ8 ? 8 : 4;
  const uint8_t *w = tile.high, *low = tile.low;
  __m256 acc[kRowGroup][2];
  for (int r = 0; r < rows; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
  for (int pair = 0; pair < blocks / 2; ++pair) {
    prefetch<1>(w);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half, a += rows) {
      const auto* s = reinterpret_cast<const uint16_t*>(w + half * 32);
      const __m256 scales[2] = {load_half(s), load_half(s + 8)};
      const uint8_t* q = w + 64 + half * 64 * kVectors;
      prefetch<kVectors>(q);
      if (kind == kP8) prefetch<kVectors>(low);
      block_rows<kind>(q, low, a, rows, scales, acc);
      if (kind == kP8) low += payload_bytes(kP8);
    }
    w += 64 + 128 * kVectors;
  }
  for (int r = 0; r < rows; ++r) fstore_n(y + r * ld, {acc[r][0], acc[r][1]}, columns);
}

void linear_c8(const uint8_t* w, int k, const void* act, int rows, float* y, size_t ld, int columns);

void linear_high(const uint8_t* tile, int k, const void* act, int rows, float* y, size_t ld, int columns);

constexpr int kFloatRows = 1, kChainRows = 6;  // of two registers
#include "floats.inl"
#include "ggml.inl"

template <Kind kind>
void linear(Weights t, int k, const void* a, int rows, float* y, size_t ld, int columns) {
  if (kind == kP8 && !t.low) return linear_high(t.high, k, a, rows, y, ld, columns);
  if constexpr (takes_floats(kind)) return linear_floats<kind>(t.high, k, a, rows, y, ld, columns);
  if constexpr (is_ggml(kind)) return ggml_rows<kind>(t.high, k, static_cast<const Act*>(a), rows, y, ld, columns);
  if constexpr (kind == kC8) return linear_c8(t.high, k, a, rows, y, ld, columns);
  if constexpr (in_blocks(kind)) {
    const Act* acts = static_cast<const Act*>(a);
    if (rows == 1) return linear_rows<kind>(t, blocks_of(k), acts, 1, y, ld, columns);
    linear_rows<kind>(t, blocks_of(k), acts, rows, y, ld, columns);
  }
}
