// Written by `python -m tools.generate_constants` from Python's constants: not to be edited.
#pragma once

// clang-format off
namespace edgespec {

constexpr int kBlock = 32;  // weights along k that lie together
constexpr int kTile = 16;  // output columns of a tile
constexpr int kMaxHeadDim = 512;
constexpr int kKvBlock = 128;  // tokens whose keys and values lie together
constexpr int kStateRows = 144;  // a pass of 128 rows and what the first of them looks back at
constexpr int kHeldBytes = 64;  // at the end of a delta rule's states: how many tokens they hold
constexpr int kMaxTaps = 16;  // tokens that a short convolution sees
constexpr int kSinkRows = 16;  // one tile; the first `sinks` of it are used

// Kinds of packed matrices, in the order of kKinds.
enum Kind : int { kQ4, kQ8, kC8, kQ4x64, kP8, kF32, kR8, kR32 };
constexpr int kProducts = 6;  // kinds that are multiplied by
#define EDGESPEC_PRODUCTS(kernel) kernel<kQ4>, kernel<kQ8>, kernel<kC8>, kernel<kQ4x64>, kernel<kP8>, kernel<kF32>

struct KindFacts {
  const char* name;  // in programs
  int bits;          // of a weight, in each of its planes
  int size;          // weights of a row that share a scale, 0: all of it, or none has one
  Kind acts;         // the kind whose activations it multiplies
};
constexpr KindFacts kKinds[] = {{"q4", 4, 32, kQ4}, {"q8", 8, 32, kQ4}, {"c8", 8, 0, kC8}, {"q4x64", 4, 64, kQ4x64}, {"p8", 4, 32, kQ4}, {"f32", 32, 0, kF32}, {"r8", 8, 0, kR8}, {"r32", 32, 0, kR32}};

// Formats of keys and values: what a channel of a block takes, and its scales.
enum KvFormat : int { kKvF32, kKvF16, kKvInt8, kKvInt4, kKvNomad1, kKvNomad2, kKvNone };
static_assert(kKvNone == 6);
struct KeyFacts {
  int channel, scales;
};
constexpr KeyFacts kKeys[] = {{512, 0}, {256, 0}, {128, 512}, {64, 0}, {64, 0}, {32, 0}, {0, 0}};

}  // namespace edgespec
