// The C interface (edgespec.h): texts of slots, what passes are told of them, and what is left of a pass.
// edgespec/runtimes/slots/native.py keeps the same books for the custom operator.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "edgespec.h"
#include "model_file.h"
#include "team.h"
#include "threads.h"

using namespace edgespec;

namespace {

constexpr int kLongestPass = 128;  // of a model with states: a rollback stays within their rows
constexpr int kLeastKept = 16;     // tokens: shorter beginnings are read again as fast
constexpr size_t kCheckpoints = 4;
constexpr int kMostThreads = 512, kMostSlots = 1 << 16, kMostTop = 1024;
constexpr int64_t kMostTokens = int64_t(1) << 32, kMostRequestRows = 1 << 20;

thread_local std::array<char, 512> g_error{};

// Files are quoted in errors, whatever their bytes: what is no UTF-8 becomes a question mark.
void set_error(const char* what) noexcept {
  size_t size = 0;
  while (*what) {
    const auto first = static_cast<uint8_t>(*what);
    const size_t length = first < 0x80 ? 1 : first >= 0xf0 && first < 0xf5 ? 4 : first >= 0xe0 ? 3 : 2;
    bool good = first < 0x80 || (first >= 0xc2 && first < 0xf5);
    for (size_t i = 1; good && i < length; ++i) {
      const auto next = static_cast<uint8_t>(what[i]);
      const uint8_t least = i > 1 ? 0x80 : first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
      const uint8_t most = i > 1 ? 0xbf : first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
      good = next >= least && next <= most;
    }
    if (size + (good ? length : 1) >= g_error.size()) break;
    if (good)
      for (size_t i = 0; i < length; ++i) g_error[size++] = *what++;
    else
      g_error[size++] = '?', ++what;
  }
  g_error[size] = 0;
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("edgespec: " + what); }

template <class Work>
int guarded(Work work) noexcept {
  try {
    work();
    return EDGESPEC_OK;
  } catch (const std::invalid_argument& error) {
    set_error(error.what());
    return EDGESPEC_REFUSED;
  } catch (const std::bad_alloc&) { set_error("edgespec: no memory"); } catch (const std::exception& error) {
    set_error(error.what());
  }
  return EDGESPEC_NO_MEMORY;
}

// Where gates stand (Gates in native_runner.py), read off what they switch.
struct Gates {
  int layers = -1, embed = 0, load = 0, hidden = 0, lm = 0, groups = 0, first_group = 0, auxiliary = -1, plane = 0,
      count = 0;

  explicit Gates(const Program& program) : count(program.gates) {
    plane = count;
    for (size_t i = 0; i < program.steps.size(); ++i) {
      const Step& s = program.steps[i];
      if (s.plane >= 0) plane = std::min(plane, s.plane);
      if (s.op != Op::kStore || !i || program.steps[i - 1].op != Op::kGate) continue;
      if (s.at)
        auxiliary = program.steps[i - 1].index;
      else
        layers = (program.steps[i - 1].index - 2) / 2;
    }
    if (layers < 0) refuse("a program that gives no hidden states");
    embed = 2 * layers, load = embed + 1, hidden = embed + 2, lm = embed + 3, first_group = embed + 4;
    groups = std::max(0, (auxiliary < 0 ? plane : auxiliary) - first_group);
    count = std::max(count, first_group);
  }
};

bool is_exact_f32(const Program& program) {
  for (const Step& s : program.steps)
    if (s.op == Op::kLinear || s.op == Op::kGlu || s.op == Op::kExperts || (s.op == Op::kHeads && s.w >= 0))
      return s.kind == kF32;
  return false;
}

template <class T>
void expect_size(const T* given) {
  if (!given || given->size < 2 * sizeof(uint32_t)) refuse("expected a structure with its size (EDGESPEC_INIT)");
}

// Reads what another version of a structure has of this one.
template <class T>
T known(const T* given) {
  expect_size(given);
  T found{};
  std::memcpy(&found, given, std::min<size_t>(given->size, sizeof(T)));
  return found;
}

template <class T>
void answer(T* asked, T found) {
  expect_size(asked);
  found.size = asked->size;
  std::memcpy(asked, &found, std::min<size_t>(found.size, sizeof(T)));
}

}  // namespace

struct edgespec_model {
  ModelFile file;
  Program program;
  Gates gates;
  Threads threads;
  std::mutex mutex;  // one pass at a time
  Scratch scratch;
  std::vector<float> logits, values, hidden;
  std::vector<int64_t> ids;

  edgespec_model(ModelFile&& read, int count)
      : file(std::move(read)), program(Program::parse(file.program)), gates(program), threads(count) {
    if (file.program.compare(0, 5, "lent ") == 0)
      refuse("a drafter that reads the keys and values of its target is not offered by the C interface");
    if (program.memory.count)
      refuse("a model that attends over what an encoder gave is not offered by the C interface");
    if (file.weights.size() < static_cast<size_t>(program.weights)) refuse("a program that names more weights");
  }
};

namespace {

struct Slot {
  int64_t length = 0;
  int64_t furthest = 0;     // tokens ever written, of those whose states may be lost
  int64_t since = 0;        // tokens before which no row of states is there, only what the next one reads
  int first = 0, rows = 0;  // of the last pass, that may be kept
  std::map<int64_t, std::vector<float>> checkpoints;  // states by tokens
};

struct Move {
  int64_t slot, from, to;
};

struct FreeBytes {
  void operator()(uint8_t* bytes) const { std::free(bytes); }
};

}  // namespace

struct edgespec_cache {
  edgespec_model& model;
  KvLayout layout;
  size_t each = 0;
  std::unique_ptr<uint8_t, FreeBytes> memory;
  uint8_t* base = nullptr;
  std::vector<Slot> slots;
  std::vector<Move> moves;   // before the next pass
  std::vector<int> parents;  // of the last pass

  explicit edgespec_cache(edgespec_model& of) : model(of) {}

  Cache of(int64_t slot) { return {base + size_t(slot) * each, layout}; }
  bool stateful() const { return model.program.states > 0; }
  bool delta() const { return model.program.state_matrix > 0; }

  Slot& at(int32_t slot) {
    if (slot < 0 || size_t(slot) >= slots.size()) refuse("slot " + std::to_string(slot) + " does not exist");
    return slots[slot];
  }
  // Tokens that a slot's states hold: the fewest and the most of its layers.
  std::pair<int64_t, int64_t> held(int64_t slot) {
    std::pair<int64_t, int64_t> found{INT64_MAX, 0};
    for (int layer = 0; delta() && layer < layout.states; ++layer) {
      const int64_t tokens = *of(slot).applied(layer);
      found = {std::min(found.first, tokens), std::max(found.second, tokens)};
    }
    return found;
  }
  void hold(int64_t slot, int64_t tokens) {
    for (int layer = 0; delta() && layer < layout.states; ++layer) *of(slot).applied(layer) = tokens;
  }
  void drop_moves(int64_t slot) {
    moves.erase(std::remove_if(moves.begin(), moves.end(), [&](const Move& m) { return m.slot == slot; }), moves.end());
  }
  void forget_pass() {
    for (Slot& slot : slots) slot.rows = 0;
  }
  void clear(int64_t slot) {
    slots[slot] = {};
    hold(slot, 0);
    drop_moves(slot);
  }
};

namespace {

// ---- one pass ------------------------------------------------------------------------------------------------------

struct Planned {
  std::vector<int64_t> plan, heads, moves;
  std::unique_ptr<bool[]> gates;
  int rows = 0;
};

// A plan [6][rows] of rows that continue each other behind the texts of slots, or as `parents` says.
void plan_rows(edgespec_cache& cache, const edgespec_request& r, Planned& p, std::vector<int>& parents) {
  if (r.rows < 1 || r.rows > kMostRequestRows) refuse("a pass of " + std::to_string(r.rows) + " rows");
  const size_t n = size_t(p.rows = r.rows);
  if (!r.tokens && !r.inputs) refuse("expected tokens or inputs");
  p.plan.assign(6 * n, 0);
  parents.assign(n, -1);
  int64_t *tokens = p.plan.data(), *positions = tokens + n, *slots = positions + n, *visible = slots + n,
          *behind = visible + n, *places = behind + n;
  int first = 0;
  for (int i = 0; i < r.rows; ++i) {
    const int32_t slot = r.slots ? r.slots[i] : 0;
    const int64_t length = cache.at(slot).length;
    if (i && slot < slots[i - 1]) refuse("rows must be in order of their slots");
    if (i && slot != slots[i - 1]) first = i;
    const int parent = r.parents ? r.parents[i] : i > first ? i - 1 : -1;
    if (parent < -1 || parent >= i || (parent >= 0 && parent < first))
      refuse("row " + std::to_string(i) + " continues row " + std::to_string(parent) +
             ": expected -1, or an earlier one of its slot");
    tokens[i] = r.tokens ? r.tokens[i] : 0;
    slots[i] = slot;
    visible[i] = length;
    behind[i] = parents[i] = parent;
    positions[i] = parent < 0 ? length : positions[parent] + 1;
    places[i] = length + i - first;
  }
}

std::unique_ptr<bool[]> whole_model(const edgespec_model& model, const edgespec_request& r) {
  const Gates& at = model.gates;
  auto gates = std::make_unique<bool[]>(size_t(at.count));
  if (r.gates) {
    for (int i = 0; i < at.count; ++i) gates[i] = r.gates[i] != 0;
    return gates;
  }
  std::fill_n(gates.get(), at.embed, true);
  gates[r.inputs ? at.load : at.embed] = true;
  gates[at.hidden] = r.hidden != 0;
  gates[at.lm] = r.logits != EDGESPEC_NO_ROWS;
  if (at.auxiliary >= 0) gates[at.auxiliary] = (r.hidden & EDGESPEC_AUXILIARY) != 0;
  std::fill(gates.get() + at.plane, gates.get() + at.count, true);
  return gates;
}

void choose_heads(const edgespec_request& r, Planned& p) {
  if (r.logits < EDGESPEC_NO_ROWS || r.logits > EDGESPEC_LAST_ROWS)
    refuse("logits " + std::to_string(r.logits) + ": expected none, all or the last rows");
  const int64_t* slots = p.plan.data() + 2 * size_t(p.rows);
  for (int i = 0; r.logits != EDGESPEC_NO_ROWS && i < p.rows; ++i)
    if (r.logits == EDGESPEC_ALL_ROWS || i + 1 == p.rows || slots[i + 1] != slots[i]) p.heads.push_back(i);
}

void resize(std::vector<float>& values, size_t count) {
  if (values.size() < count) values.resize(count);
}

// Runs what is planned.  Throws std::invalid_argument if it is refused, before anything has changed.
void launch(edgespec_cache& cache, const Planned& p, const float* inputs, int top, edgespec_result* result) {
  edgespec_model& model = cache.model;
  if (top < 0 || top > kMostTop) refuse("top " + std::to_string(top) + ": expected 0 to " + std::to_string(kMostTop));
  PassInputs in;
  in.plan = p.plan.data();
  in.rows = p.rows;
  in.head_rows = p.heads.data();
  in.heads = static_cast<int>(p.heads.size());
  in.hidden = inputs;
  in.hidden_rows = inputs ? p.rows : 0;
  in.hidden_width = model.program.given;
  in.gates = p.gates.get();
  in.gate_count = model.gates.count;
  in.moves = p.moves.data();
  in.move_count = static_cast<int>(p.moves.size() / 3);
  in.kv = cache.base;
  in.slots = static_cast<int>(cache.slots.size());
  in.kv_bytes = cache.each;
  in.layout = cache.layout;
  in.top = top;
  in.weights = model.file.weights;
  const Active active = model.program.active(in.gates, in.gate_count);
  const size_t rows = size_t(in.heads) * active.logits, hidden = size_t(active.hidden);
  resize(model.logits, top ? 0 : rows * active.columns);
  resize(model.values, rows * top);
  resize(model.hidden, hidden * in.rows);
  if (model.ids.size() < rows * top) model.ids.resize(rows * top);
  PassOutputs out;
  out.logits = model.logits.data();
  out.top_ids = model.ids.data();
  out.top_values = model.values.data();
  out.hidden = model.hidden.data();
  Pass pass(model.program, kernels(), in, out, model.scratch);
  if (in.rows) {
    Team<Pass> team(pass);
    model.threads.run([&] { team.join(); });
    team.finish();
  }
  if (!result) return;
  edgespec_result found{};
  found.rows = static_cast<int32_t>(rows);
  found.columns = active.columns;
  found.top = top;
  found.hidden_columns = active.hidden;
  found.logits = top ? nullptr : out.logits;
  found.ids = top ? out.top_ids : nullptr;
  found.values = top ? out.top_values : nullptr;
  found.hidden = hidden ? out.hidden : nullptr;
  answer(result, found);
}

// The same with the moves that wait, and with word of what the states of the pass's slots shall hold: their texts, and
// `read` tokens more.
void launch_text(edgespec_cache& cache, Planned& p, const float* inputs, int top, int read, edgespec_result* result) {
  const int64_t* slots = p.plan.data() + 2 * size_t(p.rows);
  for (const Move& m : cache.moves) p.moves.insert(p.moves.end(), {m.slot, m.from, m.to});
  for (int i = 0; cache.delta() && i < p.rows; ++i)
    if (!i || slots[i] != slots[i - 1])
      p.moves.insert(p.moves.end(), {slots[i], kCommitted, cache.slots[slots[i]].length + read});
  try {
    launch(cache, p, inputs, top, result);
  } catch (const std::invalid_argument&) { throw; } catch (...) {  // some of it may have been done
    for (int i = 0; i < p.rows; ++i) cache.clear(slots[i]);
    while (!cache.moves.empty()) cache.clear(cache.moves.back().slot);
    cache.forget_pass();
    throw;
  }
  cache.moves.clear();
  cache.forget_pass();
  for (int i = 0; i < p.rows; ++i) {
    Slot& slot = cache.slots[slots[i]];
    slot.first = slot.rows ? slot.first : i;
    ++slot.rows;
    slot.furthest = std::max(slot.furthest, slot.length + slot.rows);
  }
}

void run_pass(edgespec_cache& cache, const edgespec_request& r, edgespec_result* result) {
  Planned p;
  std::vector<int> parents;
  plan_rows(cache, r, p, parents);
  if (cache.stateful() && r.rows > kLongestPass)
    refuse("a pass of " + std::to_string(r.rows) + " rows: expected at most " + std::to_string(kLongestPass));
  choose_heads(r, p);
  p.gates = whole_model(cache.model, r);
  launch_text(cache, p, r.inputs, r.top, 0, result);
  cache.parents = std::move(parents);
}

void read_chunk(edgespec_cache& cache, int32_t slot, const int64_t* tokens, int count) {
  const std::vector<int32_t> slots(size_t(count), slot);
  edgespec_request r{};
  r.rows = count;
  r.tokens = tokens;
  r.slots = slots.data();
  Planned p;
  std::vector<int> parents;
  plan_rows(cache, r, p, parents);
  p.gates = whole_model(cache.model, r);
  launch_text(cache, p, nullptr, 0, count, nullptr);
  cache.slots[slot].length += count;
  cache.forget_pass();
}

// ---- states --------------------------------------------------------------------------------------------------------

// Visits what a checkpoint of so many tokens holds: of each layer the rows that the next token sees, and what comes
// behind the rows.
template <class Visit>
void each_state(edgespec_cache& cache, int32_t slot, int64_t tokens, Visit visit) {
  const KvLayout& layout = cache.layout;
  const size_t width = size_t(layout.state_width), rest = layout.state_bytes() / 4 - kStateRows * width;
  for (int layer = 0; layer < layout.states; ++layer) {
    const Cache kv = cache.of(slot);
    for (int64_t t = std::max<int64_t>(0, tokens - cache.model.program.state_length + 1); t < tokens; ++t)
      visit(kv.state(layer, t), width);
    if (rest) visit(kv.matrix(layer), rest);
  }
}

// Carries out what `keep` left to the next pass.
void settle(edgespec_cache& cache, int32_t slot) {
  const bool behind = cache.delta() && cache.held(slot).first < cache.slots[slot].length;
  if (!behind && cache.moves.empty()) return;
  const int64_t token = 0;
  edgespec_request r{};
  r.rows = 1;
  r.tokens = &token;
  r.slots = &slot;
  Planned p;
  std::vector<int> parents;
  if (behind) plan_rows(cache, r, p, parents);  // a row that is forgotten
  p.gates = whole_model(cache.model, r);
  launch_text(cache, p, nullptr, 0, 0, nullptr);
  cache.forget_pass();
}

bool is_lost(edgespec_cache& cache, int32_t slot, int64_t same) {
  const Slot& s = cache.slots[slot];
  return (cache.stateful() && (s.furthest - same > kLongestPass || same < s.since)) || cache.held(slot).second > same;
}

int64_t go_back(edgespec_cache& cache, int32_t slot, int64_t most) {
  Slot& s = cache.slots[slot];
  s.checkpoints.erase(s.checkpoints.upper_bound(most), s.checkpoints.end());
  const int64_t left = s.checkpoints.empty() ? 0 : s.checkpoints.rbegin()->first;
  cache.hold(slot, 0);
  if (left) {
    const float* from = s.checkpoints.rbegin()->second.data();
    each_state(cache, slot, left, [&](float* to, size_t count) {
      std::memcpy(to, from, count * 4);
      from += count;
    });
  }
  s.furthest = s.since = left;
  return left;
}

void keep_states(edgespec_cache& cache, int32_t slot) {
  settle(cache, slot);
  Slot& s = cache.slots[slot];
  if (s.length < kLeastKept) return;
  s.checkpoints.erase(s.checkpoints.lower_bound(s.length), s.checkpoints.end());
  std::vector<float> states;
  each_state(cache, slot, s.length,
             [&](const float* from, size_t count) { states.insert(states.end(), from, from + count); });
  s.checkpoints[s.length] = std::move(states);
  while (s.checkpoints.size() > kCheckpoints) s.checkpoints.erase(std::next(s.checkpoints.begin()));
}

}  // namespace

// ---- the interface -------------------------------------------------------------------------------------------------

uint32_t edgespec_c_version(void) { return EDGESPEC_C_VERSION; }

const char* edgespec_error(void) { return g_error.data(); }

int edgespec_open(const char* graph, int32_t threads, edgespec_model** model) {
  return guarded([&] {
    if (!graph || !model) refuse("expected a path, and where to put the model");
    if (threads < 0 || threads > kMostThreads)
      refuse("threads " + std::to_string(threads) + ": expected 0 to " + std::to_string(kMostThreads));
    const int all = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    *model = new edgespec_model(read_model(graph), threads ? threads : std::min(all, kMostThreads));
  });
}

void edgespec_close(edgespec_model* model) { delete model; }

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
    made->slots.resize(size_t(slots));
    *cache = made.release();
  });
}

void edgespec_cache_close(edgespec_cache* cache) { delete cache; }

uint64_t edgespec_cache_bytes(const edgespec_cache* cache) {
  if (!cache) return 0;
  uint64_t bytes = uint64_t(cache->each) * cache->slots.size();
  for (const Slot& slot : cache->slots)
    for (const auto& kept : slot.checkpoints) bytes += kept.second.size() * 4;
  return bytes;
}

int64_t edgespec_cache_length(const edgespec_cache* cache, int32_t slot) {
  return cache && slot >= 0 && size_t(slot) < cache->slots.size() ? cache->slots[slot].length : -1;
}

int edgespec_prefill(edgespec_cache* cache, int32_t slot, const int64_t* tokens, int64_t count) {
  return guarded([&] {
    if (!cache || count < 0 || (count && !tokens)) refuse("expected a cache and tokens");
    cache->at(slot);
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
    run_pass(*cache, r, result);
  });
}

int edgespec_keep(edgespec_cache* cache, int32_t slot, const int32_t* rows, int32_t count) {
  return guarded([&] {
    if (!cache || count < 0 || (count && !rows)) refuse("expected a cache and rows");
    Slot& s = cache->at(slot);
    for (int32_t i = 0; i < count; ++i)
      if (rows[i] < s.first || rows[i] >= s.first + s.rows || cache->parents[rows[i]] != (i ? rows[i - 1] : -1))
        refuse("row " + std::to_string(rows[i]) + " does not continue those before it, or is not of slot " +
               std::to_string(slot) + " in the last pass");
    std::vector<Move> moved;
    for (int32_t i = 0; i < count; ++i)
      if (rows[i] - s.first != i) moved.push_back({slot, s.length + rows[i] - s.first, s.length + i});
    cache->moves.insert(cache->moves.end(), moved.begin(), moved.end());
    s.length += count;
    s.rows = 0;
  });
}

int edgespec_crop(edgespec_cache* cache, int32_t slot, int64_t length, int64_t* left) {
  return guarded([&] {
    if (!cache || length < 0) refuse("expected a cache and a length");
    Slot& s = cache->at(slot);
    int64_t same = std::min(length, s.length);
    if (same < s.length) {
      // what is moved by the next pass does not lie where it should yet; it moves forward, so what is left needs none
      if (!is_lost(*cache, slot, same)) {
        s.checkpoints.erase(s.checkpoints.upper_bound(same), s.checkpoints.end());
      } else {
        same = go_back(*cache, slot, same);
        cache->drop_moves(slot);
      }
      s.length = same;
    }
    s.rows = 0;
    if (left) *left = same;
  });
}

int edgespec_checkpoint(edgespec_cache* cache, int32_t slot) {
  return guarded([&] {
    if (!cache) refuse("expected a cache");
    cache->at(slot);
    if (!cache->stateful()) return;
    const std::lock_guard<std::mutex> lock(cache->model.mutex);
    keep_states(*cache, slot);
  });
}

int edgespec_heads(edgespec_cache* cache, int32_t group, const float* hidden, int32_t rows, int32_t top,
                   edgespec_result* result) {
  return guarded([&] {
    if (!cache || !hidden || rows < 1 || rows > kMostRequestRows) refuse("expected a cache and rows of hidden states");
    expect_size(result);
    const Gates& at = cache->model.gates;
    if (group < 0 || group >= at.groups)
      refuse("group " + std::to_string(group) + " of heads: the model has " + std::to_string(at.groups));
    Planned p;
    p.rows = rows;
    p.plan.assign(6 * size_t(rows), 0);
    std::fill_n(p.plan.begin() + 4 * rows, rows, -1);
    for (int32_t i = 0; i < rows; ++i) p.heads.push_back(i);
    p.gates = std::make_unique<bool[]>(size_t(at.count));
    p.gates[at.load] = p.gates[at.first_group + group] = true;
    std::fill(p.gates.get() + at.plane, p.gates.get() + at.count, true);
    const std::lock_guard<std::mutex> lock(cache->model.mutex);
    launch(*cache, p, hidden, top, result);
  });
}
