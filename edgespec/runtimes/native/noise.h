// Counter-based randomness, as edgespec/decoding/noise.py: every number is a hash of (seed, position, stream, token),
// so that a position has the same noise in every pass that reaches it.
#pragma once
#include <cmath>
#include <cstdint>

namespace edgespec {

// Uses of randomness that are independent of each other at one position.
constexpr uint64_t kTargetNoise = 0, kResidualNoise = 1;
constexpr uint64_t kAcceptNoise = uint64_t(1) << 20;  // + sibling
constexpr uint64_t kBlockNoise = uint64_t(1) << 30;   // + length at the start of the block
constexpr uint64_t kDraftNoise = uint64_t(1) << 40;   // + length at the start of the draft

constexpr double kUnit = 1.0 / double(uint64_t(1) << 53);

class Noise {
 public:
  explicit Noise(uint64_t seed = 0) : key_(mix(seed + kGolden)) {}

  // One number in [0, 1).
  double uniform(int64_t position, uint64_t stream) const { return double(mix(state(position, stream)) >> 11) * kUnit; }
  uint64_t state(int64_t position, uint64_t stream) const {
    return mix(mix(key_ + uint64_t(position) * kGolden) + stream * kMix1 + 1);
  }
  // 53 random bits for a token, given the state of its position.
  static uint64_t bits(uint64_t state, int64_t token) { return mix(uint64_t(token) * kGolden + state) >> 11; }

 private:
  // splitmix64 (Steele et al. 2014)
  static constexpr uint64_t kGolden = 0x9E3779B97F4A7C15, kMix1 = 0xBF58476D1CE4E5B9, kMix2 = 0x94D049BB133111EB;
  static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * kMix1;
    x = (x ^ (x >> 27)) * kMix2;
    return x ^ (x >> 31);
  }

  uint64_t key_;
};

// Standard Gumbel noise of 53 bits, increasing in them.
inline double gumbel_of(uint64_t bits) { return -std::log(-std::log((double(bits) + 0.5) * kUnit)); }

}  // namespace edgespec
