#include "node.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace edgespec {

using namespace abi;

namespace {

constexpr size_t kMemoryInputs = 2;
constexpr int kControls = 8;
constexpr int64_t kTops = 2048;            // of the first control: top is below, columns are above
constexpr int64_t kMostNumbers = 1 << 30;  // of an input that is counted by int
constexpr int64_t kMostRecent = 1 << 24;   // of the controls of exact recent keys, in tokens

KvFormat format(int64_t number) {
  if (number < 0 || number > kKvNone) throw std::invalid_argument("edgespec: unknown KV format");
  return static_cast<KvFormat>(number);
}

void read_controls(const View& control, const Program& program, PassInputs& in) {
  if (control.count() != kControls) throw std::invalid_argument("edgespec: expected 8 controls");
  const auto* c = static_cast<const int64_t*>(control.data);
  if (c[0] < 0 || c[0] % kTops > 1024) throw std::invalid_argument("edgespec: expected top within 0 to 1024");
  if (c[0] / kTops > kMostNumbers) throw std::invalid_argument("edgespec: an LM head of too many columns");
  in.top = static_cast<int>(c[0] % kTops);
  in.columns = static_cast<int>(c[0] / kTops);
  KvLayout& layout = in.layout;
  layout.keys = format(c[1]);
  layout.values = format(c[2]);
  layout.codes = format(c[3]);
  if (c[4] < 0 || c[4] / 2 > kMostRecent) throw std::invalid_argument("edgespec: a table of too many blocks");
  in.read_codes = c[4] % 2 != 0;
  layout.table = static_cast<int>(c[4] / 2);
  for (const int i : {5, 6, 7})
    if (c[i] < 0 || c[i] > kMostRecent)
      throw std::invalid_argument(
          "edgespec: a control is out of range: expected a ring of whole tiles, not smaller than its window, and at "
          "most 16 sinks");
  layout.window = static_cast<int>(c[5]);
  layout.sinks = static_cast<int>(c[6]);
  layout.ring = static_cast<int>(c[7]);
  program.describe(layout);
  if (layout.values > kKvInt8 || layout.keys == kKvNone || (in.read_codes && layout.codes == kKvNone))
    throw std::invalid_argument("edgespec: KV formats that do not fit together");
  if (!layout.dims.empty() && (layout.ring || layout.codes != kKvNone || layout.keys > kKvInt8))
    throw std::invalid_argument("edgespec: layers with heads of different sizes keep neither codes nor recent keys");
  if (layout.ring < 0 || layout.ring % kTile || layout.sinks < 0 || layout.sinks > kSinkRows || layout.window < 0 ||
      (layout.ring && layout.ring < layout.window))
    throw std::invalid_argument(
        "edgespec: expected a ring of whole tiles, not smaller than its window, and at most 16 sinks");
}

void read_tables(const View& tables, PassInputs& in) {
  const KvLayout& layout = in.layout;
  size_t used = 0;
  for (const KvFormat f : {layout.keys, layout.codes}) {
    const size_t floats = CodeTables::floats(f, layout.dim) * layout.layers * layout.heads;
    if (floats) in.tables.of[f] = static_cast<const float*>(tables.data) + used;
    used += floats;
  }
  if (used != static_cast<size_t>(tables.count()))
    throw std::invalid_argument("edgespec: the tables do not fit the formats of the keys");
}

void read_memories(const View& memory, const View& sources, PassInputs& in) {
  if (memory.type != kUint8 || memory.dims.size() != 2 || memory.dims[0] > kMostNumbers ||
      reinterpret_cast<uintptr_t>(memory.data) & 7 || (memory.dims[0] > 1 && memory.dims[1] & 7))
    throw std::invalid_argument("edgespec: expected memories uint8 [M, bytes] aligned to 8 bytes");
  if (sources.type != kInt64 || sources.dims != std::vector<int64_t>{2, in.rows})
    throw std::invalid_argument("edgespec: expected sources int64 [2, T]");
  in.memory = static_cast<uint8_t*>(memory.data);
  in.memories = static_cast<int>(memory.dims[0]);
  in.memory_bytes = static_cast<size_t>(memory.dims[1]);
  in.sources = static_cast<const int64_t*>(sources.data);
}

// Embeddings for rows with tokens below 0, and positions for their rotation: the inputs from `next` on.
void read_inserted(const Program& program, const View* next, PassInputs& in) {
  if (program.inserted) {
    const View& rows = *next++;
    if (rows.type != kFloat || rows.dims.size() != 2 || rows.dims[1] != program.inserted)
      throw std::invalid_argument("edgespec: expected inserted rows float [I, " + std::to_string(program.inserted) +
                                  "]");
    in.inserted = static_cast<const float*>(rows.data);
    in.inserted_rows = rows.dims[0];
  }
  if (program.axes) {
    const View& axes = *next;
    if (axes.type != kInt64 || axes.dims != std::vector<int64_t>{3, in.rows})
      throw std::invalid_argument("edgespec: expected axes int64 [3, T]");
    in.axes = static_cast<const int64_t*>(axes.data);
  }
}

}  // namespace

size_t node_inputs(const Program& program) {
  return kFixedInputs + (program.memory.count ? kMemoryInputs : 0) + (program.inserted ? 1 : 0) +
         (program.axes ? 1 : 0);
}

NodePass read_node(const Program& program, const std::vector<View>& given) {
  const View &plan = given[0], &rows = given[1], &gates = given[2], &moves = given[3], &kv = given[4],
             &control = given[5], &tables = given[6], &hidden = given[7];
  NodePass pass;
  PassInputs& in = pass.in;
  if (plan.dims.size() != 2 || plan.dims[0] != 6) throw std::invalid_argument("edgespec: expected a plan [6, T]");
  for (const View* v : {&plan, &rows, &gates, &moves})
    if (v->count() > kMostNumbers) throw std::invalid_argument("edgespec: a pass of too many rows");
  if (moves.count() % 3) throw std::invalid_argument("edgespec: expected moves [M, 3]");
  if (hidden.dims.size() != 2) throw std::invalid_argument("edgespec: expected hidden states [T, D]");
  if (kv.dims.size() != 2 || kv.dims[0] > kMostNumbers)
    throw std::invalid_argument("edgespec: expected a cache [S, bytes]");
  if (reinterpret_cast<uintptr_t>(kv.data) & 7 || (kv.dims[0] > 1 && kv.dims[1] & 7))
    throw std::invalid_argument("edgespec: expected caches aligned to 8 bytes");
  in.plan = static_cast<const int64_t*>(plan.data);
  in.rows = static_cast<int>(plan.dims[1]);
  in.head_rows = static_cast<const int64_t*>(rows.data);
  in.heads = static_cast<int>(rows.count());
  in.hidden = static_cast<const float*>(hidden.data);
  in.hidden_rows = hidden.dims[0];
  in.hidden_width = hidden.dims[1];
  in.gate_count = static_cast<int>(gates.count());
  pass.gates = std::make_unique<bool[]>(static_cast<size_t>(in.gate_count) + 1);
  std::transform(static_cast<const uint8_t*>(gates.data), static_cast<const uint8_t*>(gates.data) + in.gate_count,
                 pass.gates.get(), [](uint8_t byte) { return byte != 0; });  // any byte may be there: a bool is 0 or 1
  in.gates = pass.gates.get();
  in.moves = static_cast<const int64_t*>(moves.data);
  in.move_count = static_cast<int>(moves.count() / 3);
  in.kv = static_cast<uint8_t*>(kv.data);
  in.slots = static_cast<int>(kv.dims[0]);
  in.kv_bytes = static_cast<size_t>(kv.dims[1]);
  read_controls(control, program, in);
  in.memory_layout = program.memory_layout(in.layout);
  const View* next = given.data() + kFixedInputs;
  if (program.memory.count) {
    read_memories(next[0], next[1], in);
    next += kMemoryInputs;
  }
  read_inserted(program, next, in);
  read_tables(tables, in);
  return pass;
}

NodeShapes node_shapes(const Program& program, const PassInputs& in) {
  const Active active = program.active(in.gates, in.gate_count);
  const int64_t heads = int64_t(in.heads) * active.logits, top = in.top;
  return {{top ? 0 : heads, in.columns ? std::min(in.columns, active.columns) : active.columns},
          {heads, top},
          {active.hidden ? in.rows : 0, active.hidden ? active.hidden : program.hidden}};
}

}  // namespace edgespec
