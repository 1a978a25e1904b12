// Matrices on lanes_wasm.inl, included after it, for isa_simd128.cpp and isa_relaxed.cpp.

#define EDGESPEC_INLINE inline __attribute__((always_inline))

// N of `rows` rows, `Quarters` of the tile at a time, so that sums stay in registers.  Bytes are taken as nibbles,
// which is what a dot product here can multiply by.  Pairs: sums are in 16 bits within a block, eight products of four
// bits each.
template <Kind kind, int N, int Quarters, bool Pairs>
void linear_rows(Weights weights, int blocks, const Act* acts, int rows, float* y, size_t ld, int columns) {
  constexpr bool kFour = is_four(kind) && kind != kP8;
  constexpr size_t payload = payload_bytes(kind);
  for (int from = 0; from < 4; from += Quarters) {
    v128_t acc[Quarters][N];
    for (auto& quarter : acc)
      for (auto& v : quarter) v = wasm_f32x4_splat(0);
    const uint8_t *w = weights.high, *low = weights.low;
    const Act* a = acts;
    for (int pair = 0; pair < blocks / 2; ++pair, w += 64 + 2 * payload)
#pragma GCC unroll 16
      for (int half = 0; half < 2; ++half, a += rows) {
        const uint8_t *q = w + 64 + half * payload, *own = w + half * 32;
        const uint8_t* beside = low;
        if (kind == kP8) low += payload;
#pragma GCC unroll 16
        for (int c = 0; c < Quarters; ++c) {
          const uint8_t* at = q + (from + c) * 16;
          v128_t first[N], sums[N], more[N];
#pragma GCC unroll 16
          for (int r = 0; r < N; ++r) {
            first[r] = wasm_i32x4_splat(kFour ? a[r].offset : a[r].offset_of_bytes());
            sums[r] = Pairs ? wasm_i32x4_splat(0) : first[r];
            more[r] = wasm_i32x4_splat(0);
          }
          const auto dot = [](v128_t acc, v128_t s8, v128_t u7) __attribute__((always_inline)) {
            return Pairs ? dot_pairs(acc, s8, u7) : dot7(acc, s8, u7);
          };
#pragma GCC unroll 16
          for (int j = 0; j < (kFour || kind == kP8 ? 4 : 8); ++j) {
            const v128_t x = wasm_v128_load(at + j * 64);
            const v128_t l = low_nibbles(x), h = high_nibbles(x);
            if constexpr (kind == kP8) {
              const v128_t z = wasm_v128_load(beside + (from + c) * 16 + j * 64);
              const v128_t zl = low_nibbles(z), zh = high_nibbles(z);
#pragma GCC unroll 16
              for (int r = 0; r < N; ++r) {
                const v128_t f = four_bytes(a[r].q + 4 * j), g = four_bytes(a[r].q + 16 + 4 * j);
                sums[r] = dot(dot(sums[r], f, zl), g, zh);
                more[r] = dot(dot(more[r], f, l), g, h);
              }
            } else {
#pragma GCC unroll 16
              for (int r = 0; r < N; ++r) {
                const v128_t f = four_bytes(a[r].q + 4 * j);
                if constexpr (kFour) {
                  sums[r] = dot(dot(sums[r], f, l), four_bytes(a[r].q + 16 + 4 * j), h);
                } else {
                  sums[r] = dot(sums[r], f, l);
                  more[r] = dot(more[r], f, h);
                }
              }
            }
          }
          const v128_t scales = half4(wasm_u32x4_load16x4(own + (from + c) * 8));
#pragma GCC unroll 16
          for (int r = 0; r < N; ++r) {
            if (Pairs) {
              sums[r] = wasm_i32x4_add(first[r], wasm_i32x4_extadd_pairwise_i16x8(sums[r]));
              more[r] = wasm_i32x4_extadd_pairwise_i16x8(more[r]);
            }
            if (!kFour) sums[r] = wasm_i32x4_add(sums[r], wasm_i32x4_shl(more[r], 4));
            acc[c][r] = madd(wasm_f32x4_convert_i32x4(sums[r]), wasm_f32x4_mul(scales, wasm_f32x4_splat(a[r].scale)),
                             acc[c][r]);
          }
        }
      }
    for (int c = 0; c < Quarters; ++c)
      for (int r = 0; r < N; ++r) {
        const int n = columns - 4 * (from + c);
        float* to = y + r * ld + 4 * (from + c);
        if (n >= 4)
          wasm_v128_store(to, acc[c][r]);
        else if (n > 0) {
          float all[4];
          wasm_v128_store(all, acc[c][r]);
          std::memcpy(to, all, size_t(n) * 4);
        }
      }
  }
}

void linear_c8(const uint8_t* tile, int k, const void* act, int rows, float* y, size_t ld, int columns) {
  const Act* a = static_cast<const Act*>(act);
  const int blocks = blocks_of(k);
  for (int r = 0; r < rows; ++r) {
    I sum = iset(0);
    for (int block = 0; block < blocks; ++block) {
      const Act& x = a[size_t(block) * rows + r];
      sum = iadd(sum, iset(x.offset_of_bytes()));
      B v[8];
      for (int j = 0; j < 8; ++j) v[j] = bload(tile + size_t(block) * 512 + j * 64);
      sum = dots<255, 8>(sum, v, x.q);
    }
    const F scales = fload(reinterpret_cast<const float*>(tile + size_t(blocks) * 512));
    fstore_n(y + r * ld, fmul(itof(sum), fmul(scales, fset(a[r].scale))), columns);
  }
}
void linear_high(const uint8_t* tile, int k, const void* act, int rows, float* y, size_t ld, int columns);

constexpr int kFloatRows = 1, kChainRows = 6;  // of four registers
#include "floats.inl"
#include "ggml.inl"

template <Kind kind, bool Pairs>
void linear_blocks(Weights t, int k, const Act* a, int rows, float* y, size_t ld, int columns) {
  const int blocks = blocks_of(k);
  int r = 0;
  for (; r + 4 <= rows; r += 4) linear_rows<kind, 4, 1, Pairs>(t, blocks, a + r, rows, y + r * ld, ld, columns);
  for (; r + 2 <= rows; r += 2) linear_rows<kind, 2, 2, Pairs>(t, blocks, a + r, rows, y + r * ld, ld, columns);
  for (; r < rows; ++r) linear_rows<kind, 1, 4, Pairs>(t, blocks, a + r, rows, y + r * ld, ld, columns);
}

template <Kind kind>
void linear(Weights t, int k, const void* act, int rows, float* y, size_t ld, int columns) {
  if (kind == kP8 && !t.low) return linear_high(t.high, k, act, rows, y, ld, columns);
  if constexpr (takes_floats(kind)) {
    linear_floats<kind>(t.high, k, act, rows, y, ld, columns);
  } else if constexpr (is_ggml(kind)) {
    ggml_rows<kind>(t.high, k, static_cast<const Act*>(act), rows, y, ld, columns);
  } else if constexpr (kind == kC8) {
    linear_c8(t.high, k, act, rows, y, ld, columns);
  } else {
    const Act* a = static_cast<const Act*>(act);
    if (pairs)
      linear_blocks<kind, true>(t, k, a, rows, y, ld, columns);
    else
      linear_blocks<kind, false>(t, k, a, rows, y, ld, columns);
  }
}
