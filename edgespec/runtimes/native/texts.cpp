#include "texts.h"

#include <cstring>
#include <iterator>

#include "team.h"

namespace edgespec {

constexpr int kLeastKept = 16;  // tokens: shorter beginnings are read again as fast
constexpr size_t kCheckpoints = 4;
constexpr int kMostTop = 1024;

// ---- passes --------------------------------------------------------------------------------------------------------

// Plans [6][rows] of rows that continue the texts of slots and each other, or follow `parents`.
static void plan_rows(edgespec_cache& cache, const edgespec_request& r, Planned& p, std::vector<int>& parents) {
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

// The gates of a request: all of the model, or what it says.
static std::unique_ptr<bool[]> gates_of(const edgespec_model& model, const edgespec_request& r) {
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

static void choose_heads(const edgespec_request& r, Planned& p) {
  if (r.logits < EDGESPEC_NO_ROWS || r.logits > EDGESPEC_LAST_ROWS)
    refuse("logits " + std::to_string(r.logits) + ": expected none, all or the last rows");
  const int64_t* slots = p.plan.data() + 2 * size_t(p.rows);
  for (int i = 0; r.logits != EDGESPEC_NO_ROWS && i < p.rows; ++i)
    if (r.logits == EDGESPEC_ALL_ROWS || i + 1 == p.rows || slots[i + 1] != slots[i]) p.heads.push_back(i);
}

edgespec_result launch(edgespec_cache& cache, const Planned& p, const float* inputs, int top) {
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
  const size_t logits = top ? 0 : rows * active.columns, best = rows * top, states = hidden * size_t(in.rows);
  const bool grows = !cache.results.fit(logits, best, states);
  Results larger;
  if (grows) {
    const Results& now = cache.results;
    larger = {std::max(logits, now.logits.size()), std::max(best, now.ids.size()), std::max(states, now.hidden.size())};
  }
  Results& results = grows ? larger : cache.results;
  PassOutputs out;
  out.logits = results.logits.data();
  out.top_ids = results.ids.data();
  out.top_values = results.values.data();
  out.hidden = results.hidden.data();
  Pass pass(model.program, kernels(), in, out, model.scratch);  // a pass that is refused leaves the last results
  if (grows) cache.results = std::move(larger);
  if (in.rows) {
    Team<Pass> team(pass);
    model.threads.run([&] { team.join(); });
    team.finish();
  }
  edgespec_result found{};
  found.rows = static_cast<int32_t>(rows);
  found.columns = active.columns;
  found.top = top;
  found.hidden_columns = active.hidden;
  found.logits = top ? nullptr : out.logits;
  found.ids = top ? out.top_ids : nullptr;
  found.values = top ? out.top_values : nullptr;
  found.hidden = hidden ? out.hidden : nullptr;
  return found;
}

// The same with the moves that wait, and with word of what the states of the pass's slots shall hold: their texts, and
// `read` tokens more.
static edgespec_result launch_text(edgespec_cache& cache, Planned& p, const float* inputs, int top, int read) {
  edgespec_result found{};
  const int64_t* slots = p.plan.data() + 2 * size_t(p.rows);
  for (const Move& m : cache.moves) p.moves.insert(p.moves.end(), {m.slot, m.from, m.to});
  for (int i = 0; cache.delta() && i < p.rows; ++i)
    if (!i || slots[i] != slots[i - 1])
      p.moves.insert(p.moves.end(), {slots[i], kCommitted, cache.slots[slots[i]].length + read});
  try {
    found = launch(cache, p, inputs, top);
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
  return found;
}

edgespec_result run_pass(edgespec_cache& cache, const edgespec_request& r) {
  Planned p;
  std::vector<int> parents;
  plan_rows(cache, r, p, parents);
  if (cache.stateful() && r.rows > kLongestPass)
    refuse("a pass of " + std::to_string(r.rows) + " rows: expected at most " + std::to_string(kLongestPass));
  choose_heads(r, p);
  p.gates = gates_of(cache.model, r);
  const edgespec_result found = launch_text(cache, p, r.inputs, r.top, 0);
  cache.parents = std::move(parents);
  return found;
}

void check_text(edgespec_cache& cache, int32_t slot, const int64_t* tokens, int64_t count) {
  const edgespec_model& model = cache.model;
  const int64_t length = cache.at(slot).length, end = length + count, room = cache.layout.capacity(cache.each);
  if (count > room - length)
    refuse(std::to_string(count) + " tokens after " + std::to_string(length) + ": expected at most " +
           std::to_string(room) + " in a slot");
  edgespec_request whole{};
  const auto gates = gates_of(model, whole);
  const auto bytes = [&](int weight) { return model.file.weights[size_t(weight)].bytes; };
  model.program.each(gates.get(), [&](const Step& s) {
    if (s.op == Op::kEmbed || s.op == Op::kBlend)
      for (int64_t i = 0; i < count; ++i)
        if (tokens[i] < 0 || tokens[i] >= s.n)
          refuse("token " + std::to_string(tokens[i]) + " is outside the vocabulary");
    if (count && s.positions >= 0 && uint64_t(end) > bytes(s.positions) / (size_t(s.k) * 4))
      refuse("position " + std::to_string(end - 1) + " is beyond the table of positions");
    if (count && s.op == Op::kHeads && s.rotary &&
        uint64_t(end) > std::min(bytes(s.cos), bytes(s.sin)) / (size_t(s.rotary) * 2))
      refuse("position " + std::to_string(end - 1) + " is beyond the table of angles");
  });
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
  p.gates = gates_of(cache.model, r);
  launch_text(cache, p, nullptr, 0, count);
  cache.slots[slot].length += count;
  cache.forget_pass();
}

// ---- states --------------------------------------------------------------------------------------------------------

// Visits the contents of a checkpoint of `tokens` tokens: for each layer the rows that the next token sees, and the
// data after the rows.
template <class Visit>
static void each_state(edgespec_cache& cache, int32_t slot, int64_t tokens, Visit visit) {
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
static void settle(edgespec_cache& cache, int32_t slot) {
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
  p.gates = gates_of(cache.model, r);
  launch_text(cache, p, nullptr, 0, 0);
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

}  // namespace edgespec
