#include "adapters.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "guarded.h"
#include "half.h"
#include "visible.h"

namespace edgespec {
namespace {

const std::string kPacked = ".packed";

// Bits of a number of 16 bits that holds this one exactly, or nearest to it.
uint16_t short_bits(Kind kind, float value) {
  if (kind == kF16) return float_to_half(value);
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

// Packs rows [n, k], from at(row, column), to zeroed tiles [k][16] of a kind of floats.
template <class At>
void pack(Kind kind, int n, int k, uint8_t* out, At at) {
  for (int row = 0; row < n; ++row)
    for (int column = 0; column < k; ++column) {
      const size_t place = (size_t(row / kTile) * k + column) * kTile + row % kTile;
      const float value = at(row, column);
      if (kind == kF32) {
        std::memcpy(out + place * 4, &value, 4);
      } else {
        const uint16_t bits = short_bits(kind, value);
        std::memcpy(out + place * 2, &bits, 2);
      }
    }
}

// Which of the names joined by + this one is, and how many there are; -1: none of them.
std::pair<int, int> part_of(const std::string& joined, const std::string& name) {
  int found = -1, parts = 0;
  for (size_t begin = 0; begin <= joined.size(); ++parts) {
    const size_t end = std::min(joined.find('+', begin), joined.size());
    if (joined.compare(begin, end - begin, name) == 0) found = parts;
    begin = end + 1;
  }
  return {found, parts};
}

}  // namespace

AdapterStore::AdapterStore(const std::string& graph) : model_(read_model(graph)), text_(model_.program) {
  program_ = Program::parse(text_);
}

int AdapterStore::open() {
  if (count() >= kMaxAdapters) refuse("too many adapters: expected at most " + std::to_string(kMaxAdapters));
  adapters_.emplace_back();
  return count();
}

AdapterStore::Use AdapterStore::find_use(const std::string& matrix) const {
  Use use;
  for (size_t i = 0; i < model_.names.size() && use.weight < 0; ++i) {
    const std::string& name = model_.names[i];
    if (name.size() <= kPacked.size() || name.compare(name.size() - kPacked.size(), kPacked.size(), kPacked)) continue;
    const auto [part, parts] = part_of(name.substr(0, name.size() - kPacked.size()), matrix);
    if (part >= 0) use.weight = static_cast<int>(i), use.part = part, use.parts = parts;
  }
  if (use.weight < 0) return use;
  std::map<int, int> orders;  // of buffers of activations
  for (const Step& s : program_.steps) {
    if (s.op == Op::kQuantize || s.op == Op::kGlu) orders[s.out] = s.op == Op::kQuantize ? s.order : -1;
    const bool multiplies = (s.op == Op::kLinear && !s.rows && s.w == use.weight) ||
                            (s.op == Op::kHeads && s.qx < 0 && s.w == use.weight) ||
                            (s.op == Op::kGlu && (s.gate == use.weight || s.up == use.weight));
    if (!multiplies || use.step) continue;
    use.step = &s;
    const auto order = orders.find(s.act);
    if (order != orders.end() && order->second >= 0) {
      const Tensor& tensor = model_.weights[static_cast<size_t>(order->second)];
      if (tensor.bytes >= size_t(s.k) * 4) use.order = static_cast<const float*>(tensor.data);
    }
  }
  return use;
}

void AdapterStore::add(const std::string& matrix, int rank, int k, int n, const float* a, const float* b, float scale,
                       Kind kind) {
  const auto size = [](int rows, int columns) {
    return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
  };
  if (adapters_.empty() || rank < 1 || rank > kMaxRank || !std::isfinite(scale) ||
      (kind != kF32 && kind != kF16 && kind != kBF16))
    refuse("an adapter of rank " + std::to_string(rank) + ": expected 1 to " + std::to_string(kMaxRank));
  const Use use = find_use(matrix);
  if (!use.step) refuse(matrix + ": this model has no such matrix that rows can be added to");
  const Step& s = *use.step;
  const bool heads = s.op == Op::kHeads;
  if (!heads && use.parts > 1)
    refuse(matrix + ": is stored as one with other matrices, and rows cannot be added to it");
  // rows of the part, and the first of them in the packed matrix
  int expected = s.n, first = 0;
  if (heads) {
    const int queries = s.fills() ? 0 : s.heads;
    const int before = !queries ? use.part * s.kv : use.part ? queries + (use.part - 1) * s.kv : 0;
    expected = (use.part == 0 && queries ? queries : s.kv) * s.dim;
    first = before * round_up(s.dim, kTile);
  }
  if (k != s.k || n != expected)
    refuse(matrix + ": an adapter for " + size(n, k) + ", and this model's is " + size(expected, s.k));
  // a head is stored from a whole tile on
  const int dim = heads ? s.dim : n, tiled = round_up(dim, kTile), rows = n / dim * tiled;
  LowRank added;
  added.first = first / kTile;
  added.tiles = rows / kTile;
  added.rank = rank;
  added.kind = kind;
  added.scale = scale;
  // to whole cache lines, and what a vector reads beyond the last tile
  const size_t down = (packed_bytes(kind, rank, k) + 127) / 64 * 64, up = packed_bytes(kind, rows, rank) + 64;
  added.memory = std::make_unique<Memory>();
  auto* out = static_cast<uint8_t*>(added.memory->get(down + up));
  std::memset(out, 0, down + up);
  added.a = out;
  added.b = out + down;
  pack(kind, rank, k, out, [&](int row, int column) {
    const float from = use.order ? use.order[column] : 0;
    if (!(from >= 0 && from < static_cast<float>(k))) return 0.f;
    return a[size_t(row) * k + (use.order ? static_cast<size_t>(from) : size_t(column))];
  });
  pack(kind, rows, rank, out + down, [&](int row, int column) {
    const int inside = row % tiled;
    return inside < dim ? b[(size_t(row / tiled) * dim + inside) * rank + column] : 0.f;
  });
  bytes_ += down + up;
  adapters_.back()[use.weight].push_back(std::move(added));
}

// ---- for sessions of ONNX Runtime ----------------------------------------------------------------------------------

namespace {
thread_local std::shared_ptr<AdapterStore> pending;
}

std::shared_ptr<AdapterStore> take_pending_adapters(const std::string& program) {
  if (!pending || pending->program() != program) return nullptr;
  return std::move(pending);
}

}  // namespace edgespec

using edgespec::AdapterStore;
using edgespec::answered;
using Handle = std::shared_ptr<AdapterStore>;

EDGESPEC_EXPORT void* edgespec_adapters_open(const char* graph) {
  Handle* made = nullptr;
  edgespec::guarded([&] { made = new Handle(std::make_shared<AdapterStore>(graph)); });
  return made;
}
EDGESPEC_EXPORT void edgespec_adapters_close(void* store) { delete static_cast<Handle*>(store); }
// Gives the adapters to the next session that this thread opens; null takes them back.  Returns whether they were left.
EDGESPEC_EXPORT int edgespec_adapters_use(void* store) {
  const bool left = edgespec::pending != nullptr;
  edgespec::pending = store ? *static_cast<Handle*>(store) : nullptr;
  if (store) edgespec::pending->seal();
  return left;
}
// Begins the next adapter -> its number, or below 0.
EDGESPEC_EXPORT int64_t edgespec_adapters_begin(void* store) {
  return answered([&] { return int64_t((*static_cast<Handle*>(store))->open()); });
}
// Adds to a matrix; bits: of a number, 32, 16 (float16) or 15 (bfloat16) -> 0, or below 0: it was refused.
EDGESPEC_EXPORT int64_t edgespec_adapters_add(void* store, const char* matrix, int64_t rank, int64_t k, int64_t n,
                                              const float* a, const float* b, double scale, int64_t bits) {
  return answered([&] {
    const edgespec::Kind kind = bits == 32 ? edgespec::kF32 : bits == 16 ? edgespec::kF16 : edgespec::kBF16;
    (*static_cast<Handle*>(store))
        ->add(matrix, static_cast<int>(rank), static_cast<int>(k), static_cast<int>(n), a, b, static_cast<float>(scale),
              kind);
    return int64_t(0);
  });
}
EDGESPEC_EXPORT int64_t edgespec_adapters_bytes(void* store) {
  return static_cast<int64_t>((*static_cast<Handle*>(store))->bytes());
}
