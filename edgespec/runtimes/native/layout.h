// Memory layout of packed weights, quantized activations and the KV cache.  The same on every processor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "constants.h"

namespace edgespec {

constexpr int kRowGroup = 16;  // rows whose activations are stored together

inline int round_up(int value, int to) { return (value + to - 1) / to * to; }

// ---- weights [n, k] ----------------------------------------------------------------------------------------------
//
// A tile is 16 output columns over all of k; k is padded to pairs of blocks.
//   kQ4: a pair is 2 x 16 float16 scales, then 2 x 256 bytes: 4 vectors of 64 bytes, byte [c * 4 + i] of vector j holds
//       column c, low nibble k = 4 j + i, high nibble k = 16 + 4 j + i, each with 8 added.
//   kQ8: as kQ4 with 2 x 512 bytes: 8 vectors, byte [c * 4 + i] of vector j is k = 4 j + i with 128 added.
//   kP8: the same bytes in two planes.  The high one is packed as kQ4 and has their high nibbles.  The low one is
//       stored separately, [tiles][blocks][256], in the same order and without scales.  The high plane without it is a
//       model of 4 bits: it replaces a weight by the middle of those that share its high nibble.
//   kC8: a scale per column instead of per block: all payloads as in kQ8, then 16 float32 scales.
//   kF32: [k][16] float32; kF16, kBF16: the same of 16-bit numbers.
//   kQ4_1 to kU8X128: block types of files, bit for bit: ggml's (ggml-common.h), and from kU4X32 on groups of GPTQ, AWQ
//        and compressed-tensors.  First the codes of each group of weights that the file keeps together, after those of
//        all groups the scales; k is whole groups.  Codes are ggml's bytes, four by four of 16 columns; of kQ5_0 and
//        kQ5_1 also a vector of upper bits, bit j of byte [c * 4 + i] that of k = 4 j + i.  Then 16 float16 scales (or
//        exponents in a byte each) and 16 minima, and of kTimes the small integers in bytes, 16 for each of the group's
//        scales, then those of the minima; kQ2_K has both in one byte, as ggml does.  Of kZero 16 zero points in a byte
//        each follow the scales, less the code of 0.
// Only looked up, not multiplied by: kR8: [n, k] int8, with a float32 scale per row; kR32: [n, k] float32.
constexpr bool is_ggml(Kind kind) { return kind >= kQ4_1 && kind <= kU8X128; }
constexpr GgmlFacts ggml(Kind kind) { return kGgml[is_ggml(kind) ? kind - kQ4_1 : 0]; }
constexpr bool takes_floats(Kind kind) { return kKinds[kind].acts == kF32; }  // of activations
constexpr bool is_four(Kind kind) { return kKinds[kind].bits == 4 && !is_ggml(kind); }
constexpr bool in_blocks(Kind kind) { return kKinds[kind].size > 0; }
constexpr size_t payload_bytes(Kind kind) { return size_t(kBlock) * kTile * kKinds[kind].bits / 8; }  // of a block
// Bytes of a pair of blocks, for a kind in blocks: two rows of scales and both payloads.
constexpr size_t pair_bytes(Kind kind) { return 64 + 2 * payload_bytes(kind); }

// Activation functions: gelu is exact, gelu_tanh its approximation by tanh, relu2 the square of relu.  kSwigluOai
// always has a gate (functions.inl).  Only kXielu (kernels.h) and kClamp, to a least and a most, read numbers; they
// have no gate.
enum Fn : int {
  kSilu = 0,
  kGelu = 1,
  kGeluTanh = 2,
  kRelu = 3,
  kRelu2 = 4,
  kSigmoid = 5,
  kSwigluOai = 6,
  kFns = 7,
  kXielu = 7,
  kClamp = 8
};

inline int blocks_of(int k) { return 2 * ((k + 2 * kBlock - 1) / (2 * kBlock)); }
inline int tiles_of(int n) { return (n + kTile - 1) / kTile; }
// Bytes of the codes of a group of ggml's in a tile, and of its scales with all that belongs to them.
constexpr size_t ggml_codes(GgmlFacts f) { return size_t(f.group) * kTile * (f.low + f.high) / 8; }
constexpr size_t ggml_shares(GgmlFacts f) { return f.scale == kTimes ? size_t(f.group / f.share) : 0; }  // integers
constexpr size_t ggml_scales(GgmlFacts f) {
  if (f.scale == kZero) return kTile * 3;
  const bool apart = f.minimum && f.share == kBlock;  // integers of scales and minima
  return kTile * ((f.scale == kExponent ? 1 : 2) * (f.minimum ? 2 : 1) + ggml_shares(f) * (apart ? 2 : 1));
}
inline size_t tile_bytes(Kind kind, int k) {
  if (takes_floats(kind)) return size_t(k) * kTile * kKinds[kind].bits / 8;
  if (is_ggml(kind))  // to whole cache lines
    return (k / ggml(kind).group * (ggml_codes(ggml(kind)) + ggml_scales(ggml(kind))) + 63) / 64 * 64;
  const size_t pairs = blocks_of(k) / 2;
  return in_blocks(kind) ? pairs * pair_bytes(kind) : pairs * 2 * payload_bytes(kind) + 64;
}
// Bytes of a tile of the low plane of kP8.
inline size_t low_bytes(int k) { return blocks_of(k) * payload_bytes(kP8); }
inline size_t packed_bytes(Kind kind, int n, int k) {
  if (kind == kR8 || kind == kR32) return size_t(n) * k * (kind == kR8 ? 1 : 4);
  return tiles_of(n) * tile_bytes(kind, k);
}

// ---- activations ---------------------------------------------------------------------------------------------------

// One block of one row.  Order in a buffer: [row group][block][row in group].  For kC8 all blocks of a row
// have one scale.
struct Act {
  int8_t q[kBlock];
  float scale;
  int32_t offset;  // -8 sum(q): what takes back the 8 added to 4-bit weights, and 16 times that the 128 of 8 bits
  int32_t first;   // -8 times the sum of the first half
  float sum;       // scale * sum(q)

  int32_t offset_of_second() const {  // -8 times the sum of the second half
    return static_cast<int32_t>(static_cast<uint32_t>(offset) - static_cast<uint32_t>(first));
  }
  int32_t offset_of_bytes() const { return static_cast<int32_t>(static_cast<uint32_t>(offset) * 16); }
};
// The offset for reading only the high plane, in 16ths of its levels: takes a nibble h for 16 h + 7.5 - 128.
inline int32_t offset_of_high(int32_t offset) {
  return static_cast<int32_t>(offset - ((int64_t(15) * offset + 128) >> 8));
}
static_assert(sizeof(Act) == 48, "activation record");

inline int rows_in_group(int rows, int group) {
  const int left = rows - group * kRowGroup;
  return left < kRowGroup ? left : kRowGroup;
}

// ---- the KV cache of one sequence -----------------------------------------------------------------------------------
//
// [states][recent keys][blocks of 128 tokens], a block = [layer][kv head][keys | codes | values].  Everything of a
// token range is contiguous, so that growing a cache is copying its bytes to the front of a larger one.  Layers whose
// heads are of different sizes have neither codes nor recent keys.  Sequences that share blocks are in one pool: of
// each [states][recent keys][table], to 64 bytes, then the blocks of all.  The table has the number of each of the
// sequence's blocks, int32.
//   keys f32, f16: 8 tiles [head_dim][16].          int8: 8 tiles [head_dim / 4][16][4] of k + 128, then 128 scales.
//   int4: 8 tiles [head_dim / 8][16][4], low nibble = first four dimensions.      (scale and zero point per channel)
//   nomad: [head_dim / d_sub][64], byte b: low nibble = token (b & 1) * 32 + b / 2, high nibble = that + 64.
//   values f32, f16: [128][head_dim].               int8: [32][head_dim][4], then 128 scales.
// Recent keys: [layer][kv head][ring / 16][head_dim][16] float16; the first kSinks rows of the ring's front part always
// hold the first tokens of the sequence.  States of layers without attention, one layer after the other:
// [kStateRows][width] float32, with the output of the token at index p in row p % kStateRows.  A pass writes its rows
// there, so that the next pass overwrites those that are rejected, like keys.  A delta rule's layer also has its
// matrices [head][n / 16][dim][16] float32, and in 64 more bytes an int64, the number of tokens in them (0: the
// matrices count as zeros).
inline size_t key_bytes(KvFormat format, int dim) { return size_t(kKeys[format].channel) * dim + kKeys[format].scales; }
inline size_t value_bytes(KvFormat format, int dim) { return key_bytes(format, dim); }
inline bool is_coded(KvFormat format) { return format == kKvInt8 || (format >= kKvInt4 && format <= kKvNomad2); }

struct KvLayout {
  KvFormat keys = kKvF16, codes = kKvNone, values = kKvF16;
  int layers = 0, heads = 0, dim = 0;   // dim is head_dim rounded up to 16, that of the largest
  std::vector<int> dims;                // of each layer, rounded up; empty: all are `dim`
  int window = 0, sinks = 0, ring = 0;  // ring: rows, a multiple of 16; 0 without exact recent keys
  int table = 0;                        // blocks of a sequence of a pool; 0: each has its own, in order

  int states = 0, state_width = 0;
  size_t state_matrix = 0;  // float32 numbers of a delta rule's matrices

  size_t ring_bytes() const { return size_t(kStateRows) * state_width * 4; }
  size_t state_bytes() const { return ring_bytes() + (state_matrix ? state_matrix * 4 + kHeldBytes : 0); }
  size_t recent_rows() const { return ring ? size_t(ring) + kSinkRows : 0; }
  size_t recent_bytes() const { return recent_rows() * dim * 2; }
  size_t header_bytes() const { return states * state_bytes() + size_t(layers) * heads * recent_bytes(); }
  int dim_of(int layer) const { return dims.empty() ? dim : dims[layer]; }
  size_t head_bytes(int layer) const {
    const int d = dim_of(layer);
    return key_bytes(keys, d) + key_bytes(codes, d) + value_bytes(values, d);
  }
  // Where a layer begins in a block.
  size_t layer_start(int layer) const {
    if (dims.empty()) return layers ? head_bytes(0) * heads * layer : 0;
    size_t at = 0;
    for (int before = 0; before < layer; ++before) at += head_bytes(before) * heads;
    return at;
  }
  size_t block_bytes() const { return layer_start(layers); }
  size_t slot_bytes() const { return (header_bytes() + size_t(table) * 4 + 63) / 64 * 64; }  // in a pool
  int64_t capacity(size_t bytes) const {
    if (bytes < header_bytes()) return 0;
    if (!block_bytes()) return int64_t(1) << 40;  // no attention: nothing is kept of a token
    return int64_t((bytes - header_bytes()) / block_bytes()) * kKvBlock;
  }
};

}  // namespace edgespec
