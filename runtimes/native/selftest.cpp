// Tests of the kernels and of whole passes that need no ONNX Runtime: run on every processor, under sanitizers and in
// emulators (tests/runtimes/test_native_kernels.py).
//
//   selftest isas            the instruction sets that this processor and build have
//   selftest hash ISA        a hash of what each kernel computes: the same lines for every ISA
//   selftest accuracy ISA    the largest errors against double precision, as JSON
//   selftest pass [brief]    a small model, one row at a time against many rows, threads, slots, trees, moves, KV
//   formats
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "half.h"
#include "kernels.h"
#include "pass.h"
#include "program.h"
#include "team.h"

namespace edgespec {
namespace {

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

Floats normals(Random& random, size_t count, float scale = 1.f) {
  Floats x(count);
  for (float& v : x) v = random.normal() * scale;
  return x;
}

enum class Make { kOrdinary, kSmallest, kLargest };  // the extremes are what saturates

int8_t level(Random& random, Make make) {
  return static_cast<int8_t>(make == Make::kOrdinary ? random.between(-127, 127) : random.below(2) ? 127 : -127);
}

// A row of numbers of one sign as large as they get, in the extreme cases.
Act make_act(Random& random, Make make) {
  Act act;
  int sum = 0;
  const int8_t all = level(random, Make::kLargest);
  for (int8_t& q : act.q) sum += q = make == Make::kOrdinary ? level(random, make) : all;
  act.scale = random.uniform(0.001f, 0.05f);
  act.offset = -8 * sum;
  return act;
}

// One tile of packed weights.
Array<uint8_t> make_tile(Random& random, Kind kind, int k, Make make = Make::kOrdinary) {
  Array<uint8_t> tile(tile_bytes(kind, k));
  for (uint8_t& byte : tile)
    byte = make == Make::kOrdinary ? static_cast<uint8_t>(random.next()) : make == Make::kSmallest ? 0 : 255;
  if (kind == kF32) {
    for (size_t i = 0; i < tile.size(); i += 4) {
      const float x = random.normal();
      std::memcpy(&tile[i], &x, 4);
    }
  } else if (kind == kC8) {
    for (size_t i = tile.size() - 64; i < tile.size(); i += 4) {
      const float x = random.uniform(0.001f, 0.02f);
      std::memcpy(&tile[i], &x, 4);
    }
  } else {
    const size_t pair = kind == kQ4 ? 576 : 1088;
    for (size_t at = 0; at < tile.size(); at += pair)
      for (int c = 0; c < 32; ++c) {  // some of them subnormal or zero
        const uint16_t half =
            float_to_half(random.below(8) ? random.uniform(-0.02f, 0.02f) : random.uniform(0.f, 1e-5f));
        std::memcpy(&tile[at + size_t(c) * 2], &half, 2);
      }
  }
  return tile;
}

constexpr const char* kKindNames[] = {"q4", "q8", "c8", "f32"};
constexpr const char* kFormatNames[] = {"f32", "f16", "int8", "int4", "nomad1", "nomad2", "none"};

// A block of 128 keys or values.
Array<uint8_t> make_block(Random& random, KvFormat format, int dim, bool values = false) {
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

// ---- hash ----------------------------------------------------------------------------------------------------------

class Hash {  // FNV-1a
 public:
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) state_ = (state_ ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
  }
  template <class T>
  void add(const Array<T>& array) {
    add(array.get(), array.bytes());
  }
  void add(float x) { add(&x, sizeof x); }
  void add(int64_t x) { add(&x, sizeof x); }
  void print(const std::string& name) {
    std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(state_));
    state_ = kStart;
  }

 private:
  static constexpr uint64_t kStart = 0xcbf29ce484222325u;
  uint64_t state_ = kStart;
};

void hash_linear(const Kernels& kernels, Random random) {
  Hash hash;
  for (int kind = kQ4; kind <= kF32; ++kind)
    for (const int k : {5, 31, 32, 64, 97, 130, 192, 896}) {
      for (const Make make : {Make::kOrdinary, Make::kSmallest, Make::kLargest}) {
        const auto tile = make_tile(random, static_cast<Kind>(kind), k, make);
        for (int rows = 1; rows <= kRowGroup; ++rows) {
          const Floats floats = normals(random, size_t(rows) * k);
          Array<Act> acts(size_t(rows) * blocks_of(k));
          for (Act& act : acts) act = make_act(random, make);
          const void* act = kind == kF32 ? static_cast<const void*>(floats.get()) : acts.get();
          for (const int columns : {16, 15, 8, 3}) {
            const size_t ld = 21;  // what lies between the rows must stay as it is
            Floats y(rows * ld);
            std::fill(y.begin(), y.end(), 7.f);
            kernels.linear[kind](tile.get(), k, act, rows, y.get(), ld, columns);
            hash.add(y);
          }
        }
      }
      hash.print(std::string("linear_") + kKindNames[kind] + "/k=" + std::to_string(k));
    }
}

void hash_rows(const Kernels& kernels, Random random) {
  Hash hash;
  for (const int k : {1, 7, 16, 24, 33, 64, 100, 900}) {
    for (int i = 0; i < 4; ++i) {
      const Floats x = normals(random, k, i == 3 ? 1e-4f : 1.f), weight = normals(random, k);
      Floats y(k);
      kernels.norm(x.get(), k, i % 2 ? nullptr : weight.get(), 1e-5f, y.get());
      hash.add(y);
      Floats z = normals(random, k);
      kernels.add(z.get(), x.get(), k);
      hash.add(z);
    }
    hash.print("norm,add/k=" + std::to_string(k));
    for (int i = 0; i < 12; ++i) {
      // ordinary, tiny and huge numbers, ties between two levels, nothing but zeros (in part of the blocks)
      const float scale[] = {1.f, 1e-34f, 2e37f};
      Floats x = normals(random, k, scale[i % 3]);
      if (i >= 6)
        for (float& v : x) v = static_cast<float>(random.between(-253, 253)) * 0.5f;
      if (i >= 6) x[0] = 127.f;
      for (int at = 0; at < k; ++at)
        if (i % 4 == 3 || (i % 4 == 2 && at / kBlock % 2)) x[at] = 0;
      const int blocks = blocks_of(k), stride = 3;
      Array<Act> acts(size_t(blocks) * stride);
      kernels.quantize(x.get(), k, blocks, i % 2 == 1, acts.get(), stride);
      hash.add(acts);
      if (k < kBlock) continue;
      Act act;
      kernels.quantize_blocks(x.get(), 1, &act);
      hash.add(&act, sizeof act);
    }
    hash.print("quantize/k=" + std::to_string(k));
  }
  for (const int n : {16, 32, 96}) {
    for (const float scale : {1.f, 30.f, 1e4f}) {
      const Floats gate = normals(random, n, scale), up = normals(random, n);
      Floats y(n);
      kernels.glu(gate.get(), up.get(), n, y.get());
      hash.add(y);
      kernels.scale(y.get(), n, 0.37f);
      kernels.accumulate(y.get(), gate.get(), n, -1.7f);
      hash.add(y);
      Array<uint16_t> half(n);
      for (const float by : {1.f, 1e5f, 1e-5f, 1e-7f}) {
        const Floats x = normals(random, n, by);
        kernels.to_half(x.get(), n, half.get());
        hash.add(half);
      }
      Array<int8_t> q(n);
      int32_t minus_sum = 0;
      hash.add(kernels.quantize_query(gate.get(), n, q.get(), &minus_sum));
      hash.add(q);
      hash.add(int64_t(minus_sum));
    }
    hash.print("glu,scale,accumulate,to_half,quantize_query/n=" + std::to_string(n));
  }
  for (const int rotary : {2, 6, 10, 16, 34, 48, 64, 128}) {
    const Floats cos = normals(random, rotary / 2), sin = normals(random, rotary / 2);
    Floats head = normals(random, rotary + 3);
    kernels.rotate(head.get(), rotary + 3, rotary, cos.get(), sin.get());
    hash.add(head);
    hash.print("rotate/" + std::to_string(rotary));
  }
  for (int kind = kQ4; kind <= kF32; ++kind)
    for (const int k : {20, 64, 100}) {
      Array<uint8_t> weight(tile_bytes(static_cast<Kind>(kind), k) * 2);
      for (int tile = 0; tile < 2; ++tile) {
        const auto one = make_tile(random, static_cast<Kind>(kind), k);
        std::copy(one.begin(), one.end(), weight.get() + tile * one.size());
      }
      for (const int row : {0, 5, 15, 16, 31}) {
        Floats y(k);
        kernels.embed(static_cast<Kind>(kind), weight.get(), k, row, y.get());
        hash.add(y);
      }
      hash.print(std::string("embed_") + kKindNames[kind] + "/k=" + std::to_string(k));
    }
}

void hash_attention(const Kernels& kernels, Random random) {
  Hash hash;
  for (int format = kKvF32; format <= kKvNomad2; ++format)
    for (int dim = 16; dim <= 128; dim += 16) {
      for (int count = 1; count <= kMaxQueries; ++count) {
        const auto block = make_block(random, static_cast<KvFormat>(format), dim);
        const Queries queries(random, count, dim);
        for (const auto& [tile, tiles] : {std::pair{0, 8}, {0, 1}, {5, 2}, {3, 3}}) {
          if (format >= kKvNomad1 && tiles != 8) continue;  // always whole blocks
          const size_t ld = kKvBlock + 5;
          Floats out(count * ld);
          kernels.score(static_cast<KvFormat>(format), block.get(), dim, tile, tiles, queries.all.data(), count,
                        out.get(), ld, 0);
          hash.add(out);
        }
      }
      hash.print(std::string("score_") + kFormatNames[format] + "/dim=" + std::to_string(dim));
      if (format > kKvInt8) continue;
      for (int count = 1; count <= kMaxQueries; ++count) {
        const auto block = make_block(random, static_cast<KvFormat>(format), dim, true);
        for (const auto& [first, tokens] : {std::pair{0, 128}, {32, 64}, {96, 32}, {0, 32}}) {
          const size_t ld = kKvBlock + 16;
          Floats p(count * ld), out = normals(random, size_t(count) * dim);
          for (float& v : p) v = random.below(3) ? random.uniform(0.f, 1.f) : 0.f;
          std::fill_n(p.get(), 32, 0.f);
          kernels.weigh(static_cast<KvFormat>(format), block.get(), dim, first, tokens, p.get(), ld, count, out.get(),
                        0);
          hash.add(out);
        }
      }
      hash.print(std::string("weigh_") + kFormatNames[format] + "/dim=" + std::to_string(dim));
    }
  for (const int n : {16, 32, 128, 512}) {
    for (int i = 0; i < 8; ++i) {
      Floats s = normals(random, n, i % 2 ? 3.f : 40.f);
      for (float& v : s)
        if (random.below(4) == 0) v = -3e38f;
      const float largest = kernels.largest(s.get(), n);
      hash.add(largest);
      hash.add(kernels.exponentials(s.get(), n, largest));
      hash.add(s);
    }
    hash.print("largest,exponentials/n=" + std::to_string(n));
  }
  for (const int n : {1, 3, 16, 17, 100, 1000}) {
    for (int i = 0; i < 20; ++i) {
      Floats s(n);
      for (float& v : s) v = static_cast<float>(random.between(-5, 5 * (i + 1))) - 3.f;  // many equals
      hash.add(kernels.argmax(s.get(), n));
    }
    hash.print("argmax/n=" + std::to_string(n));
  }
  for (int dim = 16; dim <= 128; dim += 16)
    for (const int sub : {1, 2}) {
      for (int i = 0; i < 6; ++i) {
        Floats codebook = normals(random, size_t(dim) * 16);
        if (i > 2)  // equal centroids
          for (float& v : codebook) v = std::nearbyint(v);
        const Floats query = normals(random, dim, i == 5 ? 0.f : 1.f);
        Array<uint8_t> lut(size_t(dim / sub) * 16), codes(dim / sub);
        float scale = 0, bias = 0;
        kernels.lookup_table(codebook.get(), query.get(), dim, sub, lut.get(), &scale, &bias);
        kernels.nearest(codebook.get(), query.get(), dim, sub, codes.get());
        hash.add(lut);
        hash.add(codes);
        hash.add(scale);
        hash.add(bias);
      }
      hash.print("lookup_table,nearest/dim=" + std::to_string(dim) + ",sub=" + std::to_string(sub));
    }
}

// ---- accuracy ------------------------------------------------------------------------------------------------------

// The largest of what is offered, by name.
class Worst {
 public:
  void offer(const std::string& name, double error) {
    double& known = worst_[name];
    if (!(error <= known)) known = error;  // a NaN stays
  }
  void print() const {
    const char* comma = "{";
    for (const auto& [name, error] : worst_) {
      if (std::isfinite(error))
        std::printf("%s\"%s\": %.6g", comma, name.c_str(), error);
      else
        std::printf("%s\"%s\": 1e999", comma, name.c_str());
      comma = ", ";
    }
    std::printf("}\n");
  }

 private:
  std::map<std::string, double> worst_;
};

// Element [column, i] of a tile, by the words of layout.h.
double weight_at(const uint8_t* tile, Kind kind, int k, int column, int i) {
  const int block = i / kBlock, at = i % kBlock;
  if (kind == kF32) {
    float x;
    std::memcpy(&x, tile + (size_t(i) * kTile + column) * 4, 4);
    return x;
  }
  if (kind == kC8) {
    float scale;
    std::memcpy(&scale, tile + size_t(blocks_of(k)) * 512 + size_t(column) * 4, 4);
    return (tile[size_t(block) * 512 + at / 4 * 64 + column * 4 + at % 4] - 128) * double(scale);
  }
  const size_t payload = kind == kQ4 ? 256 : 512;
  const uint8_t* pair = tile + size_t(block / 2) * (64 + 2 * payload);
  const uint8_t* q = pair + 64 + block % 2 * payload;
  uint16_t half;
  std::memcpy(&half, pair + block % 2 * 32 + column * 2, 2);
  int number;
  if (kind == kQ4) {
    const uint8_t byte = q[at % 16 / 4 * 64 + column * 4 + at % 4];
    number = (at < 16 ? byte & 15 : byte >> 4) - 8;
  } else {
    number = q[at / 4 * 64 + column * 4 + at % 4] - 128;
  }
  return number * double(half_to_float(half));
}

void accuracy_linear(const Kernels& kernels, Random random, Worst& worst) {
  for (int kind = kQ4; kind <= kF32; ++kind)
    for (const int k : {64, 100, 896, 4864})
      for (const int rows : {1, 5}) {
        const auto tile = make_tile(random, static_cast<Kind>(kind), k);
        const int blocks = blocks_of(k);
        Floats x = normals(random, size_t(rows) * k), y(size_t(rows) * kTile);
        Array<Act> acts(size_t(rows) * blocks);
        for (int r = 0; r < rows; ++r)
          kernels.quantize(x.get() + size_t(r) * k, k, blocks, kind == kC8, acts.get() + r, rows);
        kernels.linear[kind](tile.get(), k, kind == kF32 ? static_cast<const void*>(x.get()) : acts.get(), rows,
                             y.get(), kTile, kTile);
        for (int r = 0; r < rows; ++r)
          for (int c = 0; c < kTile; ++c) {
            double sum = 0, size = 0;
            for (int i = 0; i < k; ++i) {
              const Act& act = acts[size_t(i / kBlock) * rows + r];
              const double by = kind == kF32 ? x[size_t(r) * k + i] : act.q[i % kBlock] * double(act.scale);
              const double product = weight_at(tile.get(), static_cast<Kind>(kind), k, c, i) * by;
              sum += product;
              size += std::fabs(product);
            }
            worst.offer(std::string("linear_") + kKindNames[kind], std::fabs(y[size_t(r) * kTile + c] - sum) / size);
          }
        if (kind == kF32) continue;
        for (int r = 0; r < rows; ++r)
          for (int i = 0; i < k; ++i) {  // in steps: half of one, and a little
            const Act& act = acts[size_t(i / kBlock) * rows + r];
            worst.offer("quantize", std::fabs(x[size_t(r) * k + i] / double(act.scale) - act.q[i % kBlock]));
          }
        for (const Act& act : acts) {
          int sum = 0;
          for (const int8_t q : act.q) sum += q;
          if (act.offset != -8 * sum) worst.offer("quantize", NAN);
        }
      }
}

void accuracy_functions(const Kernels& kernels, Random random, Worst& worst) {
  for (int i = 0; i < 400; ++i) {
    Floats s(16);
    double sum = 0;
    for (float& v : s) v = random.uniform(i % 2 ? -80.f : -10.f, 0.f);
    const Floats x(s.size());
    std::copy(s.begin(), s.end(), x.begin());
    const float total = kernels.exponentials(s.get(), 16, 0.f);
    for (int c = 0; c < 16; ++c) {
      const double exact = std::exp(double(x[c]));
      sum += exact;
      if (x[c] < -60)  // weighs nothing
        worst.offer("exponential_none", std::fabs(s[c]));
      else
        worst.offer(x[c] >= -10 ? "exponential" : "exponential_small", std::fabs(s[c] - exact) / exact);
    }
    worst.offer("exponential_sum", std::fabs(total - sum) / sum);
  }
  for (const int n : {16, 128, 512}) {  // as attention does it: hidden ones weigh nothing, the others sum to 1
    Floats s = normals(random, n, 4.f);
    for (int i = 0; i < n; i += 3) s[i] = -3e38f;
    const Floats x(s.size());
    std::copy(s.begin(), s.end(), x.begin());
    const float largest = kernels.largest(s.get(), n), sum = kernels.exponentials(s.get(), n, largest);
    double exact = 0;
    for (int i = 0; i < n; ++i) exact += x[i] > -1e30f ? std::exp(double(x[i]) - largest) : 0;
    for (int i = 0; i < n; ++i) {
      const double p = x[i] > -1e30f ? std::exp(double(x[i]) - largest) / exact : 0;
      worst.offer("softmax", std::fabs(s[i] / double(sum) - p));
    }
  }
  for (const float scale : {0.1f, 3.f, 20.f}) {
    const int n = 1024;
    const Floats gate = normals(random, n, scale), up = normals(random, n), weight = normals(random, n);
    Floats y(n);
    kernels.glu(gate.get(), up.get(), n, y.get());
    for (int i = 0; i < n; ++i) {
      const double exact = gate[i] / (1 + std::exp(-double(gate[i]))) * up[i];
      if (gate[i] > -10)
        worst.offer("glu", std::fabs(y[i] - exact) / std::fabs(exact));
      else
        worst.offer("glu_small", std::fabs(y[i] - exact));
    }
    kernels.norm(gate.get(), n, weight.get(), 1e-6f, y.get());
    double squares = 0;
    for (const float v : gate) squares += double(v) * v;
    for (int i = 0; i < n; ++i) {
      const double exact = gate[i] / std::sqrt(squares / n + 1e-6) * weight[i];
      worst.offer("norm", std::fabs(y[i] - exact) / std::fabs(exact));
    }
    Array<uint16_t> half(n);
    kernels.to_half(gate.get(), n, half.get());
    for (int i = 0; i < n; ++i)  // in halves of the last place of a normal number
      worst.offer("to_half", std::fabs(half_to_float(half[i]) - double(gate[i])) /
                                 std::max(std::fabs(double(gate[i])), 0x1p-14) * 2048);
  }
}

void accuracy_attention(const Kernels& kernels, Random random, Worst& worst) {
  for (const int dim : {16, 64, 128}) {
    const int count = 3;
    const Floats x = normals(random, size_t(count) * dim);
    for (int format = kKvF32; format <= kKvNomad2; ++format) {
      const int sub = format == kKvNomad2 ? 2 : 1, subs = dim / sub;
      const auto block = make_block(random, static_cast<KvFormat>(format), dim);
      const Floats codebook = normals(random, size_t(dim) * 16);
      Array<int8_t> q8(size_t(count) * dim);
      Array<uint8_t> lut(size_t(count) * dim * 16);
      std::vector<Query> queries;
      for (int i = 0; i < count; ++i) {
        Query q = {x.get() + size_t(i) * dim,       q8.get() + size_t(i) * dim, 1.f, 0.f, 0,
                   lut.get() + size_t(i) * dim * 16};
        if (format == kKvInt8 || format == kKvInt4)
          q.scale = kernels.quantize_query(q.f, dim, q8.get() + size_t(i) * dim, &q.minus_sum);
        if (format >= kKvNomad1)
          kernels.lookup_table(codebook.get(), q.f, dim, sub, lut.get() + size_t(i) * dim * 16, &q.scale, &q.bias);
        queries.push_back(q);
      }
      Floats out(size_t(count) * kKvBlock);
      kernels.score(static_cast<KvFormat>(format), block.get(), dim, 0, 8, queries.data(), count, out.get(), kKvBlock,
                    0);
      for (int i = 0; i < count; ++i)
        for (int token = 0; token < kKvBlock; ++token) {
          const int tile = token / 16, c = token % 16;
          double sum = 0, size = 0;
          for (int d = 0; d < dim; ++d) {
            double key = 0, by = x[size_t(i) * dim + d];
            if (format == kKvF32) {
              float v;
              std::memcpy(&v, &block[((size_t(tile) * dim + d) * 16 + c) * 4], 4);
              key = v;
            } else if (format == kKvF16) {
              uint16_t v;
              std::memcpy(&v, &block[((size_t(tile) * dim + d) * 16 + c) * 2], 2);
              key = half_to_float(v);
            } else if (format == kKvInt8) {
              float scale;
              std::memcpy(&scale, &block[size_t(kKvBlock) * dim + token * 4], 4);
              key = (block[(size_t(tile) * dim + d / 4 * 4) * 16 + c * 4 + d % 4] - 128) * double(scale);
              by = queries[i].q8[d] * double(queries[i].scale);
            } else if (format == kKvInt4) {
              const uint8_t byte = block[size_t(tile) * dim * 8 + d / 8 * 64 + c * 4 + d % 4];
              key = d % 8 < 4 ? byte & 15 : byte >> 4;
              by = queries[i].q8[d] * double(queries[i].scale);
            } else {
              const uint8_t byte = block[size_t(d / sub) * 64 + (token % 32) * 2 + token % 64 / 32];
              key = codebook[size_t(d) * 16 + (token < 64 ? byte & 15 : byte >> 4)];
            }
            sum += key * by;
            size += std::fabs(key * by);
          }
          const double error = std::fabs(out[size_t(i) * kKvBlock + token] - sum);
          // nomad: in steps of the table, of which each look-up may be half of one off
          worst.offer(std::string("score_") + kFormatNames[format],
                      error / (format >= kKvNomad1 ? subs * queries[i].scale : size));
        }
    }
    for (int i = 0; i < count; ++i) {
      Array<int8_t> q(dim);
      int32_t minus_sum;
      const float scale = kernels.quantize_query(x.get() + size_t(i) * dim, dim, q.get(), &minus_sum);
      for (int d = 0; d < dim; ++d)
        worst.offer("quantize_query", std::fabs(x[size_t(i) * dim + d] / double(scale) - q[d]));
    }
    for (int format = kKvF32; format <= kKvInt8; ++format) {
      const auto values = make_block(random, static_cast<KvFormat>(format), dim, true);
      Floats p(size_t(count) * kKvBlock), out(size_t(count) * dim);
      for (float& v : p) v = random.uniform(0.f, 1.f);
      kernels.weigh(static_cast<KvFormat>(format), values.get(), dim, 0, kKvBlock, p.get(), kKvBlock, count, out.get(),
                    0);
      for (int i = 0; i < count; ++i)
        for (int d = 0; d < dim; ++d) {
          double sum = 0, size = 0;
          for (int n = 0; n < kKvBlock; ++n) {
            double value;
            if (format == kKvF32) {
              float v;
              std::memcpy(&v, &values[(size_t(n) * dim + d) * 4], 4);
              value = v;
            } else if (format == kKvF16) {
              uint16_t v;
              std::memcpy(&v, &values[(size_t(n) * dim + d) * 2], 2);
              value = half_to_float(v);
            } else {
              float scale;
              std::memcpy(&scale, &values[size_t(kKvBlock) * dim + n * 4], 4);
              value = static_cast<int8_t>(values[size_t(n / 4) * dim * 4 + d * 4 + n % 4]) * double(scale);
            }
            sum += value * p[size_t(i) * kKvBlock + n];
            size += std::fabs(value * p[size_t(i) * kKvBlock + n]);
          }
          worst.offer(std::string("weigh_") + kFormatNames[format], std::fabs(out[size_t(i) * dim + d] - sum) / size);
        }
    }
  }
}

// ---- passes --------------------------------------------------------------------------------------------------------

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

// A decoder of two layers with sizes that fill neither tiles nor blocks.
struct Model {
  static constexpr int kHidden = 96, kHeads = 4, kKv = 2, kDim = 24, kRotary = 20, kInner = 80, kVocab = 100;
  static constexpr int kPositions = 2048, kLayers = 2;
  std::vector<Array<uint8_t>> weights;
  Program program;

  explicit Model(const std::string& kind, uint64_t seed) : random_(seed) {
    const bool channels = kind == "c8";
    const int table = matrix(kVocab, kHidden), cos = angles(false), sin = angles(true);
    const std::string form = channels ? "c8" : "q4";
    std::string text = "floats 0 96\nfloats 1 96\nfloats 2 80\nacts 0 96\nacts 1 96\nacts 2 80\nacts 3 96\n";
    text += "embed w=" + std::to_string(table) + " kind=q4 n=100 k=96 out=0\n";
    for (int layer = 0; layer < kLayers; ++layer) {
      text += "gate index=" + std::to_string(2 * layer) + " skip=5\n";
      text += "quantize x=0 norm=" + vector(kHidden) + " eps=1e-5 k=96 kind=" + form + " out=0\n";
      text +=
          "heads act=0 w=" + std::to_string(matrix((kHeads + 2 * kKv) * round_up(kDim, kTile), kHidden, kind, kDim)) +
          " kind=" + kind + " k=96 bias=" + vector((kHeads + 2 * kKv) * kDim) +
          " dim=24 heads=4 kv=2 rotary=20 cos=" + std::to_string(cos) + " sin=" + std::to_string(sin) +
          " qnorm=" + (layer ? vector(kDim) : "-1") + " knorm=" + (layer ? vector(kDim) : "-1") +
          " eps=1e-5 layer=" + std::to_string(layer) + " scale=0.2\n";
      text +=
          "attend out=1 layer=" + std::to_string(layer) + " heads=4 kv=2 dim=24 window=" + (layer ? "0" : "90") + "\n";
      text += "quantize x=1 k=96 kind=" + form + " out=1\n";
      text += "linear act=1 w=" + std::to_string(matrix(kHidden, kHeads * kDim, kind)) + " kind=" + kind +
              " n=96 k=96 out=0 add=1\n";
      text += "gate index=" + std::to_string(2 * layer + 1) + " skip=" + (channels ? "4" : "3") + "\n";
      text += "quantize x=0 norm=" + vector(kHidden) + " eps=1e-5 k=96 kind=" + form + " out=0\n";
      text += "glu act=0 gate=" + std::to_string(matrix(kInner, kHidden, kind)) +
              " up=" + std::to_string(matrix(kInner, kHidden, kind)) + " kind=" + kind + " n=80 k=96 out=2\n";
      if (channels) text += "quantize x=2 k=80 kind=c8 out=2\n";
      text += "linear act=2 w=" + std::to_string(matrix(kHidden, kInner, kind)) + " kind=" + kind +
              " n=96 k=80 out=0 add=1\n";
    }
    text += "quantize x=0 norm=" + vector(kHidden) + " eps=1e-5 k=96 kind=q4 out=3 rows=1\n";
    text += "logits act=3 w=" + std::to_string(table) + " kind=q4 n=100 k=96\n";
    program = Program::parse(text);
  }

 private:
  // A packed matrix; rows beyond head_dim in each head are zero.
  int matrix(int n, int k, const std::string& name = "q4", int dim = 0) {
    const Kind kind = name == "q4" ? kQ4 : name == "q8" ? kQ8 : kC8;
    Array<uint8_t> packed(packed_bytes(kind, n, k));
    for (int t = 0; t < tiles_of(n); ++t) {
      auto tile = make_tile(random_, kind, k);
      for (int c = 0; c < kTile; ++c) {
        const int row = t * kTile + c, padded = round_up(dim, kTile);
        if (dim ? row % padded >= dim : row >= n) clear(tile.get(), kind, k, c);
      }
      std::copy(tile.begin(), tile.end(), packed.get() + t * tile.size());
    }
    return keep(std::move(packed));
  }
  static void clear(uint8_t* tile, Kind kind, int k, int column) {
    if (kind == kC8) {
      std::memset(tile + size_t(blocks_of(k)) * 512 + size_t(column) * 4, 0, 4);
      return;
    }
    for (int block = 0; block < blocks_of(k); ++block)
      std::memset(tile + size_t(block / 2) * (kind == kQ4 ? 576 : 1088) + block % 2 * 32 + column * 2, 0, 2);
  }
  std::string vector(int n) {
    Array<uint8_t> bytes(size_t(n) * 4);
    for (int i = 0; i < n; ++i) put(bytes, i, random_.uniform(0.5f, 1.5f));
    return std::to_string(keep(std::move(bytes)));
  }
  int angles(bool sine) {
    Array<uint8_t> bytes(size_t(kPositions) * kRotary / 2 * 4);
    for (int p = 0; p < kPositions; ++p)
      for (int i = 0; i < kRotary / 2; ++i) {
        const double angle = p * std::pow(1e4, -2.0 * i / kRotary);
        put(bytes, size_t(p) * kRotary / 2 + i, static_cast<float>(sine ? std::sin(angle) : std::cos(angle)));
      }
    return keep(std::move(bytes));
  }
  static void put(const Array<uint8_t>& bytes, size_t i, float x) { std::memcpy(bytes.get() + i * 4, &x, 4); }
  int keep(Array<uint8_t> bytes) {
    weights.push_back(std::move(bytes));
    return static_cast<int>(weights.size()) - 1;
  }

  Random random_;
};

struct Format {
  KvFormat keys, codes, values;
  bool read_codes;
  int ring;
  std::string name() const {
    return std::string(kFormatNames[keys]) + "/" + kFormatNames[codes] + "/" + kFormatNames[values] +
           (read_codes ? " read by codes" : "") + (ring ? " with recent keys" : "");
  }
};

struct Row {
  int64_t token, position, slot, visible, parent, place;
};

using Logits = std::vector<float>;  // of one row

// The cache of some slots and what it takes to run passes on it.
class Runner {
 public:
  Runner(const Model& model, const Format& format, int slots, int tokens)
      : model_(model), format_(format), slots_(slots) {
    layout_.keys = format.keys;
    layout_.codes = format.codes;
    layout_.values = format.values;
    layout_.layers = Model::kLayers;
    layout_.heads = Model::kKv;
    layout_.dim = round_up(Model::kDim, kTile);
    layout_.ring = format.ring;
    layout_.window = format.ring ? 16 : 0;
    layout_.sinks = format.ring ? 4 : 0;
    bytes_ = layout_.header_bytes() + layout_.block_bytes() * ((tokens + kKvBlock - 1) / kKvBlock);
    kv_ = std::make_unique<Array<uint8_t>>(bytes_ * slots);
    Random random(99);
    for (const KvFormat f : {format.keys, format.codes}) {
      const size_t floats = CodeTables::floats(f, layout_.dim);
      tables_.push_back(normals(random, floats * Model::kLayers * Model::kKv));
      if (f == kKvInt4)  // scales, then zero points, of what keys look like
        for (size_t i = 0; i < tables_.back().size(); ++i)
          tables_.back()[i] = i % floats < floats / 2 ? random.uniform(0.1f, 0.5f) : random.uniform(-4.f, -1.f);
      if (floats) code_tables_.of[f] = tables_.back().get();
    }
  }

  // Logits of all rows; `top` results are checked against them on the way.
  std::vector<Logits> run(const std::vector<Row>& rows, int threads, const std::vector<int64_t>& moves = {},
                          int gates_off = 0) {
    const int n = static_cast<int>(rows.size()), vocab = Model::kVocab;
    std::vector<int64_t> plan(size_t(6) * n), heads(n);
    for (int r = 0; r < n; ++r) {
      const Row& row = rows[r];
      const int64_t fields[] = {row.token, row.position, row.slot, row.visible, row.parent, row.place};
      for (int line = 0; line < 6; ++line) plan[size_t(line) * n + r] = fields[line];
      heads[r] = r;
    }
    bool gates[2 * Model::kLayers];
    for (int i = 0; i < 2 * Model::kLayers; ++i) gates[i] = !(gates_off >> i & 1);
    PassInputs in;
    in.plan = plan.data();
    in.rows = in.heads = n;
    in.head_rows = heads.data();
    in.gates = gates;
    in.gate_count = 2 * Model::kLayers;
    in.moves = moves.data();
    in.move_count = static_cast<int>(moves.size() / 3);
    in.kv = kv_->get();
    in.slots = slots_;
    in.kv_bytes = bytes_;
    in.layout = layout_;
    in.read_codes = format_.read_codes;
    in.tables = code_tables_;
    for (const auto& w : model_.weights) in.weights.push_back({w.get(), w.bytes()});
    Floats logits(size_t(n) * vocab);
    PassOutputs out;
    out.logits = logits.get();
    go(in, out, threads);

    // again, for the best of each row only: everything is written as it was
    constexpr int kTop = 3;
    Array<int64_t> ids(size_t(n) * kTop);
    Floats values(size_t(n) * kTop);
    in.top = kTop;
    in.move_count = 0;
    out = {nullptr, ids.get(), values.get()};
    go(in, out, threads);
    std::vector<Logits> result;
    for (int r = 0; r < n; ++r) {
      result.emplace_back(logits.get() + size_t(r) * vocab, logits.get() + size_t(r + 1) * vocab);
      const Logits& row = result.back();
      std::vector<int64_t> order(vocab);
      for (int i = 0; i < vocab; ++i) {
        order[i] = i;
        if (!std::isfinite(row[i])) fail("a logit is not finite: " + format_.name());
      }
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return row[a] > row[b]; });
      for (int i = 0; i < kTop; ++i)
        if (ids[size_t(r) * kTop + i] != order[i] || values[size_t(r) * kTop + i] != row[order[i]])
          fail("the best tokens of row " + std::to_string(r) + " of " + std::to_string(n) +
               " are not those of its logits");
    }
    return result;
  }

  void wipe() { std::memset(kv_->get(), 0, kv_->bytes()); }

 private:
  void go(const PassInputs& in, const PassOutputs& out, int threads) {
    Pass pass(model_.program, kernels(), in, out, scratch_);
    Team<Pass> team(pass);
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back([&] { team.join(); });
    team.join();
    for (std::thread& t : others) t.join();
  }

  const Model& model_;
  const Format format_;
  const int slots_;
  KvLayout layout_;
  size_t bytes_ = 0;
  std::unique_ptr<Array<uint8_t>> kv_;
  std::vector<Floats> tables_;
  CodeTables code_tables_;
  Scratch scratch_;
};

int64_t token_at(int64_t position) { return (position * 37 + position / 7 * 11 + 5) % Model::kVocab; }

// Rows `from` to `from + n` of the sequence: the first is told what it sees, the others follow their parents.
std::vector<Row> chain(int64_t from, int n, int64_t slot = 0, int first_row = 0) {
  std::vector<Row> rows;
  for (int i = 0; i < n; ++i)
    rows.push_back({token_at(from + i), from + i, slot, from, i ? first_row + i - 1 : -1, from + i});
  return rows;
}

void same(const Logits& a, const Logits& b, const std::string& what) {
  for (size_t i = 0; i < a.size(); ++i)
    if (std::memcmp(&a[i], &b[i], sizeof a[i]))
      fail(what + ": logit " + std::to_string(i) + " is " + std::to_string(b[i]) + ", expected " +
           std::to_string(a[i]));
}

// One row at a time, one thread: what everything is compared with.
std::vector<Logits> reference(Runner& runner, int tokens) {
  runner.wipe();
  std::vector<Logits> all;
  for (int i = 0; i < tokens; ++i) all.push_back(runner.run(chain(i, 1), 1)[0]);
  return all;
}

void pass_chunks(Runner& runner, const std::vector<Logits>& expected, int rows, int threads, const std::string& name) {
  runner.wipe();
  const int tokens = static_cast<int>(expected.size());
  for (int from = 0; from < tokens; from += rows) {
    const int n = std::min(rows, tokens - from);
    const auto logits = runner.run(chain(from, n), threads);
    for (int i = 0; i < n; ++i)
      same(expected[from + i], logits[i],
           name + ", " + std::to_string(rows) + " rows, " + std::to_string(threads) + " threads, token " +
               std::to_string(from + i));
  }
}

// Three slots in one pass, at different places of the sequence.
void pass_slots(Runner& runner, const std::vector<Logits>& expected, int threads, const std::string& name) {
  runner.wipe();
  const int last = static_cast<int>(expected.size());
  int at[3] = {0, 0, 0};
  for (int turn = 0; at[0] < last; ++turn) {
    std::vector<Row> rows;
    std::vector<int> positions;
    for (int slot = 0; slot < 3; ++slot) {
      const int n = std::min(last - at[slot], slot == 0 ? 13 : slot == 1 ? 5 : turn % 3 ? 1 : 0);
      const auto more = chain(at[slot], n, slot, static_cast<int>(rows.size()));
      rows.insert(rows.end(), more.begin(), more.end());
      for (int i = 0; i < n; ++i) positions.push_back(at[slot] + i);
      at[slot] += n;
    }
    const auto logits = runner.run(rows, threads);
    for (size_t r = 0; r < rows.size(); ++r)
      same(expected[positions[r]], logits[r],
           name + ", slot " + std::to_string(rows[r].slot) + " of several, token " + std::to_string(positions[r]));
  }
}

// A tree of proposals: with the rest of it in the pass or only its own ancestors, a row sees the same.  Then a branch
// is accepted by moving it to where it belongs, and the sequence goes on as if nothing had happened.
void pass_tree(Runner& runner, const std::vector<Logits>& expected, int threads, const std::string& name) {
  // the branch in question lies 16 places on, in the same lanes and the same 32 tokens: only so are sums equal bit for
  // bit
  constexpr int kStart = 40, kBranch = 3, kAway = 16;
  const auto begin = [&] {
    runner.wipe();
    runner.run(chain(0, kStart), threads);
  };
  std::vector<Row> tree;
  const auto grow = [&](int64_t token, int parent, int64_t place) {
    const int64_t position = parent < 0 ? kStart : tree[parent].position + 1;
    tree.push_back({token, position, 0, kStart, parent, place});
    return static_cast<int>(tree.size()) - 1;
  };
  int wrong = -1, right = -1;
  std::vector<int> branch;
  for (int i = 0; i < kBranch; ++i) {
    wrong = grow((token_at(kStart + i) + 1) % Model::kVocab, wrong, kStart + i);
    right = grow(token_at(kStart + i), right, kStart + kAway + i);
    branch.push_back(right);
  }
  for (int i = 0; i < 9; ++i) grow(7 * i + 1, i % 2 ? wrong : branch[i % kBranch], kStart + 24 + i);

  begin();
  const auto all = runner.run(tree, threads);
  for (int i = 0; i < kBranch; ++i)
    same(expected[kStart + i], all[branch[i]], name + ", branch of a tree, row " + std::to_string(i));
  for (size_t leaf = 0; leaf < tree.size(); ++leaf) {
    std::vector<Row> path;
    for (int64_t row = static_cast<int64_t>(leaf); row >= 0; row = tree[row].parent)
      path.insert(path.begin(), tree[row]);
    for (size_t i = 0; i < path.size(); ++i) path[i].parent = static_cast<int64_t>(i) - 1;
    begin();
    same(runner.run(path, 1).back(), all[leaf], name + ", node " + std::to_string(leaf) + " of a tree");
  }
  begin();
  runner.run(tree, threads);
  std::vector<int64_t> moves;
  for (int i = 0; i < kBranch; ++i) moves.insert(moves.end(), {0, kStart + kAway + i, kStart + i});
  constexpr int kNext = kStart + kBranch;
  const auto logits = runner.run(chain(kNext, 12), threads, moves);
  for (int i = 0; i < 12; ++i)
    same(expected[kNext + i], logits[i], name + ", after moves, token " + std::to_string(kNext + i));
}

void passes(bool brief) {
  const int tokens = brief ? 72 : 150;
  const Format formats[] = {
      {kKvF32, kKvNone, kKvF32, false, 0},      {kKvF16, kKvNone, kKvF16, false, 0},
      {kKvInt8, kKvNone, kKvInt8, false, 0},    {kKvInt8, kKvNone, kKvF16, false, 64},
      {kKvInt4, kKvNone, kKvInt8, false, 64},   {kKvInt4, kKvNone, kKvF16, false, 0},
      {kKvNomad1, kKvNone, kKvInt8, false, 64}, {kKvNomad2, kKvNone, kKvF16, false, 64},
      {kKvNomad2, kKvNone, kKvF32, false, 0},   {kKvF16, kKvNomad2, kKvF16, true, 64},
      {kKvF16, kKvNomad1, kKvInt8, true, 0},    {kKvF32, kKvInt4, kKvF32, true, 64},
      {kKvF16, kKvInt4, kKvF16, false, 0},
  };
  int tried = 0;
  const auto check = [&](const Model& model, const Format& format, const std::string& kind,
                         const std::vector<int>& sizes) {
    Runner runner(model, format, 3, 2 * tokens);
    const auto expected = reference(runner, tokens);
    const std::string name = kind + ", " + format.name();
    for (const int rows : sizes) pass_chunks(runner, expected, rows, 1 + tried++ % 4, name);
    for (const int threads : {1, 3}) pass_slots(runner, expected, threads, name);
    pass_tree(runner, expected, 2, name);
  };
  std::vector<int> every;
  for (int rows = 1; rows <= 40; ++rows) every.push_back(rows);
  const Model model("q4", 1);
  if (brief) {
    for (const int i : {0, 4, 9}) check(model, formats[i], "q4", {3, 40});
    return;
  }
  for (const Format& format : formats)
    check(model, format, "q4",
          format.ring && format.values == kKvInt8 ? every : std::vector<int>{2, 3, 15, 16, 17, 33, 40});
  for (const char* kind : {"q8", "c8"}) check(Model(kind, 2), formats[1], kind, {3, 16, 40});

  // long enough for several parts of a sequence that are merged
  Runner runner(model, formats[2], 1, 1700);
  const auto expected = [&] {
    std::vector<Logits> all;
    for (int from = 0; from < 1700; from += 20) {
      const auto more = runner.run(chain(from, 20), 1);
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }();
  pass_chunks(runner, expected, 40, 4, "long sequence");
  pass_chunks(runner, expected, 33, 2, "long sequence");
  for (int from = 1690; from < 1700; ++from)
    same(expected[from], runner.run(chain(from, 1), 3)[0], "long sequence, one row");

  // gates leave out what they should: the same for one row as for many
  Runner gated(model, formats[0], 1, 64);
  for (const int off : {1, 2, 12, 15}) {
    gated.wipe();
    const auto all = gated.run(chain(0, 20), 3, {}, off);
    gated.wipe();
    for (int i = 0; i < 20; ++i)
      same(all[i], gated.run(chain(i, 1), 1, {}, off)[0], "gates, token " + std::to_string(i));
  }
}

// ---- the program ---------------------------------------------------------------------------------------------------

bool supported(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx2" || isa == "avx512")
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
      return false;
  if (isa == "avx512")
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
#endif
  return !isa.empty();
}

const Kernels* find(const std::string& isa) {
  for (const Kernels* one : {scalar_kernels(), avx2_kernels(), avx512_kernels(), neon_kernels()})
    if (one && isa == one->name && supported(isa)) return one;
  return nullptr;
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "isas") {
    for (const char* isa : {"scalar", "avx2", "avx512", "neon"})
      if (find(isa)) std::printf("%s\n", isa);
    return 0;
  }
  if (what == "pass") {
    try {
      passes(argc > 2 && !std::strcmp(argv[2], "brief"));
    } catch (const std::exception& problem) {
      std::fprintf(stderr, "%s\n", problem.what());
      return 1;
    }
    std::printf("ok (%s)\n", kernels().name);
    return 0;
  }
  const Kernels* kernels = argc > 2 ? find(argv[2]) : nullptr;
  if (!kernels || (what != "hash" && what != "accuracy")) {
    std::fprintf(stderr, "selftest isas | hash ISA | accuracy ISA | pass [brief]\n");
    return 2;
  }
  if (what == "hash") {
    hash_linear(*kernels, Random(1));
    hash_rows(*kernels, Random(2));
    hash_attention(*kernels, Random(3));
    return 0;
  }
  Worst worst;
  accuracy_linear(*kernels, Random(4), worst);
  accuracy_functions(*kernels, Random(5), worst);
  accuracy_attention(*kernels, Random(6), worst);
  worst.print();
  return 0;
}

}  // namespace
}  // namespace edgespec

int main(int argc, char** argv) { return edgespec::main(argc, argv); }
