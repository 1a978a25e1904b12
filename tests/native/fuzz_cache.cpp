// Layouts of KV caches and what is written there, from any bytes: nothing is read or written outside, and a token that
// is moved is what it was.  With libFuzzer (clang++ -fsanitize=fuzzer) it is driven by that; else by random bytes:
//
//   fuzz_cache SEED COUNT
#include <cmath>
#include <iostream>
#include <limits>

#include "cache.h"
#include "selftest.h"

namespace edgespec {
namespace {

constexpr size_t kMostBytes = size_t(1) << 21;  // of a cache: more shows nothing more

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), end_(data + size) {}
  bool left() const { return data_ < end_; }
  int below(int n) { return (next() << 8 | next()) % n; }
  float number() {
    constexpr float kOdd[] = {0.f, -0.f, 1e-40f, 1e38f, -3e38f, std::numeric_limits<float>::infinity(), std::nanf("")};
    const int chosen = next();
    return chosen < 7 ? kOdd[chosen] : (chosen - 128) / 16.f;
  }

 private:
  int next() { return left() ? *data_++ : 0; }
  const uint8_t *data_, *end_;
};

KvLayout read_layout(Bytes& bytes) {  // as ops.cpp takes it from a node's controls and program
  KvLayout layout;
  layout.keys = static_cast<KvFormat>(bytes.below(kKvNone));
  layout.codes = static_cast<KvFormat>(bytes.below(kKvNone + 1));
  layout.values = static_cast<KvFormat>(bytes.below(kKvInt8 + 1));
  layout.layers = bytes.below(4);
  layout.heads = 1 + bytes.below(3);
  layout.dim = kTile * (1 + bytes.below(kMaxHeadDim / kTile));
  if (layout.keys <= kKvInt8 && layout.codes == kKvNone)  // these may differ by layer, without recent keys
    for (int layer = bytes.below(2) ? 0 : layout.layers; layer < layout.layers; ++layer)
      layout.dims.push_back(kTile * (1 + bytes.below(layout.dim / kTile)));
  if (layout.dims.empty()) layout.ring = kTile * bytes.below(20);
  layout.window = bytes.below(layout.ring + 1);
  layout.sinks = bytes.below(kSinkRows + 1);
  layout.states = bytes.below(3);
  layout.state_width = 1 + bytes.below(40);
  return layout;
}

void use(Bytes bytes) {
  const KvLayout layout = read_layout(bytes);
  if (!layout.layers && !layout.states) return;
  const size_t blocks = layout.layers ? 1 + size_t(bytes.below(3)) : 0;
  const size_t size = layout.header_bytes() + blocks * layout.block_bytes();
  if (size > kMostBytes) return;
  const int64_t capacity = layout.layers ? layout.capacity(size) : 1000;
  if (layout.layers && capacity != int64_t(blocks) * kKvBlock) throw std::logic_error("another capacity");
  Array<uint8_t> memory(size);
  std::vector<Floats> kept;
  CodeTables tables;
  for (const KvFormat format : {layout.keys, layout.codes}) {
    kept.emplace_back(CodeTables::floats(format, layout.dim) * layout.layers * layout.heads);
    for (float& x : kept.back()) x = bytes.number();
    if (kept.back().size()) tables.of[format] = kept.back().get();
  }
  const Cache cache(memory.get(), layout);
  Floats key(size_t(layout.dim)), value(size_t(layout.dim));
  while (bytes.left()) {
    const int64_t from = bytes.below(int(capacity)), to = bytes.below(int(capacity));
    for (float& x : key) x = bytes.number();
    for (float& x : value) x = bytes.number();
    for (int layer = 0; layer < layout.layers; ++layer)
      for (int head = 0; head < layout.heads; ++head)
        cache.append(kernels(), tables, layer, head, from, key.get(), value.get());
    for (int layer = 0; layer < layout.states; ++layer)
      for (int i = 0; i < layout.state_width; ++i) cache.state(layer, from)[i] = bytes.number();
    cache.move(from, to);
    const Array<uint8_t> moved(size);
    std::memcpy(moved.get(), memory.get(), size);
    cache.move(from, to);
    if (std::memcmp(moved.get(), memory.get(), size)) throw std::logic_error("moved twice is not moved once");
  }
}

}  // namespace
}  // namespace edgespec

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  edgespec::use(edgespec::Bytes(data, size));
  return 0;
}

#ifndef EDGESPEC_LIBFUZZER
int main(int count, char** arguments) {
  if (count != 3) return 2;
  edgespec::Random random(std::strtoull(arguments[1], nullptr, 10));
  const long most = std::atol(arguments[2]);
  for (long i = 0; i < most; ++i) {
    std::vector<uint8_t> data(size_t(random.between(20, 3000)));
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(random.next());
    LLVMFuzzerTestOneInput(data.data(), data.size());
  }
  std::cout << "ok " << most << "\n";
}
#endif
