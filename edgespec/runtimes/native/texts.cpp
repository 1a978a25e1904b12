#include "texts.h"

#include "team.h"

namespace edgespec {

constexpr int kMostTop = 1024, kMostThreads = 512;
constexpr uint64_t kSmall = uint64_t(4) << 20;  // bytes of weights: a pass is over before a second thread has woken up

static int threads_of(int32_t threads) {
  if (threads < 0 || threads > kMostThreads)
    refuse("threads " + std::to_string(threads) + ": expected 0 to " + std::to_string(kMostThreads));
  return threads ? threads : std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMostThreads);
}

OpenedModel open_graph(const std::string& path, int32_t threads, bool small_alone, uint64_t cache) {
  ModelFile file = read_model(path);
  uint64_t bytes = 0;
  for (const Tensor& weight : file.weights) bytes += weight.bytes;
  OpenedModel made(new edgespec_model(std::move(file), small_alone && bytes < kSmall ? 1 : threads_of(threads)));
  if (cache) made->store = std::make_unique<ExpertStore>(path, size_t(std::min<uint64_t>(cache, SIZE_MAX)), false);
  return made;
}

// ---- passes --------------------------------------------------------------------------------------------------------

// Rows of a pass that continue the text of one slot.
struct Run {
  int32_t slot;
  Rows rows;
};

// Plans [6][rows] of rows that continue the texts of slots and each other, or follow `parents`.
static std::vector<Run> plan_rows(edgespec_cache& cache, const edgespec_request& r, Planned& p, int64_t how = 0) {
  if (r.rows < 1 || r.rows > kMostRequestRows) refuse("a pass of " + std::to_string(r.rows) + " rows");
  const size_t n = size_t(p.rows = r.rows);
  if (!r.tokens && !r.inputs) refuse("expected tokens or inputs");
  p.plan.assign(6 * n, 0);
  if (r.tokens) std::copy_n(r.tokens, n, p.plan.begin());
  std::vector<Run> parts;
  for (int i = 0; i < r.rows; ++i) {
    const int32_t slot = r.slots ? r.slots[i] : 0;
    cache.at(slot);
    if (parts.empty() || slot != parts.back().slot) {
      if (i && slot < parts.back().slot) refuse("rows must be in order of their slots");
      parts.push_back({slot, {p.plan.data(), r.rows, i, 0, 0, r.parents ? how | kTree : how}});
    }
    Rows& rows = parts.back().rows;
    if (r.parents) rows.line(kParents)[rows.count] = r.parents[i];
    ++rows.count;
  }
  for (const Run& part : parts) cache.slots[part.slot].text.plan(part.rows, part.slot);
  return parts;
}

// The gates of a request: all of the model, or what it says.
static std::unique_ptr<bool[]> gates_of(const edgespec_model& model, const edgespec_request& r) {
  const Gates& at = model.gates;
  auto gates = at.whole();
  if (r.gates) {
    for (int i = 0; i < at.count; ++i) gates[i] = r.gates[i] != 0;
    return gates;
  }
  gates[at.embed] = !r.inputs;
  gates[at.load] = r.inputs != nullptr;
  gates[at.hidden] = r.hidden != 0;
  gates[at.lm] = r.logits != EDGESPEC_NO_ROWS;
  if (at.auxiliary >= 0) gates[at.auxiliary] = (r.hidden & EDGESPEC_AUXILIARY) != 0;
  return gates;
}

static void choose_heads(const edgespec_request& r, Planned& p) {
  if (r.logits < EDGESPEC_NO_ROWS || r.logits > EDGESPEC_LAST_ROWS)
    refuse("logits " + std::to_string(r.logits) + ": expected none, all or the last rows");
  const int64_t* slots = p.plan.data() + 2 * size_t(p.rows);
  for (int i = 0; r.logits != EDGESPEC_NO_ROWS && i < p.rows; ++i)
    if (r.logits == EDGESPEC_ALL_ROWS || i + 1 == p.rows || slots[i + 1] != slots[i]) p.heads.push_back(i);
}

constexpr int64_t kAdapter = int64_t(1) << 32;  // times an adapter's number, in the slots of a plan

edgespec_result launch(edgespec_cache& cache, const Planned& p, const float* inputs, int top) {
  edgespec_model& model = cache.model;
  if (top < 0 || top > kMostTop) refuse("top " + std::to_string(top) + ": expected 0 to " + std::to_string(kMostTop));
  PassInputs in;
  std::vector<int64_t> adapted;
  if (cache.adapter) {
    adapted = p.plan;
    for (int64_t row = 2 * int64_t(p.rows); row < 3 * int64_t(p.rows); ++row)
      adapted[size_t(row)] += cache.adapter * kAdapter;
    in.adapters = model.adapters.get();
  }
  in.plan = cache.adapter ? adapted.data() : p.plan.data();
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
  in.columns = p.columns;
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
  StreamedPass streamed(model.store.get(), model.program, in);
  Pass pass(model.program, kernels(), in, out, model.scratch);  // a pass that is refused leaves the last results
  if (grows) cache.results = std::move(larger);
  if (in.rows) {
    Team<Pass> team(pass);
    model.threads.run([&] { team.join(); });
    team.finish();
  }
  streamed.end();
  edgespec_result found{};
  found.rows = static_cast<int32_t>(rows);
  found.columns = p.columns ? std::min(p.columns, active.columns) : active.columns;
  found.top = top;
  found.hidden_columns = active.hidden;
  found.logits = top ? nullptr : out.logits;
  found.ids = top ? out.top_ids : nullptr;
  found.values = top ? out.top_values : nullptr;
  found.hidden = hidden ? out.hidden : nullptr;
  return found;
}

// The same with what waits for the pass; `read` rows of it are part of their text at once.
static edgespec_result launch_text(edgespec_cache& cache, Planned& p, const std::vector<Run>& parts,
                                   const float* inputs, int top, int read) {
  edgespec_result found{};
  const auto runs = [&](size_t slot) {
    return std::any_of(parts.begin(), parts.end(), [&](const Run& part) { return size_t(part.slot) == slot; });
  };
  for (size_t slot = 0; slot < cache.slots.size(); ++slot) {
    const Text& text = cache.slots[slot].text;
    if (!text.moves() && !(text.delta() && runs(slot))) continue;
    p.moves.resize(p.moves.size() + 3 * size_t(text.waiting()));
    text.write_moves(p.moves.data() + p.moves.size() - 3 * size_t(text.waiting()), int64_t(slot), read,
                     cache.revocable);
  }
  for (const Run& part : parts) cache.slots[part.slot].text.make_room(part.rows.count);
  try {
    found = launch(cache, p, inputs, top);
  } catch (const std::invalid_argument&) { throw; } catch (...) {  // some of it may have been done
    for (size_t slot = 0; slot < cache.slots.size(); ++slot)
      if (cache.slots[slot].text.moves() || runs(slot)) cache.slots[slot].text.clear();
    cache.forget_pass();
    throw;
  }
  for (Slot& slot : cache.slots) slot.text.moved();
  cache.forget_pass();
  for (const Run& part : parts) {
    cache.slots[part.slot].text.run(part.rows);
    cache.slots[part.slot].first = part.rows.first;
  }
  return found;
}

edgespec_result run_pass(edgespec_cache& cache, const edgespec_request& r) {
  Planned p;
  const std::vector<Run> parts = plan_rows(cache, r, p);
  choose_heads(r, p);
  p.gates = gates_of(cache.model, r);
  return launch_text(cache, p, parts, r.inputs, r.top, 0);
}

edgespec_result run_rows(edgespec_cache& cache, int32_t slot, const TextRows& wanted) {
  Planned p;
  const size_t n = size_t(p.rows = wanted.count);
  p.plan.assign(6 * n, 0);
  std::copy_n(wanted.tokens, n, p.plan.begin());
  const int64_t how =
      wanted.draft * int64_t(kDraft) | (wanted.parents != nullptr) * int64_t(kTree) | wanted.mutual * int64_t(kMutual);
  const std::vector<Run> parts{{slot, {p.plan.data(), p.rows, 0, p.rows, wanted.offset, how}}};
  if (wanted.parents) std::copy_n(wanted.parents, n, parts[0].rows.line(kParents));
  cache.at(slot).text.plan(parts[0].rows, slot);
  for (int i = wanted.last ? p.rows - wanted.last : 0; i < p.rows && !wanted.unscored; ++i) p.heads.push_back(i);
  const Gates& at = cache.model.gates;
  p.gates = at.whole();
  if (wanted.gates) std::copy_n(wanted.gates, size_t(at.count), p.gates.get());
  if (wanted.inputs && !wanted.fused) std::swap(p.gates[at.embed], p.gates[at.load]);
  if (wanted.bare) std::fill_n(p.gates.get(), 2 * at.layers, false);
  if (wanted.unscored) p.gates[at.lm] = false;
  if (wanted.hidden || wanted.auxiliary) p.gates[at.hidden] = true;
  if (wanted.auxiliary && at.auxiliary >= 0) p.gates[at.auxiliary] = true;
  p.columns = wanted.columns;
  return launch_text(cache, p, parts, wanted.inputs, wanted.top, 0);
}

edgespec_result run_heads(edgespec_cache& cache, int32_t group, const float* hidden, int32_t rows, int32_t top) {
  const Gates& at = cache.model.gates;
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
  return launch(cache, p, hidden, top);
}

void check_text(edgespec_cache& cache, int32_t slot, const int64_t* tokens, int64_t count) {
  const int64_t length = cache.at(slot).text.length(), room = cache.layout.capacity(cache.each);
  if (count > room - length)
    refuse(std::to_string(count) + " tokens after " + std::to_string(length) + ": expected at most " +
           std::to_string(room) + " in a slot");
  if (!count) return;
  const edgespec_model& model = cache.model;
  const int64_t last = length + count - 1;
  check_reach(model.program, model.file.weights, gates_of(model, edgespec_request{}).get(),
              {tokens, count, last, last});
}

edgespec_result embed(edgespec_cache& cache, const int64_t* tokens, int32_t count) {
  const Gates& at = cache.model.gates;
  Planned p;
  p.rows = count;
  p.plan.assign(6 * size_t(count), 0);
  std::copy_n(tokens, count, p.plan.begin());
  std::fill_n(p.plan.begin() + 4 * count, count, -1);
  p.gates = std::make_unique<bool[]>(size_t(at.count));
  p.gates[at.embed] = p.gates[at.hidden] = true;
  std::fill(p.gates.get() + at.plane, p.gates.get() + at.count, true);
  return launch(cache, p, nullptr, 0);
}

edgespec_result read_chunk(edgespec_cache& cache, int32_t slot, const int64_t* tokens, int count, bool auxiliary) {
  const std::vector<int32_t> slots(size_t(count), slot);
  edgespec_request r{};
  r.rows = count;
  r.tokens = tokens;
  r.slots = slots.data();
  Planned p;
  const std::vector<Run> parts = plan_rows(cache, r, p, kRead);
  if (auxiliary) r.hidden = EDGESPEC_AUXILIARY;
  p.gates = gates_of(cache.model, r);
  const edgespec_result found = launch_text(cache, p, parts, nullptr, 0, count);
  cache.slots[slot].text.keep(nullptr, count);
  return found;
}

void settle(edgespec_cache& cache, int32_t slot) {
  Text& text = cache.slots[slot].text;
  const bool behind = text.delta() && text.held().first < text.length();
  if (behind || text.moves()) {  // what `keep` left to the next pass; behind: by a row that is forgotten
    const int64_t token = 0;
    edgespec_request r{};
    r.rows = 1;
    r.tokens = &token;
    r.slots = &slot;
    Planned p;
    std::vector<Run> parts;
    if (behind) parts = plan_rows(cache, r, p, kDraft);
    p.gates = gates_of(cache.model, r);
    launch_text(cache, p, parts, nullptr, 0, 0);
  }
}

void keep_states(edgespec_cache& cache, int32_t slot) {
  settle(cache, slot);
  cache.slots[slot].text.checkpoint();
}

}  // namespace edgespec
