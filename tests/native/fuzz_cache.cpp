// Layouts of KV caches and what is written there, from any bytes: nothing is read or written outside, and a token that
// is moved is what it was.
//
//   fuzz_cache SEED COUNT FILE...    the files, then random bytes
#include "cache.h"
#include "fuzz.h"

namespace edgespec {
namespace {

constexpr size_t kMostCache = size_t(1) << 21;  // bytes: more shows nothing more

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
  const bool pool = bytes.below(2);
  if (size > kMostCache) return;
  const int64_t capacity = layout.layers ? layout.capacity(size) : 1000;
  if (layout.layers && capacity != int64_t(blocks) * kKvBlock) fail("another capacity");
  Array<uint8_t> memory(size);
  std::vector<Floats> kept;
  CodeTables tables;
  for (const KvFormat format : {layout.keys, layout.codes}) {
    kept.emplace_back(CodeTables::floats(format, layout.dim) * layout.layers * layout.heads);
    for (float& x : kept.back()) x = bytes.number();
    if (kept.back().size()) tables.of[format] = kept.back().get();
  }
  int32_t table[3] = {};
  for (size_t i = 0; i < blocks; ++i) table[i] = int32_t(blocks - 1 - i);
  uint8_t* const whole = memory.get() + layout.header_bytes();
  const Cache cache = pool ? Cache(memory.get(), whole, table, layout) : Cache(memory.get(), layout);
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
    if (std::memcmp(moved.get(), memory.get(), size)) fail("moved twice is not moved once");
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
  return edgespec::run_files(count, arguments, [](edgespec::Random& random) {
    std::string data(size_t(random.between(20, 3000)), ' ');
    for (char& byte : data) byte = static_cast<char>(random.next());
    return data;
  });
}
#endif
