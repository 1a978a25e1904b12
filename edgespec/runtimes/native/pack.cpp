// Rows of a file's blocks -> packed matrices (layout.h): the same numbers, 16 rows together.  And back: packed rows as
// float32.  Structures of ggml's blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "kernels.h"
#include "visible.h"

namespace edgespec {
namespace {

// The places of things in a block of a row, in bytes; of kinds that files have.
struct Block {
  int bytes;          // of a block
  int codes, high;    // first bytes of the low bits of codes, and of the high ones
  int scale, little;  // of the float16 scale, which a minimum may follow, and of the small integers
};
Block block_of(Kind kind) {
  switch (kind) {
    case kQ4: return {18, 2, 0, 0, 0};
    case kQ8:
    case kP8: return {34, 2, 0, 0, 0};
    case kQ4_1: return {20, 4, 0, 0, 0};
    case kQ5_0: return {22, 6, 2, 0, 0};
    case kQ5_1: return {24, 8, 4, 0, 0};
    case kQ2_K: return {84, 16, 0, 80, 0};
    case kQ3_K: return {110, 32, 0, 108, 96};
    case kQ4_K: return {144, 16, 0, 0, 4};
    case kQ5_K: return {176, 48, 16, 0, 4};
    case kQ6_K: return {210, 0, 128, 208, 192};
    case kIQ4_NL: return {18, 2, 0, 0, 0};
    case kIQ4_XS: return {136, 8, 0, 0, 2};
    case kMXFP4: return {17, 1, 0, 0, 0};
    case kU4X32: return {19, 3, 0, 0, 2};
    case kU4X64: return {35, 3, 0, 0, 2};
    case kU4X128: return {67, 3, 0, 0, 2};
    case kU8X32: return {35, 3, 0, 0, 2};
    case kU8X128: return {131, 3, 0, 0, 2};
    default: return {0, 0, 0, 0, 0};
  }
}

// Small integers of a block: those of scales, then those of minima.
void integers(Kind kind, const uint8_t* block, uint8_t (&out)[16]) {
  const uint8_t* s = block + block_of(kind).little;
  switch (kind) {
    case kQ2_K:
    case kQ6_K: std::memcpy(out, s, 16); break;
    case kQ3_K:
      for (int j = 0; j < 16; ++j) {
        const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4, high = s[8 + j % 4] >> j / 4 * 2 & 3;
        out[j] = static_cast<uint8_t>((low | high << 4) - 32);
      }
      break;
    case kQ4_K:
    case kQ5_K:
      for (int j = 0; j < 4; ++j) {
        out[j] = s[j] & 63;
        out[8 + j] = s[j + 4] & 63;
        out[4 + j] = static_cast<uint8_t>((s[j + 8] & 15) | s[j] >> 6 << 4);
        out[12 + j] = static_cast<uint8_t>(s[j + 8] >> 4 | s[j + 4] >> 6 << 4);
      }
      break;
    case kIQ4_XS:
      for (int j = 0; j < 8; ++j) {
        const int high = (s[0] | s[1] << 8) >> 2 * j & 3;
        out[j] = static_cast<uint8_t>(((s[2 + j / 2] >> 4 * (j % 2) & 15) | high << 4) - 32);
      }
      break;
    default: break;
  }
}

// Bit j of byte i: number 4 j + i of a block of 32.
void spread(const uint8_t* bits, uint8_t* four) {
  for (int i = 0; i < 4; ++i) {
    int made = 0;
    for (int j = 0; j < 8; ++j) made |= (bits[j / 2] >> (j % 2 * 4 + i) & 1) << j;
    four[i] = static_cast<uint8_t>(made);
  }
}

void copy_words(uint8_t* to, const uint8_t* from, int words) {  // of a column to every 16th word
  for (int w = 0; w < words; ++w) std::memcpy(to + size_t(w) * kTile * 4, from + size_t(w) * 4, 4);
}

// A group of a column c of a tile.
void pack_group(Kind kind, const uint8_t* block, int c, uint8_t* codes, uint8_t* scales) {
  const GgmlFacts f = ggml(kind);
  const Block at = block_of(kind);
  const int low = f.group * f.low / 32, high = f.group * f.high / 32;  // words
  copy_words(codes + c * 4, block + at.codes, low);
  if (f.high && f.group == kBlock)
    spread(block + at.high, codes + size_t(low) * kTile * 4 + c * 4);
  else
    copy_words(codes + size_t(low) * kTile * 4 + c * 4, block + at.high, high);
  if (f.scale == kExponent) {
    scales[c] = block[at.scale];
    return;
  }
  if (f.scale == kZero) scales[kTile * 2 + c] = block[at.little];
  const int halves = f.minimum && f.scale != kZero ? 2 : 1;
  for (int i = 0; i < halves; ++i) std::memcpy(scales + (i * kTile + c) * 2, block + at.scale + i * 2, 2);
  if (f.scale != kTimes) return;
  uint8_t own[16];
  integers(kind, block, own);
  const int count = static_cast<int>(ggml_scales(f) / kTile) - 2 * halves;
  for (int i = 0; i < count; ++i) scales[(2 * halves + i) * kTile + c] = own[i];
}

// Block number `block` of a column of kinds with a scale a block.
void pack_block(Kind kind, const uint8_t* from, size_t block, int c, uint8_t* tile, uint8_t* low) {
  uint8_t* pair = tile + block / 2 * pair_bytes(kind);
  uint8_t* q = pair + 64 + block % 2 * payload_bytes(kind);
  std::memcpy(pair + block % 2 * 32 + c * 2, from, 2);
  if (kind == kQ4) return copy_words(q + c * 4, from + 2, 4);
  for (int i = 0; i < kBlock; ++i) {
    const uint8_t level = from[2 + i] ^ 128;
    if (kind == kQ8) {
      q[i / 4 * 64 + c * 4 + i % 4] = level;
      continue;
    }
    const int at = i % 16 / 4 * 64 + c * 4 + i % 4, shift = i < 16 ? 0 : 4;
    q[at] = static_cast<uint8_t>(q[at] | level >> 4 << shift);
    low[block * payload_bytes(kind) + at] =
        static_cast<uint8_t>(low[block * payload_bytes(kind) + at] | (level & 15) << shift);
  }
}

void pack_tile(Kind kind, int k, const uint8_t* const* rows, uint8_t* tile, uint8_t* low) {
  std::memset(tile, 0, tile_bytes(kind, k));
  if (low) std::memset(low, 0, low_bytes(k));
  const Block at = block_of(kind);
  const GgmlFacts f = ggml(kind);
  for (int c = 0; c < kTile; ++c) {
    if (!rows[c]) continue;
    if (takes_floats(kind)) {
      const size_t each = kKinds[kind].bits / 8;
      for (int i = 0; i < k; ++i) std::memcpy(tile + (size_t(i) * kTile + c) * each, rows[c] + i * each, each);
    } else if (is_ggml(kind)) {
      uint8_t* scales = tile + k / f.group * ggml_codes(f);
      for (int g = 0; g < k / f.group; ++g)
        pack_group(kind, rows[c] + size_t(g) * at.bytes, c, tile + g * ggml_codes(f), scales + g * ggml_scales(f));
    } else {
      for (int b = 0; b < k / kBlock; ++b) pack_block(kind, rows[c] + size_t(b) * at.bytes, size_t(b), c, tile, low);
    }
  }
}

// A kind that rows of a file's blocks become; kR32: none of that name, or k is not whole blocks.
Kind known(const char* name, int k) {
  const auto found = std::find_if(std::begin(kKinds), std::end(kKinds),
                                  [&](const auto& each) { return std::string(each.name) == name; });
  const Kind kind = found == std::end(kKinds) ? kR32 : static_cast<Kind>(found - kKinds);
  if (kind > kF32 || k < 1 || k > (1 << 24)) return kR32;
  const int group = is_ggml(kind) ? ggml(kind).group : takes_floats(kind) ? 1 : kBlock;
  return k % group || (!takes_floats(kind) && !block_of(kind).bytes) ? kR32 : kind;
}

}  // namespace
}  // namespace edgespec

// Packs tiles of 16 rows each, k numbers long: q4 of Q4_0, q8 and p8 of Q8_0, others of the type of their name.  rows
// [16 * tiles]: where each begins, null: zeros.  out [tiles * tile_bytes], low [tiles * low_bytes] only for p8. Returns
// 0, or 1 for a kind or a length that cannot be.
EDGESPEC_EXPORT int edgespec_pack(const char* kind, int k, const uint8_t* const* rows, int64_t tiles, uint8_t* out,
                                  uint8_t* low) {
  const edgespec::Kind one = edgespec::known(kind, k);
  if (one == edgespec::kR32 || (one == edgespec::kP8) != (low != nullptr)) return 1;
  for (int64_t tile = 0; tile < tiles; ++tile)
    edgespec::pack_tile(one, k, rows + tile * edgespec::kTile, out + tile * edgespec::tile_bytes(one, k),
                        low ? low + tile * edgespec::low_bytes(k) : nullptr);
  return 0;
}

// Rows `first` to `first + count` of a packed matrix as float32 [count, k].  Returns as edgespec_pack.
EDGESPEC_EXPORT int edgespec_unpack(const char* kind, int k, const uint8_t* packed, const uint8_t* low, int64_t first,
                                    int64_t count, float* y) {
  const edgespec::Kind one = edgespec::known(kind, k);
  if (one == edgespec::kR32 || (one == edgespec::kP8) != (low != nullptr)) return 1;
  for (int64_t row = first; row < first + count; ++row, y += k)
    edgespec::kernels().embed(one, {packed, low}, k, row, y);
  return 0;
}
