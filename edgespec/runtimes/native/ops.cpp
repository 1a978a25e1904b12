// The custom operators of domain "edgespec" and their registration with ONNX Runtime.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "adapters.h"
#include "expert_store.h"
#include "node.h"
#include "team.h"
#include "values.h"
#include "visible.h"

namespace edgespec {
namespace {

using namespace abi;

constexpr int kMembers = 64;  // threads of the pool that may take part in a pass

// ---- Decoder -------------------------------------------------------------------------------------------------------
//
// Inputs and outputs: node.h.
struct Decoder {
  Program program;
  size_t inputs() const { return node_inputs(program); }  // before the weights
  bool constant = false;  // the weights are initializers: their addresses are needed only once
  std::atomic<bool> asked{false};
  std::vector<Tensor> weights;
  std::shared_ptr<ExpertStore> store;  // of weights that are streamed; null: all are in `weights`
  std::shared_ptr<AdapterStore> adapters;
  std::mutex mutex;
  std::vector<std::unique_ptr<Scratch>> idle;

  std::unique_ptr<Scratch> take() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (idle.empty()) return std::make_unique<Scratch>();
    auto scratch = std::move(idle.back());
    idle.pop_back();
    return scratch;
  }
  void give_back(std::unique_ptr<Scratch> scratch) {  // it is freed if there is not enough memory to keep it
    const std::lock_guard<std::mutex> lock(mutex);
    try {
      idle.push_back(std::move(scratch));
    } catch (const std::bad_alloc&) {}
  }
};

// Weights are the inputs from `first` on.
std::vector<Tensor> weights(KernelContext* context, size_t first) {
  size_t inputs = 0;
  check(slot<Status* (*)(const KernelContext*, size_t*)>(g_api, kKernelContextGetInputCount)(context, &inputs));
  std::vector<Tensor> found(std::max(inputs, first) - first);
  for (size_t i = 0; i < found.size(); ++i) {
    const View v = input(context, first + i);
    // for other types, the count is not the number of bytes
    if (v.type != kFloat && v.type != kUint8 && v.type != kInt8)
      throw std::invalid_argument("edgespec: a weight of type " + std::to_string(v.type));
    if (reinterpret_cast<uintptr_t>(v.data) & 3) throw std::invalid_argument("edgespec: a weight that is not aligned");
    found[i] = {v.data, v.bytes()};
  }
  return found;
}

void run(Decoder& decoder, KernelContext* context) {
  const Program& program = decoder.program;
  std::vector<View> given(decoder.inputs());
  for (size_t i = 0; i < given.size(); ++i) given[i] = input(context, i);
  NodePass pass = read_node(program, given);
  PassInputs& in = pass.in;
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
  StreamedPass streamed(decoder.store.get(), program, in);
  in.adapters = decoder.adapters.get();
  PassOutputs out;
  const NodeShapes shapes = node_shapes(program, in);
  out.logits = static_cast<float*>(output(context, 0, shapes.logits));
  out.top_ids = static_cast<int64_t*>(output(context, 1, shapes.best));
  out.top_values = static_cast<float*>(output(context, 2, shapes.best));
  out.hidden = static_cast<float*>(output(context, 3, shapes.hidden));

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
      streamed.end();
      decoder.give_back(std::move(scratch));
      return;
    }
    Work work(program, in, out, *scratch);
    check(slot<Status* (*)(const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*)>(
        g_api, kKernelContextParallelFor)(
        context, [](void* user, size_t) { static_cast<Work*>(user)->team.join(); }, kMembers, 0, &work));
    work.team.finish();
    streamed.end();
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
    decoder->store = take_pending_store(text_attribute(info, "program"));
    decoder->adapters = take_pending_adapters(text_attribute(info, "program"));
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
  if (!g_api) return nullptr;  // an ONNX Runtime older than 1.18 has already reported that on stderr
  static const CustomOp decoder = make_decoder();
  static std::mutex making;
  static Domain* domain = nullptr;  // one for all sessions: one per session would never be freed
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
