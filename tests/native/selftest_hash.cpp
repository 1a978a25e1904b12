// Hashes of what each kernel computes.
#include "selftest.h"

extern "C" int edgespec_pack(const char* kind, int k, const uint8_t* const* rows, int64_t tiles, uint8_t* out,
                             uint8_t* low);  // pack.cpp
extern "C" int edgespec_unpack(const char* kind, int k, const uint8_t* packed, const uint8_t* low, int64_t first,
                               int64_t count, float* y);

namespace edgespec {
namespace {

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
    for (const int least : {5, 31, 32, 64, 97, 130, 192, 896}) {
      const int k = whole(static_cast<Kind>(kind), least);
      for (const Make make : {Make::kOrdinary, Make::kSmallest, Make::kLargest}) {
        const auto tile = make_tile(random, static_cast<Kind>(kind), k, make);
        for (int rows = 1; rows <= kRowGroup; ++rows) {
          const Floats floats = normals(random, size_t(rows) * k);
          const auto acts = make_acts(random, k, rows, make);
          const void* act = takes_floats(static_cast<Kind>(kind)) ? static_cast<const void*>(floats.get()) : acts.get();
          for (const int columns : {16, 15, 8, 3}) {
            const size_t ld = 21;  // gaps between the rows must not change
            Floats y(rows * ld);
            std::fill(y.begin(), y.end(), 7.f);
            kernels.linear[kind](tile.get(), k, act, rows, y.get(), ld, columns);
            hash.add(y);
          }
        }
      }
      hash.print(std::string("linear_") + kKinds[kind].name + "/k=" + std::to_string(k));
    }
}

// Two planes give the same bits as bytes; only the high one, those of a packed kQ4, times 16.
void hash_planes(const Kernels& kernels, Random random) {
  Hash hash;
  for (const int k : {5, 32, 64, 97, 130, 192, 896}) {
    for (const Make make : {Make::kOrdinary, Make::kSmallest, Make::kLargest}) {
      const auto high = make_tile(random, kP8, k, make), low = make_low(random, k, make);
      const auto tile = joined(high, low, k);
      for (int rows = 1; rows <= kRowGroup; ++rows) {
        const auto acts = make_acts(random, k, rows, make);
        for (const int columns : {16, 3}) {
          const size_t ld = 21;
          Floats both(rows * ld), expected(rows * ld), alone(rows * ld), nibbles(rows * ld);
          for (Floats* y : {&both, &expected, &alone, &nibbles}) std::fill(y->begin(), y->end(), 7.f);
          kernels.linear[kP8]({high.get(), low.get()}, k, acts.get(), rows, both.get(), ld, columns);
          kernels.linear[kQ8](tile.get(), k, acts.get(), rows, expected.get(), ld, columns);
          kernels.linear[kP8](high.get(), k, acts.get(), rows, alone.get(), ld, columns);
          kernels.linear[kQ4](high.get(), k, acts.get(), rows, nibbles.get(), ld, columns);
          for (int r = 0; r < rows; ++r)
            for (int c = 0; c < columns; ++c) nibbles[r * ld + c] *= 16;
          if (std::memcmp(both.get(), expected.get(), both.bytes()) ||
              std::memcmp(alone.get(), nibbles.get(), alone.bytes()))
            throw std::runtime_error(std::string(kernels.name) + ": planes differ from their bytes, k " +
                                     std::to_string(k) + ", rows " + std::to_string(rows));
          hash.add(both);
          hash.add(alone);
        }
      }
      Floats y(k), z(k);
      for (const int row : {0, 7, 15}) {
        kernels.embed(kP8, {high.get(), low.get()}, k, row, y.get());
        kernels.embed(kQ8, tile.get(), k, row, z.get());
        if (std::memcmp(y.get(), z.get(), y.bytes()))
          throw std::runtime_error(std::string(kernels.name) + ": rows of planes differ from those of their bytes");
        hash.add(y);
      }
    }
    hash.print("planes/k=" + std::to_string(k));
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
      constexpr int kStride = 3;
      Array<Act> acts(size_t(blocks_of(k)) * kStride);
      kernels.quantize(x.get(), k, i % 2 ? kC8 : kQ4, acts.get(), kStride);
      hash.add(acts);
      if (k >= kBlock * 2) {
        Act blocks[2];
        kernels.quantize_blocks(x.get(), 2, blocks);
        hash.add(blocks, 2 * sizeof(Act));
      }
    }
    hash.print("quantize/k=" + std::to_string(k));
  }
  for (const int n : {16, 32, 96}) {
    for (const float scale : {1.f, 30.f, 1e4f}) {
      const Floats gate = normals(random, n, scale), up = normals(random, n);
      Floats y(n);
      kernels.glu[kSilu](gate.get(), up.get(), n, y.get());
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
    for (const int least : {20, 64, 100}) {
      const int k = whole(static_cast<Kind>(kind), least);
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
      hash.print(std::string("embed_") + kKinds[kind].name + "/k=" + std::to_string(k));
    }
}

void hash_functions(const Kernels& kernels, Random random) {
  Hash hash;
  for (int fn = kGelu; fn < kFns; ++fn) {
    for (const float scale : {1e-20f, 1.f, 8.f, 200.f, 1e37f}) {
      const Floats gate = normals(random, 192, scale), up = normals(random, 192);
      Floats y(192);
      gate[0] = 0.f;
      gate[1] = -0.f;
      kernels.glu[fn](gate.get(), up.get(), 192, y.get());
      hash.add(y);
    }
    hash.print(kFnNames[fn]);
  }
  constexpr float kNumbers[] = {0.7f, 1.1f, 0.5f};
  for (const float scale : {1e-20f, 1e-3f, 1.f, 40.f, 1e17f}) {
    Floats x = normals(random, 192, scale);
    kernels.xielu(x.get(), 192, kNumbers);
    hash.add(x);
  }
  hash.print("xielu");
  for (const float cap : {0.5f, 30.f, 50.f}) {
    for (const float scale : {1e-20f, 1e-3f, 1.f, 40.f, 1e37f}) {
      Floats x = normals(random, 192, scale);
      x[0] = -HUGE_VALF;
      kernels.softcap(x.get(), 192, cap);
      hash.add(x);
    }
    hash.print("softcap/" + std::to_string(cap));
  }
  for (const int k : {1, 7, 16, 24, 33, 64, 100, 900}) {
    for (const float mean : {0.f, 100.f}) {
      Floats x = normals(random, k), y(k + 3);
      for (float& v : x) v += mean;
      std::fill(y.begin(), y.end(), 7.f);  // numbers beyond the row must not change
      kernels.center(x.get(), k, y.get());
      hash.add(y);
    }
    hash.print("center/k=" + std::to_string(k));
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
    for (int queries = 1; queries <= kMaxQueries; ++queries) {
      const size_t ld = size_t(n) + 16;
      Floats s = normals(random, queries * ld, queries % 2 ? 3.f : 40.f), largest(queries), sum(queries);
      for (float& v : s)
        if (random.below(4) == 0) v = -3e38f;
      kernels.largest(s.get(), ld, n, queries, largest.get());
      kernels.exponentials(s.get(), ld, n, queries, largest.get(), sum.get());
      hash.add(largest);
      hash.add(sum);
      hash.add(s);
    }
    hash.print("largest,exponentials/n=" + std::to_string(n));
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
  for (int i = 0; i < 64; ++i) {
    Floats s = normals(random, kTile);
    float largest = 0;
    kernels.largest(s.get(), 0, kTile, 1, &largest);
    if (i % 4 == 3) s[i / 4] = std::nanf("");
    for (const float limit : {largest, std::nextafter(largest, -9.f), 9.f, -HUGE_VALF})
      hash.add(int64_t(kernels.exceeds(s.get(), limit)));
  }
  hash.print("exceeds");
}

void hash_delta(const Kernels& kernels, Random random) {
  for (const int dim : {16, 64, 128}) {
    Hash hash;
    const Floats from = normals(random, size_t(dim) * kTile), q = normals(random, dim), k = normals(random, dim, 0.1f),
                 v = normals(random, kTile), w = normals(random, size_t(3) * dim);
    Floats to(size_t(dim) * kTile), out(kTile), mixed(dim);
    kernels.delta(from.get(), to.get(), dim, q.get(), k.get(), v.get(), 0.9f, 0.3f, out.get());
    hash.add(to);
    hash.add(out);
    kernels.space(from.get(), to.get(), dim, q.get(), k.get(), v.get(), 0.9f, 0.3f, 0.7f, out.get());
    hash.add(to);
    hash.add(out);
    const float* rows[] = {nullptr, q.get(), k.get()};
    for (const bool biased : {false, true}) {
      kernels.convolve(rows, w.get(), biased ? q.get() : nullptr, 3, dim, mixed.get());
      hash.add(mixed);
    }
    hash.print("delta,convolve/dim=" + std::to_string(dim));
  }
  for (const int n : {3, 16, 20}) {
    Hash hash;
    const Floats a = normals(random, n, 5.f), b = normals(random, n, 5.f), bias = normals(random, n);
    Floats rate = normals(random, n), decay(n), beta(n);
    for (float& one : rate) one = std::fabs(one);
    kernels.decays(a.get(), b.get(), bias.get(), rate.get(), n, decay.get(), beta.get());
    hash.add(decay);
    hash.add(beta);
    hash.print("decays/n=" + std::to_string(n));
  }
}

// Rows as files have them, packed: the memory of each ends where it does, and so does that of what it becomes.
void hash_packing(Random random) {
  const std::map<Kind, std::pair<int, int>> files = {
      // numbers and bytes of a block, by ggml-common.h
      {kQ4, {32, 18}},     {kP8, {32, 34}},      {kQ8, {32, 34}},       {kQ4_1, {32, 20}},     {kQ5_0, {32, 22}},
      {kQ5_1, {32, 24}},   {kQ2_K, {256, 84}},   {kQ3_K, {256, 110}},   {kQ4_K, {256, 144}},   {kQ5_K, {256, 176}},
      {kQ6_K, {256, 210}}, {kIQ4_NL, {32, 18}},  {kIQ4_XS, {256, 136}}, {kMXFP4, {32, 17}},    {kU4X32, {32, 19}},
      {kU4X64, {64, 35}},  {kU4X128, {128, 67}}, {kU8X32, {32, 35}},    {kU8X128, {128, 131}}, {kF16, {1, 2}},
      {kBF16, {1, 2}},
  };
  for (const auto& [kind, size] : files) {
    Hash hash;
    for (const int blocks : {1, 3, 8}) {
      const int k = blocks * size.first;
      std::vector<Array<uint8_t>> rows;
      std::vector<const uint8_t*> places;
      for (int row = 0; row < 2 * kTile; ++row) {
        rows.emplace_back(size_t(blocks) * size.second);
        for (uint8_t& byte : rows.back()) byte = static_cast<uint8_t>(random.next());
        places.push_back(row % 7 == 6 ? nullptr : rows.back().get());
      }
      Array<uint8_t> packed(2 * tile_bytes(kind, k)), low(kind == kP8 ? 2 * low_bytes(k) : 0);
      uint8_t* const own = kind == kP8 ? low.get() : nullptr;
      Floats y(size_t(k) * 20);
      const char* const name = kKinds[kind].name;
      if (edgespec_pack(name, k, places.data(), 2, packed.get(), own) ||
          edgespec_unpack(name, k, packed.get(), own, 12, 20, y.get()))
        throw std::runtime_error(std::string("rows are not packed: ") + name);
      if (size.first > 1 && !edgespec_pack(name, k + 1, places.data(), 2, packed.get(), own))
        throw std::runtime_error(std::string("part of a block is packed: ") + name);
      hash.add(packed);
      hash.add(low);
    }
    hash.print(std::string("pack_") + kKinds[kind].name);
  }
}

}  // namespace

void print_hashes(const Kernels& kernels) {
  hash_linear(kernels, Random(1));
  hash_planes(kernels, Random(9));
  hash_rows(kernels, Random(2));
  hash_attention(kernels, Random(3));
  hash_functions(kernels, Random(7));
  hash_delta(kernels, Random(10));
  hash_packing(Random(11));
}

}  // namespace edgespec
