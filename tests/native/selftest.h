// Shared code of the test program's parts: generated numbers, and each part's functions.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ggml.h"
#include "half.h"
#include "kernels.h"
#include "pass.h"
#include "program.h"
#include "team.h"

namespace edgespec {

// ---- made-up numbers -----------------------------------------------------------------------------------------------

class Random {  // splitmix64
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int below(int n) { return static_cast<int>(next() % static_cast<uint64_t>(n)); }
  int between(int low, int high) { return low + below(high - low + 1); }
  float uniform(float low, float high) { return low + (high - low) * static_cast<float>(next() >> 40) * 0x1p-24f; }
  float normal() {  // near enough
    float sum = 0;
    for (int i = 0; i < 4; ++i) sum += uniform(-1.f, 1.f);
    return sum;
  }

 private:
  uint64_t state_;
};

// Memory on a cache line's boundary, not a byte more than asked for.
template <class T>
class Array {
 public:
  explicit Array(size_t count) : count_(count), data_(static_cast<T*>(::operator new[](count * sizeof(T), kAlign))) {
    std::memset(static_cast<void*>(data_.get()), 0, count * sizeof(T));
  }
  T* get() const { return data_.get(); }
  T& operator[](size_t i) const { return data_.get()[i]; }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }
  T* begin() const { return get(); }
  T* end() const { return get() + count_; }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(T* p) const { ::operator delete[](p, kAlign); }
  };
  size_t count_;
  std::unique_ptr<T, Free> data_;
};

using Floats = Array<float>;

inline Floats normals(Random& random, size_t count, float scale = 1.f) {
  Floats x(count);
  for (float& v : x) v = random.normal() * scale;
  return x;
}

enum class Make { kOrdinary, kSmallest, kLargest };  // the extremes are what saturates

inline int8_t level(Random& random, Make make) {
  return static_cast<int8_t>(make == Make::kOrdinary ? random.between(-127, 127) : random.below(2) ? 127 : -127);
}

// A row of numbers of one sign as large as they get, in the extreme cases.
inline Act make_act(Random& random, Make make) {
  Act act;
  int sum = 0;
  const int8_t all = level(random, Make::kLargest);
  for (int8_t& q : act.q) sum += q = make == Make::kOrdinary ? level(random, make) : all;
  act.scale = random.uniform(0.001f, 0.05f);
  act.offset = -8 * sum;
  act.first = -8 * std::accumulate(act.q, act.q + kBlock / 2, 0);
  act.sum = act.scale * static_cast<float>(sum);
  return act;
}

// Records [blocks][rows] for a matrix.
inline Array<Act> make_acts(Random& random, int k, int rows, Make make) {
  Array<Act> acts(size_t(rows) * blocks_of(k));
  for (Act& act : acts) act = make_act(random, make);
  return acts;
}

// The length of a row of that kind, at least k.
inline int whole(Kind kind, int k) { return is_ggml(kind) ? round_up(k, ggml(kind).group) : k; }

// One tile of packed weights.
inline Array<uint8_t> make_tile(Random& random, Kind kind, int k, Make make = Make::kOrdinary) {
  Array<uint8_t> tile(tile_bytes(kind, k));
  for (uint8_t& byte : tile)
    byte = make == Make::kOrdinary ? static_cast<uint8_t>(random.next()) : make == Make::kSmallest ? 0 : 255;
  const auto scale = [&] {  // some of them subnormal or zero
    return float_to_half(random.below(8) ? random.uniform(-0.02f, 0.02f) : random.uniform(0.f, 1e-5f));
  };
  if (takes_floats(kind)) {
    const size_t each = kKinds[kind].bits / 8;
    for (size_t i = 0; i < tile.size(); i += each) {
      const float x = random.normal() * (kind == kF32 ? 1.f : 0.05f);  // keys of a model are float16
      const uint16_t half = float_to_half(x);
      std::memcpy(&tile[i],
                  kind == kF16 ? static_cast<const void*>(&half) : reinterpret_cast<const char*>(&x) + 4 - each, each);
    }
  } else if (is_ggml(kind)) {
    const GgmlFacts f = ggml(kind);
    const size_t groups = size_t(k) / f.group;
    for (size_t at = groups * ggml_codes(f); at + ggml_scales(f) <= tile.size(); at += ggml_scales(f))
      for (int c = 0; c < kTile * (f.minimum && f.scale != kZero ? 2 : 1); ++c) {
        const uint16_t half = scale();
        if (f.scale == kExponent)
          tile[at + c] = static_cast<uint8_t>(random.below(8) ? random.between(115, 128) : random.below(3));
        else
          std::memcpy(&tile[at + size_t(c) * 2], &half, 2);
      }
  } else if (kind == kC8) {
    for (size_t i = tile.size() - 64; i < tile.size(); i += 4) {
      const float x = random.uniform(0.001f, 0.02f);
      std::memcpy(&tile[i], &x, 4);
    }
  } else {
    for (size_t at = 0; at < tile.size(); at += pair_bytes(kind))
      for (int c = 0; c < 32; ++c) {
        const uint16_t half = scale();
        std::memcpy(&tile[at + size_t(c) * 2], &half, 2);
      }
  }
  return tile;
}

// The low plane of a tile.
inline Array<uint8_t> make_low(Random& random, int k, Make make = Make::kOrdinary) {
  Array<uint8_t> low(low_bytes(k));
  for (uint8_t& byte : low)
    byte = make == Make::kOrdinary ? static_cast<uint8_t>(random.next()) : make == Make::kSmallest ? 0 : 255;
  return low;
}

// A tile of two planes as one of bytes.
inline Array<uint8_t> joined(const Array<uint8_t>& high, const Array<uint8_t>& low, int k) {
  Array<uint8_t> tile(tile_bytes(kQ8, k));
  for (int block = 0; block < blocks_of(k); ++block) {
    const size_t from = size_t(block / 2) * pair_bytes(kP8), to = size_t(block / 2) * pair_bytes(kQ8);
    if (!(block % 2)) std::memcpy(&tile[to], &high[from], 64);
    const uint8_t *h = &high[from + 64 + block % 2 * 256], *l = &low[size_t(block) * 256];
    uint8_t* q = &tile[to + 64 + block % 2 * 512];
    for (int i = 0; i < 256; ++i) {
      q[i] = static_cast<uint8_t>((h[i] & 15) << 4 | (l[i] & 15));
      q[i + 256] = static_cast<uint8_t>((h[i] & 240) | l[i] >> 4);
    }
  }
  return tile;
}

inline Kind kind_named(const std::string& name) {
  int kind = 0;
  while (name != kKinds[kind].name) ++kind;
  return static_cast<Kind>(kind);
}
inline constexpr const char* kFnNames[] = {"silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "swiglu_oai"};
inline constexpr const char* kFormatNames[] = {"f32", "f16", "int8", "int4", "nomad1", "nomad2", "none"};

// A block of 128 keys or values.
inline Array<uint8_t> make_block(Random& random, KvFormat format, int dim, bool values = false) {
  Array<uint8_t> block(key_bytes(format, dim));
  for (uint8_t& byte : block) byte = static_cast<uint8_t>(random.next());
  if (format == kKvF32)
    for (size_t i = 0; i < block.size(); i += 4) {
      const float x = random.normal();
      std::memcpy(&block[i], &x, 4);
    }
  if (format == kKvF16)
    for (size_t i = 0; i < block.size(); i += 2) {
      const uint16_t x = float_to_half(random.normal());
      std::memcpy(&block[i], &x, 2);
    }
  if (format == kKvInt8) {
    for (size_t i = 0; i < size_t(kKvBlock) * dim; ++i) {
      const int q = random.below(16) ? random.between(-127, 127) : 127 - 254 * random.below(2);
      block[i] = static_cast<uint8_t>(values ? q : q + 128);
    }
    for (size_t i = size_t(kKvBlock) * dim; i < block.size(); i += 4) {
      const float x = random.uniform(0.001f, 0.05f);
      std::memcpy(&block[i], &x, 4);
    }
  }
  return block;
}

struct Queries {
  Floats f;
  Array<int8_t> q8;
  Array<uint8_t> lut;
  std::vector<Query> all;

  Queries(Random& random, int count, int dim)
      : f(normals(random, size_t(count) * dim)), q8(size_t(count) * dim), lut(size_t(count) * dim * 16) {
    for (uint8_t& entry : lut) entry = static_cast<uint8_t>(random.below(16) ? random.below(128) : 127);
    for (int i = 0; i < count; ++i) {
      const Make make = i % 3 == 1 ? Make::kLargest : Make::kOrdinary;
      int sum = 0;
      for (int d = 0; d < dim; ++d)
        sum += q8[size_t(i) * dim + d] = make == Make::kOrdinary ? level(random, make) : 127;
      all.push_back({f.get() + size_t(i) * dim, q8.get() + size_t(i) * dim, random.uniform(0.001f, 0.02f),
                     random.normal(), -sum, lut.get() + size_t(i) * dim * 16});
    }
  }
};

// A line of hashes for each kernel and class of sizes.
void print_hashes(const Kernels& kernels);
// The largest errors by name, as JSON.
void print_accuracy(const Kernels& kernels);
// Whole passes; throws what differs.
void passes(bool brief);
// NaN and infinities; throws where they are lost.
void numbers();
// The system, its name for each kind of core and how many there are of it.
void print_processor();
// Medians of `turns` passes over matrices, interleaved with both roofs, as JSON.  rows: "1,2"; shape: "NxK,NxK".
void print_speed(int threads, int turns, int layers, int megabytes, const std::string& rows, const std::string& shape);
// The same for attention after `depth` tokens, with the bandwidth of the memory.  heads: "HEADSxKVxDIM".
void print_attention(int threads, int turns, int layers, int megabytes, const std::string& rows, int depth,
                     const std::string& heads);

}  // namespace edgespec
