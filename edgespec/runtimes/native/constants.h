// Written by `python -m tools.generate_constants` from Python's constants: not to be edited.
#pragma once
#include <cstdint>

// clang-format off
namespace edgespec {

constexpr int kBlock = 32;  // weights along k that are stored together
constexpr int kTile = 16;  // output columns of a tile
constexpr int kMaxHeadDim = 512;
constexpr int kKvBlock = 128;  // tokens whose keys and values are stored together
constexpr int kStateRows = 144;  // a pass of 128 rows and what the first of them looks back at
constexpr int kHeldBytes = 64;  // at the end of a delta rule's states: how many tokens they hold
constexpr int kMaxTaps = 16;  // tokens that a short convolution sees
constexpr int kSinkRows = 16;  // one tile; the first `sinks` of it are used
constexpr int kLongestPass = 128;  // rows, of a model with states: a rollback stays within their rows
constexpr int kCheckpoints = 4;  // of a slot's states, where memory allows

// Kinds of packed matrices, in the order of kKinds.
enum Kind : int { kQ4, kQ8, kC8, kP8, kQ4_1, kQ5_0, kQ5_1, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kIQ4_XS, kMXFP4, kU4X32, kU4X64, kU4X128, kU8X32, kU8X128, kF16, kBF16, kF32, kR8, kR32 };
constexpr int kProducts = 23;  // kinds that are multiplied by
#define EDGESPEC_PRODUCTS(kernel) kernel<kQ4>, kernel<kQ8>, kernel<kC8>, kernel<kP8>, kernel<kQ4_1>, kernel<kQ5_0>, kernel<kQ5_1>, kernel<kQ2_K>, kernel<kQ3_K>, kernel<kQ4_K>, kernel<kQ5_K>, kernel<kQ6_K>, kernel<kIQ4_NL>, kernel<kIQ4_XS>, kernel<kMXFP4>, kernel<kU4X32>, kernel<kU4X64>, kernel<kU4X128>, kernel<kU8X32>, kernel<kU8X128>, kernel<kF16>, kernel<kBF16>, kernel<kF32>

struct KindFacts {
  const char* name;  // in programs
  int bits;          // of a weight, in each of its planes
  int size;          // weights of a row that share a scale, 0: all of it, or none has one
  Kind acts;         // the kind whose activations it multiplies
};
constexpr KindFacts kKinds[] = {{"q4", 4, 32, kQ4}, {"q8", 8, 32, kQ4}, {"c8", 8, 0, kC8}, {"p8", 4, 32, kQ4}, {"q4_1", 4, 0, kQ4}, {"q5_0", 5, 0, kQ4}, {"q5_1", 5, 0, kQ4}, {"q2_k", 2, 0, kQ4}, {"q3_k", 3, 0, kQ4}, {"q4_k", 4, 0, kQ4}, {"q5_k", 5, 0, kQ4}, {"q6_k", 6, 0, kQ4}, {"iq4_nl", 4, 0, kQ4}, {"iq4_xs", 4, 0, kQ4}, {"mxfp4", 4, 0, kQ4}, {"u4x32", 4, 0, kQ4}, {"u4x64", 4, 0, kQ4}, {"u4x128", 4, 0, kQ4}, {"u8x32", 8, 0, kQ4}, {"u8x128", 8, 0, kQ4}, {"f16", 16, 0, kF32}, {"bf16", 16, 0, kF32}, {"f32", 32, 0, kF32}, {"r8", 8, 0, kR8}, {"r32", 32, 0, kR32}};

// Block types of files (layout.h), from kQ4_1 on.
enum GgmlScale : int { kHalf, kTimes, kExponent, kZero };
struct GgmlFacts {
  int group;        // weights of a row that are stored together
  int low, high;    // bits of a code; the upper ones are stored elsewhere
  int share;        // weights of a row with the same scale
  int zero;         // the code of 0
  GgmlScale scale;  // float16, one times a small integer, a power of 2, or float16 with a zero point
  bool minimum;     // whether there is one
  int table;        // the row of kGgmlTables with the values of codes, 0: none
};
constexpr GgmlFacts kGgml[] = {{32, 4, 0, 32, 0, kHalf, true, 0}, {32, 4, 1, 32, 16, kHalf, false, 0}, {32, 4, 1, 32, 0, kHalf, true, 0}, {256, 2, 0, 16, 0, kTimes, true, 0}, {256, 2, 1, 16, 4, kTimes, false, 0}, {256, 4, 0, 32, 0, kTimes, true, 0}, {256, 4, 1, 32, 0, kTimes, true, 0}, {256, 4, 2, 16, 32, kTimes, false, 0}, {32, 4, 0, 32, 128, kHalf, false, 1}, {256, 4, 0, 32, 128, kTimes, false, 1}, {32, 4, 0, 32, 16, kExponent, false, 2}, {32, 4, 0, 32, 8, kZero, true, 0}, {64, 4, 0, 32, 8, kZero, true, 0}, {128, 4, 0, 32, 8, kZero, true, 0}, {32, 8, 0, 32, 128, kZero, true, 0}, {128, 8, 0, 32, 128, kZero, true, 0}};
constexpr uint8_t kGgmlTables[][16] = {{}, {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241}, {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4}};

// Formats of keys and values: what a channel of a block takes, and its scales.
enum KvFormat : int { kKvF32, kKvF16, kKvInt8, kKvInt4, kKvNomad1, kKvNomad2, kKvNone };
static_assert(kKvNone == 6);
struct KeyFacts {
  int channel, scales;
};
constexpr KeyFacts kKeys[] = {{512, 0}, {256, 0}, {128, 512}, {64, 0}, {64, 0}, {32, 0}, {0, 0}};

}  // namespace edgespec
