#include "cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"

namespace edgespec {
namespace {

void code_place(int token, int& byte, int& shift) {
  const int half = token & 63;
  shift = token >= 64 ? 4 : 0;
  byte = (half & 31) * 2 + (half >> 5);
}

void put_nibble(uint8_t& byte, int shift, int code) {
  byte = static_cast<uint8_t>((byte & (0xf0 >> shift)) | (code << shift));
}

// Scale and levels of `dim` numbers in 8 bits.
float levels_of(const Kernels& k, const float* x, int dim, int8_t* levels) {
  int32_t unused;
  return k.quantize_query(x, dim, levels, &unused);
}

}  // namespace

void Cache::put_key(const Kernels& k, KvFormat format, uint8_t* block, int dim, const float* table, int token,
                    const float* key) const {
  const int tile = token / 16, column = token % 16;
  switch (format) {
    case kKvF32: {
      float* out = reinterpret_cast<float*>(block) + size_t(tile) * dim * 16 + column;
      for (int d = 0; d < dim; ++d) out[d * 16] = key[d];
      return;
    }
    case kKvF16: {
      uint16_t half[kMaxHeadDim];
      k.to_half(key, dim, half);
      uint16_t* out = reinterpret_cast<uint16_t*>(block) + size_t(tile) * dim * 16 + column;
      for (int d = 0; d < dim; ++d) out[d * 16] = half[d];
      return;
    }
    case kKvInt8: {
      int8_t levels[kMaxHeadDim];
      reinterpret_cast<float*>(block + size_t(kKvBlock) * dim)[token] = levels_of(k, key, dim, levels);
      uint8_t* out = block + size_t(tile) * dim * 16 + column * 4;
      for (int d = 0; d < dim; ++d) out[d / 4 * 64 + d % 4] = static_cast<uint8_t>(levels[d] + 128);
      return;
    }
    case kKvInt4: {
      uint8_t* out = block + size_t(tile) * dim * 8 + column * 4;
      for (int d = 0; d < dim; ++d) {
        const float scale = table[d], zero = table[dim + d];
        const float level = scale > 0 ? std::nearbyint((key[d] - zero) / scale) : 0.f;
        const int code = level > 0 ? level < 15 ? static_cast<int>(level) : 15 : 0;  // 0 of NaN
        put_nibble(out[d / 8 * 64 + d % 4], d % 8 < 4 ? 0 : 4, code);
      }
      return;
    }
    case kKvNomad1:
    case kKvNomad2: {
      const int sub = format == kKvNomad1 ? 1 : 2;
      uint8_t codes[kMaxHeadDim];
      k.nearest(table, key, dim, sub, codes);
      int byte, shift;
      code_place(token, byte, shift);
      for (int m = 0; m < dim / sub; ++m) put_nibble(block[m * 64 + byte], shift, codes[m]);
      return;
    }
    default: return;
  }
}

void Cache::put_value(const Kernels& k, uint8_t* block, int dim, int token, const float* value) const {
  switch (layout_.values) {
    case kKvF32: std::memcpy(block + size_t(token) * dim * 4, value, size_t(dim) * 4); return;
    case kKvF16: k.to_half(value, dim, reinterpret_cast<uint16_t*>(block) + size_t(token) * dim); return;
    default: {
      int8_t levels[kMaxHeadDim];
      reinterpret_cast<float*>(block + size_t(kKvBlock) * dim)[token] = levels_of(k, value, dim, levels);
      uint8_t* out = block + size_t(token / 4) * dim * 4 + token % 4;
      for (int d = 0; d < dim; ++d) out[d * 4] = static_cast<uint8_t>(levels[d]);
    }
  }
}

void Cache::append(const Kernels& k, const CodeTables& tables, int layer, int head, int64_t token, const float* key,
                   const float* value) const {
  const int64_t block = token / kKvBlock;
  const int at = static_cast<int>(token % kKvBlock), dim = layout_.dim_of(layer);
  const auto table = [&](KvFormat format) {
    return tables.of[format] ? tables.at(format, layout_, layer, head) : nullptr;
  };
  put_key(k, layout_.keys, keys(block, layer, head), dim, table(layout_.keys), at, key);
  if (layout_.codes != kKvNone)
    put_key(k, layout_.codes, codes(block, layer, head), dim, table(layout_.codes), at, key);
  float none[kMaxHeadDim];
  if (layout_.keys >= kKvInt4 && !std::all_of(key, key + dim, [](float x) { return std::isfinite(x); })) {
    // four bits cannot represent a key that is not a number, so its value carries the NaN
    std::fill_n(none, dim, std::nanf(""));
    value = none;
  }
  put_value(k, values(block, layer, head), dim, at, value);
  if (!layout_.ring) return;
  uint16_t half[kMaxHeadDim];
  k.to_half(key, layout_.dim, half);
  const auto put = [&](int64_t row) {
    uint16_t* out = recent(layer, head) + size_t(row / 16) * layout_.dim * 16 + row % 16;
    for (int d = 0; d < layout_.dim; ++d) out[d * 16] = half[d];
  };
  if (token < kSinkRows) put(token);
  put(kSinkRows + token % layout_.ring);
}

void Cache::move_key(KvFormat format, int dim, const uint8_t* from, int a, uint8_t* to, int b) const {
  // a token's items are `pitch` bytes from each other in its tile
  const auto strided = [&](size_t item, size_t pitch, int count) {
    const uint8_t* source = from + size_t(a / 16) * pitch * count + a % 16 * item;
    uint8_t* target = to + size_t(b / 16) * pitch * count + b % 16 * item;
    for (int i = 0; i < count; ++i) std::memcpy(target + i * pitch, source + i * pitch, item);
  };
  switch (format) {
    case kKvF32: return strided(4, 64, dim);
    case kKvF16: return strided(2, 32, dim);
    case kKvInt8:
      strided(4, 64, dim / 4);
      reinterpret_cast<float*>(to + size_t(kKvBlock) * dim)[b] =
          reinterpret_cast<const float*>(from + size_t(kKvBlock) * dim)[a];
      return;
    case kKvInt4: return strided(4, 64, dim / 8);
    case kKvNomad1:
    case kKvNomad2: {
      int source, target, down, up;
      code_place(a, source, down);
      code_place(b, target, up);
      const int subs = format == kKvNomad1 ? dim : dim / 2;
      for (int m = 0; m < subs; ++m) put_nibble(to[m * 64 + target], up, from[m * 64 + source] >> down & 15);
      return;
    }
    default: return;
  }
}

void Cache::move_value(int dim, const uint8_t* from, int a, uint8_t* to, int b) const {
  if (layout_.values != kKvInt8) {
    const size_t row = size_t(dim) * (layout_.values == kKvF16 ? 2 : 4);
    std::memcpy(to + b * row, from + a * row, row);
    return;
  }
  for (int d = 0; d < dim; ++d)
    to[size_t(b / 4) * dim * 4 + d * 4 + b % 4] = from[size_t(a / 4) * dim * 4 + d * 4 + a % 4];
  reinterpret_cast<float*>(to + size_t(kKvBlock) * dim)[b] =
      reinterpret_cast<const float*>(from + size_t(kKvBlock) * dim)[a];
}

void Cache::copy_values(int dim, const uint8_t* from, int first, int end, uint8_t* to) const {
  if (layout_.values != kKvInt8) {
    const size_t row = size_t(dim) * (layout_.values == kKvF16 ? 2 : 4);
    std::memcpy(to + first * row, from + first * row, (end - first) * row);
    return;
  }
  std::memcpy(to + size_t(first) * dim, from + size_t(first) * dim, size_t(round_up(end, 4) - first) * dim);
  const size_t scales = size_t(kKvBlock) * dim + size_t(first) * 4;
  std::memcpy(to + scales, from + scales, size_t(end - first) * 4);
}

void Cache::move(int64_t from, int64_t to) const {
  const int a = int(from % kKvBlock), b = int(to % kKvBlock);
  for (int layer = 0; layer < layout_.states; ++layer)
    std::memcpy(state(layer, to), state(layer, from), size_t(layout_.state_width) * 4);
  for (int layer = 0; layer < layout_.layers; ++layer)
    for (int head = 0; head < layout_.heads; ++head) {
      const int dim = layout_.dim_of(layer);
      move_key(layout_.keys, dim, keys(from / kKvBlock, layer, head), a, keys(to / kKvBlock, layer, head), b);
      move_key(layout_.codes, dim, codes(from / kKvBlock, layer, head), a, codes(to / kKvBlock, layer, head), b);
      move_value(dim, values(from / kKvBlock, layer, head), a, values(to / kKvBlock, layer, head), b);
      if (!layout_.ring) continue;
      uint16_t* ring = recent(layer, head);
      const auto place = [&](int64_t row) { return ring + size_t(row / 16) * dim * 16 + row % 16; };
      const uint16_t* exact = place(kSinkRows + from % layout_.ring);
      for (int d = 0; d < dim; ++d) place(kSinkRows + to % layout_.ring)[d * 16] = exact[d * 16];
      if (to < kSinkRows)
        for (int d = 0; d < dim; ++d) place(to)[d * 16] = exact[d * 16];
    }
}

}  // namespace edgespec
