// Weights in block types of files and as 16-bit numbers, one at a time: what layout.h says of them, in plain C++.
// Tables of the types: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h and ggml-quants.c. Static: code
// compiled for one processor must never be linked into another's path.
#pragma once
#include <cstdint>
#include <cstring>

#include "half.h"
#include "layout.h"

namespace edgespec {

// The place of the code of number i of block b of a group: its vectors of 64 bytes, and how far up it is in a byte.
struct CodePlace {
  int low, shift, high, up;
};
constexpr CodePlace code_place(Kind kind, int b, int i) {
  const int j = i / 4, n = b / 4;
  switch (kind) {
    case kQ5_0:
    case kQ5_1: return {j % 4, j / 4 * 4, 0, j};
    case kQ2_K: return {n * 8 + j, b % 4 * 2, 0, 0};
    case kQ3_K: return {n * 8 + j, b % 4 * 2, j, b};
    case kQ4_K: return {b / 2 * 8 + j, b % 2 * 4, 0, 0};
    case kQ5_K: return {b / 2 * 8 + j, b % 2 * 4, j, b};
    case kQ6_K: return {n * 16 + b % 2 * 8 + j, b % 4 / 2 * 4, n * 8 + j, b % 4 * 2};
    case kU8X32:
    case kU8X128: return {b * 8 + j, 0, 0, 0};
    default: return {b * 4 + j % 4, j / 4 * 4, 0, 0};
  }
}
constexpr int low_vectors(GgmlFacts f) { return f.group * f.low * kTile / 512; }  // of a group

// Whether all blocks of a group have their codes as the block `period` before has them, the same number of vectors on.
constexpr bool repeats(Kind kind, int period) {
  const CodePlace start = code_place(kind, 0, 0), next = code_place(kind, period, 0);
  for (int i = 0; i < ggml(kind).group - period * kBlock; i += 4) {
    const CodePlace a = code_place(kind, i / kBlock, i % kBlock), b = code_place(kind, i / kBlock + period, i % kBlock);
    if (a.shift != b.shift || a.up != b.up) return false;
    if (b.low - a.low != next.low - start.low || b.high - a.high != next.high - start.high) return false;
  }
  return true;
}
constexpr int period_of(Kind kind) {  // in blocks
  int period = 1;
  while (!repeats(kind, period)) period *= 2;
  return period;
}

static inline float exponent_to_half_float(uint8_t e) {  // 2^(e - 128): ggml's tables are twice what codes stand for
  const uint32_t bits = e < 2 ? 0x00200000u << e : uint32_t(e - 1) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The level of weight i of a column, `zero` more than it stands for; group: its codes.
static inline int ggml_level(Kind kind, const uint8_t* group, int i, int column) {
  const GgmlFacts f = ggml(kind);
  const CodePlace at = code_place(kind, i / kBlock, i % kBlock);
  const int byte = column * 4 + i % 4;
  int code = group[at.low * 64 + byte] >> at.shift & ((1 << f.low) - 1);
  if (f.high) code |= (group[(low_vectors(f) + at.high) * 64 + byte] >> at.up & ((1 << f.high) - 1)) << f.low;
  return f.table ? kGgmlTables[f.table][code] : code;
}

// Scale and minimum of a column for share number s of a group; a weight is scale * (level - zero) + minimum.
struct ScaleOf {
  float scale, minimum;
};
static inline ScaleOf ggml_scale(Kind kind, const uint8_t* scales, int s, int column) {
  const GgmlFacts f = ggml(kind);
  const auto half = [&](int row) {
    uint16_t bits;
    std::memcpy(&bits, scales + (row * kTile + column) * 2, 2);
    return half_to_float(bits);
  };
  if (f.scale == kExponent) return {exponent_to_half_float(scales[column]), 0};
  if (f.scale == kZero) {
    const float d = half(0);
    return {d, -(d * static_cast<float>(static_cast<int8_t>(scales[kTile * 2 + column])))};
  }
  const float d = half(0), m = f.minimum ? half(1) : 0;
  if (f.scale == kHalf) return {d, m};
  const uint8_t* times = scales + kTile * 2 * (f.minimum ? 2 : 1) + s * kTile + column;
  if (kind == kQ2_K) return {d * static_cast<float>(*times & 15), -m * static_cast<float>(*times >> 4)};
  const float less = f.minimum ? m * static_cast<float>(static_cast<int8_t>(times[ggml_shares(f) * kTile])) : 0;
  return {d * static_cast<float>(static_cast<int8_t>(*times)), -less};
}

// Weight i of a column of a tile, as the file's own tools dequantize it.
static inline float ggml_weight(Kind kind, const uint8_t* tile, int k, int i, int column) {
  const GgmlFacts f = ggml(kind);
  const int group = i / f.group, in = i % f.group;
  const uint8_t *codes = tile + group * ggml_codes(f), *scales = tile + k / f.group * ggml_codes(f);
  const ScaleOf by = ggml_scale(kind, scales + group * ggml_scales(f), in / f.share, column);
  const float value = by.scale * static_cast<float>(ggml_level(kind, codes, in, column) - f.zero);
  return f.minimum ? value + by.minimum : value;
}

// Number i of an array of 16 or 32 bits each.
static inline float float_at(Kind kind, const uint8_t* numbers, size_t i) {
  if (kind == kF16) return half_to_float(reinterpret_cast<const uint16_t*>(numbers)[i]);
  uint32_t bits = 0;
  if (kind == kBF16)
    std::memcpy(reinterpret_cast<uint8_t*>(&bits) + 2, numbers + i * 2, 2);
  else
    std::memcpy(&bits, numbers + i * 4, 4);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace edgespec
