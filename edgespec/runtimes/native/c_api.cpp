// The C interface (edgespec.h): checks arguments and returns results; texts.h does the work.
#include <algorithm>
#include <cstring>
#include <string>

#include "guarded.h"
#include "node.h"
#include "sized.h"
#include "team.h"
#include "texts.h"

using namespace edgespec;

namespace {

constexpr int kMostSlots = 1 << 16;
constexpr int64_t kMostTokens = int64_t(1) << 32;

bool is_exact_f32(const Program& program) {
  for (const Step& s : program.steps)
    if (s.op == Op::kLinear || s.op == Op::kGlu || s.op == Op::kExperts || (s.op == Op::kHeads && s.w >= 0))
      return s.kind == kF32;
  return false;
}

// The type of each input of a node, and whether it has two dimensions.
struct Form {
  int type;
  bool flat = false;
};
constexpr Form kForms[EDGESPEC_NODE_INPUTS] = {{abi::kInt64}, {abi::kInt64, true}, {abi::kBool, true},  {abi::kInt64},
                                               {abi::kUint8}, {abi::kInt64, true}, {abi::kFloat, true}, {abi::kFloat},
                                               {abi::kUint8}, {abi::kInt64},       {abi::kFloat},       {abi::kInt64}};

// The inputs that a program's node has, of all that there may be.
std::vector<View> views(const Program& program, const edgespec_array* given, int count) {
  std::vector<View> found;
  for (int i = 0; i < EDGESPEC_NODE_INPUTS; ++i) {
    const bool has = i < EDGESPEC_NODE_MEMORY     ? true
                     : i < EDGESPEC_NODE_INSERTED ? program.memory.count > 0
                     : i < EDGESPEC_NODE_AXES     ? program.inserted > 0
                                                  : program.axes;
    if (!has) continue;
    if (i >= count) refuse("inputs " + std::to_string(count) + ": expected more for this model");
    const edgespec_array& a = given[i];
    const bool flat = kForms[i].flat;
    if (a.rows < 0 || a.columns < 0 || (flat && a.rows != 1) ||
        (a.columns && a.rows > (int64_t(1) << 46) / a.columns) || (a.rows && a.columns && !a.data))
      refuse("input " + std::to_string(i) + ": no such array");
    View view;
    view.data = a.data;
    view.type = kForms[i].type;
    if (!flat) view.dims.push_back(a.rows);
    view.dims.push_back(a.columns);
    found.push_back(std::move(view));
  }
  return found;
}

// Sets the shape of an output and returns its memory, which must be large enough.
void* room(edgespec_array& asked, const std::vector<int64_t>& shape, const char* name) {
  const int64_t wanted = shape[0] * shape[1];
  if (wanted && (!asked.data || asked.rows < 0 || asked.columns < 0 ||
                 (asked.rows && asked.columns < (wanted + asked.rows - 1) / asked.rows) || !asked.rows))
    refuse(std::string("no room for ") + name + ": " + std::to_string(wanted) + " numbers");
  asked.rows = shape[0];
  asked.columns = shape[1];
  return asked.data;
}

}  // namespace

uint32_t edgespec_c_version(void) { return EDGESPEC_C_VERSION; }

const char* edgespec_error(void) { return g_error.data(); }

int edgespec_open(const char* graph, int32_t threads, edgespec_model** model) {
  return guarded([&] {
    if (!graph || !model) refuse("expected a path, and where to put the model");
    *model = open_graph(graph, threads).release();
  });
}

void edgespec_close(edgespec_model* model) {
  if (model) model->release();
}

int edgespec_describe(const edgespec_model* model, edgespec_facts* facts) {
  return guarded([&] {
    if (!model) refuse("expected a model");
    const Program& program = model->program;
    edgespec_facts found{};
    found.layers = model->gates.layers;
    found.vocab = program.vocab;
    found.hidden = program.hidden;
    found.input_width = program.given;
    found.groups = model->gates.groups;
    found.gates = model->gates.count;
    found.auxiliary = model->gates.auxiliary >= 0;
    found.stateful = program.states > 0;
    found.exact = is_exact_f32(program) ? EDGESPEC_ATTENTION_F32 : EDGESPEC_ATTENTION_F16;
    for (const Tensor& weight : model->file.weights) found.weight_bytes += weight.bytes;
    answer(facts, found);
  });
}

int edgespec_cache_open(edgespec_model* model, int32_t slots, int64_t tokens, int32_t attention,
                        edgespec_cache** cache) {
  return guarded([&] {
    if (!model || !cache) refuse("expected a model, and where to put the cache");
    if (slots < 1 || slots > kMostSlots || tokens < 1 || tokens > kMostTokens)
      refuse("a cache of " + std::to_string(slots) + " slots of " + std::to_string(tokens) + " tokens");
    if (attention < EDGESPEC_ATTENTION_EXACT || attention > EDGESPEC_ATTENTION_INT8)
      refuse("attention " + std::to_string(attention) + ": expected exact, f32, f16 or int8");
    model->check_texts();
    auto made = std::make_unique<edgespec_cache>(*model);
    if (attention == EDGESPEC_ATTENTION_EXACT)
      attention = is_exact_f32(model->program) ? EDGESPEC_ATTENTION_F32 : EDGESPEC_ATTENTION_F16;
    KvLayout& layout = made->layout;
    layout.keys = layout.values = attention == EDGESPEC_ATTENTION_F32   ? kKvF32
                                  : attention == EDGESPEC_ATTENTION_F16 ? kKvF16
                                                                        : kKvInt8;
    model->program.describe(layout);
    const uint64_t blocks = uint64_t(tokens + kKvBlock - 1) / kKvBlock, block = layout.block_bytes();
    const uint64_t most = (uint64_t(1) << 46) / uint64_t(slots);
    if (block > most || blocks > most / std::max<uint64_t>(block, 1)) throw std::bad_alloc();
    made->each = (layout.header_bytes() + size_t(blocks * block) + 63) / 64 * 64;
    made->memory.reset(static_cast<uint8_t*>(std::calloc(size_t(slots) * made->each + 64, 1)));
    if (!made->memory) throw std::bad_alloc();
    made->base = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(made->memory.get()) + 63) & ~uintptr_t(63));
    for (size_t slot = 0; slot < size_t(slots); ++slot) {
      made->slots.push_back({Text(layout, model->program.state_length)});
      made->slots.back().text.attach(made->base + slot * made->each);
    }
    *cache = made.release();
  });
}

void edgespec_cache_close(edgespec_cache* cache) { delete cache; }

uint64_t edgespec_cache_bytes(const edgespec_cache* cache) {
  if (!cache) return 0;
  uint64_t bytes = uint64_t(cache->each) * cache->slots.size();
  for (const Slot& slot : cache->slots) bytes += slot.text.checkpoint_bytes();
  return bytes;
}

int64_t edgespec_cache_length(const edgespec_cache* cache, int32_t slot) {
  return cache && slot >= 0 && size_t(slot) < cache->slots.size() ? cache->slots[slot].text.length() : -1;
}

int edgespec_prefill(edgespec_cache* cache, int32_t slot, const int64_t* tokens, int64_t count) {
  return guarded([&] {
    if (!cache || count < 0 || (count && !tokens)) refuse("expected a cache and tokens");
    check_text(*cache, slot, tokens, count);
    const std::lock_guard<std::mutex> lock(cache->model.mutex);
    for (int64_t first = 0; first < count; first += kLongestPass)
      read_chunk(*cache, slot, tokens + first, static_cast<int>(std::min<int64_t>(kLongestPass, count - first)));
  });
}

int edgespec_pass(edgespec_cache* cache, const edgespec_request* request, edgespec_result* result) {
  return guarded([&] {
    if (!cache) refuse("expected a cache");
    const edgespec_request r = known(request);
    if (result) expect_size(result);
    const std::lock_guard<std::mutex> lock(cache->model.mutex);
    const edgespec_result found = run_pass(*cache, r);
    if (result) answer(result, found);
  });
}

int edgespec_keep(edgespec_cache* cache, int32_t slot, const int32_t* rows, int32_t count) {
  return guarded([&] {
    if (!cache || count < 0 || (count && !rows)) refuse("expected a cache and rows");
    Slot& s = cache->at(slot);
    const std::vector<int64_t> wide(rows, rows + count);
    s.text.keep(wide.data(), count, s.first);
  });
}

int edgespec_crop(edgespec_cache* cache, int32_t slot, int64_t length, int64_t* left) {
  return guarded([&] {
    if (!cache || length < 0) refuse("expected a cache and a length");
    Text& text = cache->at(slot).text;
    text.forget_rows();
    const int64_t same = text.crop(length);
    if (left) *left = same;
  });
}

int edgespec_checkpoint(edgespec_cache* cache, int32_t slot) {
  return guarded([&] {
    if (!cache) refuse("expected a cache");
    if (!cache->at(slot).text.has_checkpoints()) return;
    const std::lock_guard<std::mutex> lock(cache->model.mutex);
    keep_states(*cache, slot);
  });
}

int edgespec_heads(edgespec_cache* cache, int32_t group, const float* hidden, int32_t rows, int32_t top,
                   edgespec_result* result) {
  return guarded([&] {
    if (!cache || !hidden || rows < 1 || rows > kMostRequestRows) refuse("expected a cache and rows of hidden states");
    expect_size(result);
    const std::lock_guard<std::mutex> lock(cache->model.mutex);
    answer(result, run_heads(*cache, group, hidden, rows, top));
  });
}

int edgespec_run(edgespec_model* model, const edgespec_array* inputs, int32_t input_count, edgespec_array* outputs,
                 int32_t output_count) {
  return guarded([&] {
    if (!model || !inputs || !outputs) refuse("expected a model, its inputs and outputs");
    if (input_count < 0 || output_count < EDGESPEC_NODE_OUTPUTS)
      refuse("outputs " + std::to_string(output_count) + ": expected " + std::to_string(EDGESPEC_NODE_OUTPUTS));
    const std::lock_guard<std::mutex> lock(model->mutex);
    NodePass pass = read_node(model->program, views(model->program, inputs, input_count));
    PassInputs& in = pass.in;
    in.weights = model->file.weights;
    const NodeShapes shapes = node_shapes(model->program, in);
    PassOutputs out;
    out.logits = static_cast<float*>(room(outputs[0], shapes.logits, "logits"));
    out.top_ids = static_cast<int64_t*>(room(outputs[1], shapes.best, "ids"));
    out.top_values = static_cast<float*>(room(outputs[2], shapes.best, "values"));
    out.hidden = static_cast<float*>(room(outputs[3], shapes.hidden, "hidden states"));
    Pass work(model->program, kernels(), in, out, model->scratch);
    if (!in.rows) return;
    Team<Pass> team(work);
    model->threads.run([&] { team.join(); });
    team.finish();
  });
}
