// The custom operators of domain "edgespec" and their registration with ONNX Runtime.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "pass.h"
#include "team.h"
#include "values.h"
#include "visible.h"

namespace edgespec {
namespace {

using namespace abi;

constexpr int kMembers = 64;     // threads of the pool that may take part in a pass
constexpr int kFixedInputs = 8;  // before those of memories and the weights
constexpr int kMemoryInputs = 2;
constexpr int kControls = 8;
constexpr int64_t kTops = 2048;            // of the first control: top is below, columns are above
constexpr int64_t kMostNumbers = 1 << 30;  // of an input that is counted by int
constexpr int64_t kMostRecent = 1 << 24;   // of the controls of exact recent keys, in tokens

// ---- Decoder -------------------------------------------------------------------------------------------------------
//
// inputs: plan int64 [6, T] (token, position, slot, visible, parent, place), rows int64 [R], gates bool [G],
//   moves int64 [M, 3], kv uint8 [S, bytes] (updated in place), control int64 [8] (top + 2048 x columns of the LM heads
//   that are computed, the first ones, 0 = all; keys, values, codes, read codes + 2 x blocks of each slot's table,
//   window, sinks, ring), tables float [..] (what the keys' format, then the codes' format was learnt with; cache.h),
//   hidden_in float [T, D] (looked at only where the gates let it be loaded), then, of a program that reads memories,
//   memory uint8 [M, bytes] (keys and values of cross-attention, filled by passes of their own) and sources int64 [2,
//   T] (the memory of each row, and how many rows of it are seen or, as it is filled, which one this is), of one that
//   inserts rows, inserted float [I, D'], of one whose rows have three positions, axes int64 [3, T], then the weights.
// outputs: logits float [L, columns] (no rows if top > 0), ids int64 [L, top], values float [L, top], where L is R
//   times the rows that the LM heads switched on give for each; hidden float [T, W] (no rows if not asked for by the
//   gates; W: columns of the stores that they leave on).
struct Decoder {
  Program program;
  int memory_inputs() const { return kFixedInputs + (program.memory.count ? kMemoryInputs : 0); }
  int inputs() const { return memory_inputs() + (program.inserted ? 1 : 0) + (program.axes ? 1 : 0); }  // and weights
  bool constant = false;  // the weights are initializers: where they lie need be asked only once
  std::atomic<bool> asked{false};
  std::vector<Tensor> weights;
  std::mutex mutex;
  std::vector<std::unique_ptr<Scratch>> idle;

  std::unique_ptr<Scratch> take() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (idle.empty()) return std::make_unique<Scratch>();
    auto scratch = std::move(idle.back());
    idle.pop_back();
    return scratch;
  }
  void give_back(std::unique_ptr<Scratch> scratch) {  // where there is no room for it, it is freed
    const std::lock_guard<std::mutex> lock(mutex);
    try {
      idle.push_back(std::move(scratch));
    } catch (const std::bad_alloc&) {}
  }
};

KvFormat format(int64_t number) {
  if (number < 0 || number > kKvNone) throw std::invalid_argument("edgespec: unknown KV format");
  return static_cast<KvFormat>(number);
}

// Weights are the inputs from `first` on.
std::vector<Tensor> weights(KernelContext* context, size_t first) {
  size_t inputs = 0;
  check(slot<Status* (*)(const KernelContext*, size_t*)>(g_api, kKernelContextGetInputCount)(context, &inputs));
  std::vector<Tensor> found(std::max(inputs, first) - first);
  for (size_t i = 0; i < found.size(); ++i) {
    const View v = input(context, first + i);
    if (v.type != kFloat && v.type != kUint8 && v.type != kInt8)  // others are not as long as their count says
      throw std::invalid_argument("edgespec: a weight of type " + std::to_string(v.type));
    if (reinterpret_cast<uintptr_t>(v.data) & 3) throw std::invalid_argument("edgespec: a weight that is not aligned");
    found[i] = {v.data, v.bytes()};
  }
  return found;
}

void read_memories(KernelContext* context, PassInputs& in) {
  const View memory = input(context, kFixedInputs), sources = input(context, kFixedInputs + 1);
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

// Rows that stand where tokens are below 0, and positions that rows turn by: the inputs from `next` on.
void read_inserted(KernelContext* context, const Program& program, int next, PassInputs& in) {
  if (program.inserted) {
    const View rows = input(context, next++);
    if (rows.type != kFloat || rows.dims.size() != 2 || rows.dims[1] != program.inserted)
      throw std::invalid_argument("edgespec: expected inserted rows float [I, " + std::to_string(program.inserted) +
                                  "]");
    in.inserted = static_cast<const float*>(rows.data);
    in.inserted_rows = rows.dims[0];
  }
  if (program.axes) {
    const View axes = input(context, next);
    if (axes.type != kInt64 || axes.dims != std::vector<int64_t>{3, in.rows})
      throw std::invalid_argument("edgespec: expected axes int64 [3, T]");
    in.axes = static_cast<const int64_t*>(axes.data);
  }
}

void run(Decoder& decoder, KernelContext* context) {
  const Program& program = decoder.program;
  PassInputs in;
  const View plan = input(context, 0), rows = input(context, 1), gates = input(context, 2), moves = input(context, 3),
             kv = input(context, 4), control = input(context, 5), tables = input(context, 6),
             hidden = input(context, 7);
  if (plan.dims.size() != 2 || plan.dims[0] != 6) throw std::invalid_argument("edgespec: expected a plan [6, T]");
  for (const View* v : {&plan, &rows, &gates, &moves})
    if (v->count() > kMostNumbers) throw std::invalid_argument("edgespec: a pass of too many rows");
  if (moves.count() % 3) throw std::invalid_argument("edgespec: expected moves [M, 3]");
  if (hidden.dims.size() != 2) throw std::invalid_argument("edgespec: expected hidden states [T, D]");
  if (kv.dims.size() != 2 || kv.dims[0] > kMostNumbers)
    throw std::invalid_argument("edgespec: expected a cache [S, bytes]");
  if (reinterpret_cast<uintptr_t>(kv.data) & 7 || (kv.dims[0] > 1 && kv.dims[1] & 7))
    throw std::invalid_argument("edgespec: expected caches aligned to 8 bytes");
  if (control.count() != kControls) throw std::invalid_argument("edgespec: expected 8 controls");
  in.plan = static_cast<const int64_t*>(plan.data);
  in.rows = static_cast<int>(plan.dims[1]);
  in.head_rows = static_cast<const int64_t*>(rows.data);
  in.heads = static_cast<int>(rows.count());
  in.hidden = static_cast<const float*>(hidden.data);
  in.hidden_rows = hidden.dims[0];
  in.hidden_width = hidden.dims[1];
  in.gate_count = static_cast<int>(gates.count());
  const auto on = std::make_unique<bool[]>(static_cast<size_t>(in.gate_count) + 1);
  std::transform(static_cast<const uint8_t*>(gates.data), static_cast<const uint8_t*>(gates.data) + in.gate_count,
                 on.get(), [](uint8_t byte) { return byte != 0; });  // whatever is written there: a bool is 0 or 1
  in.gates = on.get();
  in.moves = static_cast<const int64_t*>(moves.data);
  in.move_count = static_cast<int>(moves.count() / 3);
  in.kv = static_cast<uint8_t*>(kv.data);
  in.slots = static_cast<int>(kv.dims[0]);
  in.kv_bytes = static_cast<size_t>(kv.dims[1]);
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
  in.memory_layout = program.memory_layout(layout);
  if (program.memory.count) read_memories(context, in);
  read_inserted(context, program, decoder.memory_inputs(), in);
  if (decoder.constant) {
    if (!decoder.asked.load(std::memory_order_acquire)) {
      const std::lock_guard<std::mutex> lock(decoder.mutex);
      if (!decoder.asked.load(std::memory_order_relaxed)) decoder.weights = weights(context, decoder.inputs());
      decoder.asked.store(true, std::memory_order_release);
    }
    in.weights = decoder.weights;
  } else {
    in.weights = weights(context, decoder.inputs());
  }
  if (in.weights.size() < static_cast<size_t>(program.weights))
    throw std::invalid_argument("edgespec: the program names weight " + std::to_string(program.weights - 1) + " of " +
                                std::to_string(in.weights.size()));
  size_t used = 0;
  for (const KvFormat f : {layout.keys, layout.codes}) {
    const size_t floats = CodeTables::floats(f, layout.dim) * layout.layers * layout.heads;
    if (floats) in.tables.of[f] = static_cast<const float*>(tables.data) + used;
    used += floats;
  }
  if (used != static_cast<size_t>(tables.count()))
    throw std::invalid_argument("edgespec: the tables do not fit the formats of the keys");

  PassOutputs out;
  const Active active = program.active(in.gates, in.gate_count);
  const int64_t heads = int64_t(in.heads) * active.logits, top = in.top;
  out.logits = static_cast<float*>(
      output(context, 0, {top ? 0 : heads, in.columns ? std::min(in.columns, active.columns) : active.columns}));
  out.top_ids = static_cast<int64_t*>(output(context, 1, {heads, top}));
  out.top_values = static_cast<float*>(output(context, 2, {heads, top}));
  out.hidden = static_cast<float*>(
      output(context, 3, {active.hidden ? in.rows : 0, active.hidden ? active.hidden : program.hidden}));

  auto scratch = decoder.take();
  struct Work {
    Pass pass;
    Team<Pass> team;
    Work(const Program& p, const PassInputs& i, const PassOutputs& o, Scratch& s)
        : pass(p, kernels(), i, o, s), team(pass) {}
  };
  try {
    if (!in.rows) {  // nothing to compute, but rows may be moved
      Pass(program, kernels(), in, out, *scratch);
      decoder.give_back(std::move(scratch));
      return;
    }
    Work work(program, in, out, *scratch);
    check(slot<Status* (*)(const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*)>(
        g_api, kKernelContextParallelFor)(
        context, [](void* user, size_t) { static_cast<Work*>(user)->team.join(); }, kMembers, 0, &work));
    work.team.finish();
  } catch (...) {
    decoder.give_back(std::move(scratch));
    throw;
  }
  decoder.give_back(std::move(scratch));
}

Status* compute(void* kernel, KernelContext* context) noexcept {
  try {
    run(*static_cast<Decoder*>(kernel), context);
    return nullptr;
  } catch (...) { return current_error(); }
}

Status* create(const CustomOp*, Api, const KernelInfo* info, void** kernel) noexcept {
  try {
    auto decoder = std::make_unique<Decoder>();
    decoder->program = Program::parse(text_attribute(info, "program"));
    decoder->constant = flag_attribute(info, "constant_weights");
    *kernel = decoder.release();
    return nullptr;
  } catch (...) { return current_error(); }
}

CustomOp make_decoder() {
  CustomOp op{};
  op.version = kApiVersion;
  op.name = [](const CustomOp*) { return "Decoder"; };
  op.provider = [](const CustomOp*) -> const char* { return nullptr; };
  op.input_count = [](const CustomOp*) -> size_t { return kFixedInputs + 1; };
  op.input_type = [](const CustomOp*, size_t i) -> int {
    constexpr int types[] = {kInt64, kInt64, kBool, kInt64, kUint8, kInt64, kFloat, kFloat, 0};  // 0: any
    return types[i < kFixedInputs ? i : kFixedInputs];
  };
  op.output_count = [](const CustomOp*) -> size_t { return 4; };
  op.output_type = [](const CustomOp*, size_t i) -> int { return i == 1 ? kInt64 : kFloat; };
  op.input_characteristic = [](const CustomOp*, size_t i) -> int { return i < kFixedInputs ? kRequired : kVariadic; };
  op.output_characteristic = [](const CustomOp*, size_t) -> int { return kRequired; };
  op.input_memory_type = [](const CustomOp*, size_t) -> int { return 0; };
  op.variadic_input_min = [](const CustomOp*) { return 1; };
  op.variadic_input_homogeneous = [](const CustomOp*) { return 0; };
  op.variadic_output_min = [](const CustomOp*) { return 0; };
  op.variadic_output_homogeneous = [](const CustomOp*) { return 0; };
  op.create_kernel_v2 = create;
  op.create_kernel = [](const CustomOp* self, Api api, const KernelInfo* info) -> void* {
    void* kernel = nullptr;
    create(self, api, info, &kernel);
    return kernel;
  };
  op.compute_v2 = compute;
  op.compute = [](void* kernel, KernelContext* context) { compute(kernel, context); };
  op.destroy = [](void* kernel) { delete static_cast<Decoder*>(kernel); };
  op.start_version = [](const CustomOp*) { return 1; };
  op.end_version = [](const CustomOp*) { return 0x7fffffff; };
  op.may_inplace = op.alias_map = [](int** a, int** b) -> size_t {
    *a = *b = nullptr;
    return 0;
  };
  op.release_may_inplace = op.release_alias_map = [](int*, int*) {};
  return op;
}

}  // namespace
}  // namespace edgespec

EDGESPEC_EXPORT edgespec::abi::Status* RegisterCustomOps(edgespec::abi::SessionOptions* options,
                                                         const edgespec::abi::ApiBase* base) {
  using namespace edgespec;
  using namespace edgespec::abi;
  g_api = base->get_api(kApiVersion);
  if (!g_api) return nullptr;  // an ONNX Runtime older than 1.18 has said so on stderr
  static const CustomOp decoder = make_decoder();
  static std::mutex making;
  static Domain* domain = nullptr;  // one for all sessions: nobody would free theirs
  const std::lock_guard<std::mutex> lock(making);
  if (!domain) {
    Domain* made = nullptr;
    if (Status* s = slot<Status* (*)(const char*, Domain**)>(g_api, kCreateCustomOpDomain)("edgespec", &made)) return s;
    if (Status* s = slot<Status* (*)(Domain*, const CustomOp*)>(g_api, kCustomOpDomainAdd)(made, &decoder)) return s;
    domain = made;
  }
  return slot<Status* (*)(SessionOptions*, Domain*)>(g_api, kAddCustomOpDomain)(options, domain);
}

#ifndef EDGESPEC_VERSION  // built without CMake
#define EDGESPEC_VERSION ""
#endif
EDGESPEC_EXPORT const char* edgespec_version() { return EDGESPEC_VERSION; }
EDGESPEC_EXPORT const char* edgespec_isa() { return edgespec::kernels().name; }
EDGESPEC_EXPORT const char* edgespec_isa_error() { return edgespec::kernels_error(); }
