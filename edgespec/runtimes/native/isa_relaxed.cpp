// WebAssembly's relaxed SIMD, where it does what the specification does.
#include "kernels.h"

#if defined(__wasm_relaxed_simd__)
#include <wasm_simd128.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "fused.h"
#include "ggml.h"
#include "half.h"

namespace edgespec {
namespace {

#include "lanes_wasm.inl"
#include "matrices_wasm.inl"
// the kernels use both
#include "kernels.inl"

const Kernels table = kTable("relaxed");

// Processors and engines choose what relaxed instructions do.  These kernels are for those that round a
// multiply-add once, and whose dot product takes its first operand as signed and loses nothing: which is tried, with
// operands that all differ, and then some kernels against the specification.
bool fuses() {
  volatile float one = 1;
  float x[16], y[16], z[16], more[16], less[16];
  for (int i = 0; i < 16; ++i) {
    x[i] = one + 0x1p-12f * static_cast<float>(i + 1);
    y[i] = one - 0x1p-13f * static_cast<float>(3 * i + 1);
    z[i] = -x[i] * y[i];  // rounded: a multiply-add of these gives what was lost
  }
  fstore(more, fma(fload(x), fload(y), fload(z)));
  fstore(less, fnma(fload(x), fload(y), fneg(fload(z))));
  bool lost = false;
  for (int i = 0; i < 16; ++i) {
    const float wanted = fused(x[i], y[i], z[i]);
    if (more[i] != wanted || less[i] != -wanted) return false;
    lost |= wanted != 0;
  }
  return lost;
}

bool multiplies_signed() {
  volatile int one = 1;
  int8_t x[16], y[16];
  int32_t sums[4], found[4];
  for (int turn = 0; turn < 64; ++turn) {
    for (int i = 0; i < 16; ++i) {
      x[i] = static_cast<int8_t>(turn < 2 ? -128 + turn * 255 : (turn * 29 + i * 71) * one);
      y[i] = static_cast<int8_t>(turn < 4 ? 127 : (turn * 53 + i * 17) * one & 127);
    }
    for (int lane = 0; lane < 4; ++lane) {
      sums[lane] = 1000003 * (lane - turn);
      found[lane] = sums[lane];
      for (int i = 4 * lane; i < 4 * lane + 4; ++i) found[lane] += x[i] * y[i];
    }
    const v128_t sum = dot7(wasm_v128_load(sums), wasm_v128_load(x), wasm_v128_load(y));
    if (!wasm_i32x4_all_true(wasm_i32x4_eq(sum, wasm_v128_load(found)))) return false;
  }
  return true;
}

// Whether a dot product of four bytes has sums in 16 bits inside.  They show where the second operand is out of range,
// as it never is elsewhere.
bool sums_in_16_bits() {
  volatile int8_t x = 127, y = -1;
  const v128_t sum = dot7(wasm_i32x4_splat(0), wasm_i8x16_splat(x), wasm_i8x16_splat(y));
  return wasm_i32x4_extract_lane(sum, 0) == 2 * 32767;
}

bool agrees() {
  constexpr int kLength = 2 * kBlock, kRows = 3;
  const Kernels& wanted = *scalar_kernels();
  alignas(64) uint8_t tile[kLength * kTile * 4];
  float x[kRows * kLength], y[2][kRows * kTile], functions[2][kLength];
  for (size_t i = 0; i < sizeof tile; ++i) tile[i] = static_cast<uint8_t>(i * 37 >> 3) & 0x3f;  // no scale is infinite
  for (int i = 0; i < kRows * kLength; ++i) x[i] = static_cast<float>((i * 7919) % 1009 - 504) / 97;
  for (const Kind kind : {kQ4, kQ8, kF32}) {
    Act acts[2 * kRows];
    for (int r = 0; kind != kF32 && r < kRows; ++r) wanted.quantize(x + r * kLength, kLength, kind, acts + r, kRows);
    const void* given = kind == kF32 ? static_cast<const void*>(x) : acts;
    for (const Kernels* one : {&wanted, &table})
      one->linear[kind](tile, kLength, given, kRows, y[one == &table], kTile, kTile);
    if (std::memcmp(y[0], y[1], sizeof y[0])) return false;
  }
  for (int function = 0; function < kFns; ++function) {
    for (const Kernels* one : {&wanted, &table}) one->glu[function](x, x + kLength, kLength, functions[one == &table]);
    if (std::memcmp(functions[0], functions[1], sizeof functions[0])) return false;
  }
  return true;
}

}  // namespace

const Kernels* relaxed_kernels() {
  pairs = sums_in_16_bits();
  return fuses() && multiplies_signed() && agrees() ? &table : nullptr;
}

}  // namespace edgespec

#else
namespace edgespec {
const Kernels* relaxed_kernels() { return nullptr; }
}  // namespace edgespec
#endif
