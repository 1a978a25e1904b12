#include "pass.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "adapters.h"
#include "expert_store.h"

namespace edgespec {
namespace {

size_t act_bytes(Kind kind, int k, int rows) {
  return takes_floats(kind) ? size_t(rows) * k * 4 : size_t(rows) * blocks_of(k) * sizeof(Act);
}

enum class Cut { kOnce, kSerial, kRows, kPieces, kOwn };

Cut cut_of(Op op) {
  constexpr Cut cuts[] = {
#define STEP(name, Name, cut, ...) Cut::cut,
#include "steps.inl"
  };
  return cuts[static_cast<int>(op)];
}

// Blocks that slots with tables may refer to.
int64_t pool_blocks(const PassInputs& in) {
  const size_t each = in.layout.slot_bytes(), block = in.layout.block_bytes();
  if (!in.layout.table) return 0;
  if (in.kv_bytes < each) throw std::invalid_argument("edgespec: a pool that is too small for its tables");
  return block ? int64_t(in.slots * (in.kv_bytes - each) / block) : INT32_MAX;
}

}  // namespace

Pass::Pass(const Program& program, const Kernels& kernels, const PassInputs& in, const PassOutputs& out,
           Scratch& scratch)
    : program_(program),
      k_(kernels),
      in_(in),
      out_(out),
      scratch_(scratch),
      active_(program.active(in.gates, in.gate_count)),
      blocks_(pool_blocks(in)),
      capacity_(in.layout.table ? int64_t(in.layout.table) * kKvBlock : in.layout.capacity(in.kv_bytes)) {
  split_slots();
  check();
  scratch_.floats.resize(program.floats.size());
  scratch_.acts.resize(program.acts.size());
  const int rows = std::max(in.rows, in.heads * active_.times);
  for (size_t i = 0; i < program.floats.size(); ++i)  // to whole tiles, so that vectors may write past a row's end
    float_[i] = static_cast<float*>(scratch_.floats[i].get(size_t(rows) * program.floats[i] * 4 + 64));
  for (size_t i = 0; i < program.acts.size(); ++i) {
    const int width = round_up(program.acts[i], 2 * kBlock);
    act_[i] = scratch_.acts[i].get(std::max(act_bytes(kF32, width, rows), act_bytes(kQ4, width, rows)) + 64);
  }
  see();
  apply_moves();
}

// Computes A x of the rows with adapters for the matrices of a step, from the activations that it multiplies.
void Pass::reduce(const Step& s) {
  const int weights[2] = {s.op == Op::kGlu ? s.gate : s.w, s.op == Op::kGlu ? s.up : -1};
  size_t numbers = 0;
  const auto each = [&](const auto& visit) {
    for (Adapted& rows : adapted_)
      for (int which = 0; which < 2; ++which)
        if (const auto* parts = weights[which] < 0 ? nullptr : in_.adapters->find(rows.adapter, weights[which]))
          for (const LowRank& part : *parts) visit(rows, which, part);
  };
  for (Adapted& rows : adapted_) rows.low[0].clear(), rows.low[1].clear();
  each([&](Adapted& rows, int, const LowRank& part) { numbers += size_t(rows.count) * part.rank; });
  if (!numbers) return;
  float* low = static_cast<float*>(scratch_.lows.get(numbers * 4 + 64));
  float* x = static_cast<float*>(scratch_.given.get(size_t(kRowGroup) * s.k * 4 + 64));
  const Adapted* read = nullptr;  // whose activations are in x
  each([&](Adapted& rows, int which, const LowRank& part) {
    const int group = rows.first / kRowGroup, inside = rows.first % kRowGroup;
    const void* act = group_acts(s.act, s.kind, s.k, group);
    const float* from = takes_floats(s.kind) ? static_cast<const float*>(act) + size_t(inside) * s.k : x;
    if (from == x && read != &rows) {
      const int stride = rows_in_group(in_.rows, group);
      for (int i = 0; i < rows.count; ++i)
        for (int at = 0; at < s.k; ++at) {
          const Act& block = static_cast<const Act*>(act)[size_t(at / kBlock) * stride + inside + i];
          x[size_t(i) * s.k + at] = static_cast<float>(block.q[at % kBlock]) * block.scale;
        }
      read = &rows;
    }
    for (int tile = 0; tile < tiles_of(part.rank); ++tile)
      k_.linear[part.kind](part.a + tile * tile_bytes(part.kind, s.k), s.k, from, rows.count, low + tile * kTile,
                           static_cast<size_t>(part.rank), std::min(kTile, part.rank - tile * kTile));
    for (int i = 0; i < rows.count * part.rank; ++i) low[i] *= part.scale;
    rows.low[which].push_back(low);
    low += size_t(rows.count) * part.rank;
  });
}

// Adds what adapters give to a tile of a matrix in the rows of a group, y [rows][ld].
void Pass::add_low(int which, int weight, int tile, int group, float* y, size_t ld) {
  alignas(64) float z[kRowGroup][kTile];
  for (const Adapted& rows : adapted_) {
    if (rows.first / kRowGroup != group || rows.low[which].empty()) continue;
    const auto& parts = *in_.adapters->find(rows.adapter, weight);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!parts[i].has(tile)) continue;
      k_.linear[parts[i].kind](parts[i].up(tile), parts[i].rank, rows.low[which][i], rows.count, z[0], kTile, kTile);
      for (int r = 0; r < rows.count; ++r) k_.add(y + size_t(rows.first % kRowGroup + r) * ld, z[r], kTile);
    }
  }
}

// Cuts the units of a matrix into chunks: first a long one for each thread, which streams it from end to end, then
// short ones that even out who was faster.
int Pass::cut(int units, int members) {
  bounds_.assign(1, 0);
  const int longer = members > 1 ? units * 3 / 4 / members : units;
  for (int i = 0; i < members && longer; ++i) bounds_.push_back(bounds_.back() + longer);
  const int pieces = 4 * members, left = units - bounds_.back();
  for (int i = 0, start = bounds_.back(); i < pieces && bounds_.back() < units; ++i) {
    const int end = start + static_cast<int>(int64_t(left) * (i + 1) / pieces);
    if (end > bounds_.back()) bounds_.push_back(end);
  }
  return static_cast<int>(bounds_.size()) - 1;
}

int Pass::next_phase(int members) {
  if (!merging_ && step_ && step_->op == Op::kAttend && splits_ > 1) {
    merging_ = true;
    return in_.rows * step_->kv;
  }
  merging_ = false;
  if (step_ && step_->op == Op::kLogits && in_.top) merge_best(*step_);
  if (step_ && step_->op == Op::kExperts && mixing_)
    if (const int chunks = open_experts(*step_, members)) return chunks;
  if (step_ && step_->op == Op::kDelta && stage_)
    if (const int chunks = open_delta(*step_)) return chunks;
  while (next_ < program_.steps.size()) {
    const Step& s = program_.steps[next_++];
    step_ = &s;
    const int rows = count(s);
    fit_offsets(s);
    if (!rows && cut_of(s.op) != Cut::kOnce) continue;
    if (in_.layers) in_.layers->enter(next_ - 1);
    switch (cut_of(s.op)) {
      case Cut::kOnce: run(0); continue;
      case Cut::kSerial:
        for (int r = 0; r < rows; ++r) run(r);
        continue;
      case Cut::kRows:
        each_ = 1;
        if (const int width = s.op == Op::kBlend ? s.k : std::max(s.n, s.k);
            int64_t(rows) * width > kSerial && rows > 1) {
          // a row of a small model takes less time than threads take to share a counter
          each_ = std::clamp(kRowWork / width, 1, std::max(1, rows / (2 * members)));
          return (rows + each_ - 1) / each_;
        }
        for (int r = 0; r < rows; ++r) run(r);
        continue;
      case Cut::kPieces: {
        const int64_t pieces = activate_pieces(s);
        if (pieces * kPiece > kSerial) return static_cast<int>(std::min<int64_t>(pieces, INT32_MAX));
        for (int i = 0; i < pieces; ++i) run(i);
        continue;
      }
      case Cut::kOwn: return open_own(s, members);
    }
  }
  step_ = nullptr;
  return 0;
}

const void* Pass::streamed(int id) const { return in_.layers->held(id); }

// Gives the activations that a matrix multiplies the offsets that it wants: the high plane of two has its own.
void Pass::fit_offsets(const Step& s) {
  if (s.op == Op::kQuantize || s.op == Op::kGlu) lowered_[s.out] = false;
  if (s.act < 0 || kKinds[s.kind].acts != kQ4) return;
  const bool high = s.high_alone(in_.gates);
  if (lowered_[s.act] == high) return;
  lowered_[s.act] = high;
  Act* a = static_cast<Act*>(act_[s.act]);
  for (size_t i = 0; i < size_t(count(s)) * blocks_of(s.k); ++i) {
    int sum = 0;
    for (const int8_t q : a[i].q) sum += q;
    a[i].offset = high ? offset_of_high(-8 * sum) : -8 * sum;
  }
}

// Cuts the work of a step that defines its own chunks.
int Pass::open_own(const Step& s, int members) {
  if (!adapted_.empty() && s.act >= 0 && s.op != Op::kExperts && s.op != Op::kLogits) reduce(s);
  switch (s.op) {
    case Op::kExperts: return open_experts(s, members);
    case Op::kDelta: return open_delta(s);
    case Op::kHeads: plan_queries(s); return (s.fills() ? 0 : s.heads) + (s.shared ? 0 : s.kv);
    case Op::kAttend:
      plan_attention(s);
      return static_cast<int>(std::min<int64_t>(int64_t(groups_.size()) * (s.kv / item_heads_) * splits_, INT32_MAX));
    case Op::kGlu: return cut((s.n + kBlock - 1) / kBlock, members);
    case Op::kLogits: {
      const int chunks = cut(tiles_of(columns(s)), members);
      if (in_.top) {
        scratch_.found_ids.get(size_t(chunks) * count(s) * in_.top * 8);
        scratch_.found_values.get(size_t(chunks) * count(s) * in_.top * 4);
      }
      return chunks;
    }
    default: return cut(tiles_of(s.n), members);  // a matrix
  }
}

void Pass::run(int chunk) {
  if (cut_of(step_->op) != Cut::kRows) return run_chunk(chunk);
  for (int r = chunk * each_, last = std::min(r + each_, count(*step_)); r < last; ++r) run_chunk(r);
}

void Pass::run_chunk(int chunk) {
  switch (step_->op) {
#define STEP(name, Name, ...) \
  case Op::k##Name: return name(*step_, chunk);
#include "steps.inl"
  }
}

void Pass::gate(const Step& s, int) {
  if (!s.open(in_.gates)) next_ += s.skip;
}

void Pass::embed(const Step& s, int row) {
  if (plan(0)[row] < 0) return;
  float* out = floats(s.out) + size_t(row) * s.k;
  const size_t token = static_cast<size_t>(plan(0)[row]), at = token * s.k;
  if (s.kind == kR32) {
    std::memcpy(out, static_cast<const float*>(weight(s.w)) + at, size_t(s.k) * 4);
  } else if (s.kind == kR8) {
    const int8_t* levels = static_cast<const int8_t*>(weight(s.w)) + at;
    const float scale = static_cast<const float*>(weight(s.bias))[token];
    for (int i = 0; i < s.k; ++i) out[i] = static_cast<float>(levels[i]) * scale;
  } else {
    k_.embed(s.kind, tiles(s, s.w, s.low, 0, s.k), s.k, plan(0)[row], out);
  }
  if (s.scale != 1)
    for (int i = 0; i < s.k; ++i) out[i] *= s.scale;
  if (s.positions >= 0) k_.add(out, vector(s.positions) + size_t(plan(1)[row]) * s.k, s.k);
}

void Pass::insert(const Step& s, int row) {
  if (plan(0)[row] >= 0) return;
  const float* from = in_.inserted + static_cast<size_t>(-1 - plan(0)[row]) * program_.inserted + s.at;
  float* out = floats(s.x) + size_t(row) * s.k;
  if (s.add)
    k_.add(out, from, s.k);
  else
    std::memcpy(out, from, size_t(s.k) * 4);
}

void Pass::place(const Step& s, int row) {
  k_.add(floats(s.x) + size_t(row) * s.k, vector(s.positions) + size_t(plan(1)[row]) * s.k, s.k);
}

// A row x [k] as the step's norm leaves it, y [k].
void Pass::normed(const Step& s, const float* x, float* y) const {
  if (s.center) {
    k_.center(x, s.k, y);
    x = y;
  }
  k_.norm(x, s.k, vector(s.norm), s.eps, y);
  if (s.beta >= 0) k_.add(y, vector(s.beta), s.k);
}

void Pass::quantize(const Step& s, int row) {
  const float* x = floats(s.x) + source(s, row) * s.k;
  float* target = takes_floats(s.kind) ? static_cast<float*>(act_[s.out]) + size_t(row) * s.k : nullptr;
  thread_local std::vector<float> kept, ordered;
  if (s.norms()) {
    kept.resize(s.k + 16);
    float* y = target && s.order < 0 ? target : kept.data();
    normed(s, x, y);
    x = y;
  }
  if (s.order >= 0) {
    ordered.resize(s.k);
    float* y = target ? target : ordered.data();
    const float* order = vector(s.order);
    for (int i = 0; i < s.k; ++i) y[i] = x[order[i] >= 0 && order[i] < s.k ? static_cast<int>(order[i]) : 0];
    x = y;
  }
  if (target) {
    if (x != target) std::memcpy(target, x, size_t(s.k) * 4);
    return;
  }
  const int blocks = blocks_of(s.k), group = row / kRowGroup, stride = rows_in_group(count(s), group);
  Act* out = static_cast<Act*>(act_[s.out]) + size_t(group) * kRowGroup * blocks + row % kRowGroup;
  k_.quantize(x, s.k, s.kind, out, stride);
}

const void* Pass::group_acts(int id, Kind kind, int k, int group) const {
  if (takes_floats(kind)) return static_cast<const float*>(act_[id]) + size_t(group) * kRowGroup * k;
  return static_cast<const Act*>(act_[id]) + size_t(group) * kRowGroup * blocks_of(k);
}

// One head of the rows of a group, from floats [rows, heads * dim] to y [rows, kMaxHeadDim], zero beyond dim.
void Pass::copy_head(int id, int heads, int head, int dim, int group, float* y) const {
  const int n = rows_in_group(in_.rows, group);
  for (int i = 0; i < n; ++i, y += kMaxHeadDim) {
    const size_t row = size_t(group) * kRowGroup + i;
    std::memcpy(y, floats(id) + (row * heads + head) * dim, size_t(dim) * 4);
    std::fill(y + dim, y + dim_, 0.f);
  }
}

// Turns one head of a row by its position, or each pair of channels by one of its three.
void Pass::turn(const Step& s, int row, float* y) const {
  const int half = s.rotary / 2;
  const float *cos = vector(s.cos), *sin = vector(s.sin);
  const size_t at = size_t(axis(0)[row]) * half;
  if (s.axes < 0 || (axis(1)[row] == axis(0)[row] && axis(2)[row] == axis(0)[row])) {
    k_.rotate(y, s.dim, s.rotary, cos + at, sin + at);
    return;
  }
  alignas(64) float own_cos[kMaxHeadDim / 2 + kTile], own_sin[kMaxHeadDim / 2 + kTile];
  for (int j = 0; j < half; ++j) {
    const int number = static_cast<int>(vector(s.axes)[j]);
    const size_t from = size_t(axis(number == 1 || number == 2 ? number : 0)[row]) * half + j;
    own_cos[j] = cos[from];
    own_sin[j] = sin[from];
  }
  k_.rotate(y, s.dim, s.rotary, own_cos, own_sin);
}

void Pass::heads(const Step& s, int chunk) {
  const int queries = s.fills() ? 0 : s.heads;
  const int head = s.shared ? chunk : chunk < s.kv ? queries + chunk : chunk - s.kv;  // keys first: they take longer
  const int dim = dim_, each = dim / kTile, rows = in_.rows;
  const bool given = s.qx >= 0;                              // projected by steps before
  const bool is_query = head < queries, is_key = !is_query;  // values come with their keys
  const int kv_head = head - queries;
  alignas(64) float y[kRowGroup][kMaxHeadDim], v[kRowGroup][kMaxHeadDim];
  const float* bias = given ? nullptr : vector(s.bias);
  const int64_t *positions = plan(1), *slots = s.memory ? in_.sources : this->slots(),
                *places = s.memory ? in_.sources + in_.rows : plan(5);
  for (int group = 0; group * kRowGroup < rows; ++group) {
    const int n = rows_in_group(rows, group);
    if (given) {
      copy_head(is_query ? s.qx : s.kx, is_query ? s.heads : s.kv, is_query ? head : kv_head, s.dim, group, y[0]);
      if (is_key) copy_head(s.vx, s.kv, kv_head, s.dim, group, v[0]);
    }
    const void* act = given ? nullptr : group_acts(s.act, s.kind, s.k, group);
    const auto multiply = [&](int head, float* to) {
      for (int t = 0; t < each; ++t)
        k_.linear[s.kind](tiles(s, s.w, s.low, size_t(head) * each + t, s.k), s.k, act, n, to + t * kTile, kMaxHeadDim,
                          kTile);
      for (int t = 0; t < each && !adapted_.empty(); ++t)
        add_low(0, s.w, head * each + t, group, to + t * kTile, kMaxHeadDim);
    };
    if (!given) multiply(head, y[0]);
    if (!given && is_key) multiply(head + s.kv, v[0]);
    for (int i = 0; i < n; ++i) {
      const int row = group * kRowGroup + i;
      if (bias) k_.add(y[i], bias + size_t(head) * s.dim, s.dim);
      if (bias && is_key) k_.add(v[i], bias + size_t(head + s.kv) * s.dim, s.dim);
      const int norm = is_query ? s.qnorm : s.knorm;
      if (is_key && s.vnorm >= 0) k_.norm(v[i], s.dim, vector(s.vnorm), s.eps, v[i]);
      if (norm >= 0 && !s.late) k_.norm(y[i], s.dim, vector(norm), s.eps, y[i]);
      if (s.rotary) turn(s, row, y[i]);
      if (norm >= 0 && s.late) k_.norm(y[i], s.dim, vector(norm), s.eps, y[i]);
      if (is_query) {
        k_.scale(y[i], dim, s.growth < 0 ? s.scale : s.scale * vector(s.growth)[positions[row]]);
        prepare_query(s, row, head, y[i]);
      } else {
        cache(s, static_cast<int>(slots[row])).append(k_, in_.tables, s.layer, kv_head, places[row], y[i], v[i]);
      }
    }
  }
}

// Number of row groups that use a whole chunk of a matrix before the next ones do: their activations stay in the second
// cache.
int Pass::groups_together(const Step& s) const {
  constexpr size_t kTogether = size_t(384) << 10;
  return static_cast<int>(std::max<size_t>(1, kTogether / act_bytes(s.kind, s.k, kRowGroup)));
}

void Pass::linear(const Step& s, int chunk) {
  const int rows = count(s), groups = (rows + kRowGroup - 1) / kRowGroup, together = groups_together(s);
  for (int group = 0; group < groups; group += together)
    for (int tile = bounds_[chunk]; tile < bounds_[chunk + 1]; ++tile)
      linear_tile(s, tile, group, std::min(groups, group + together));
}

// Columns of one tile, for these row groups.
void Pass::linear_tile(const Step& s, int tile, int first, int last) {
  const int rows = count(s), columns = std::min(kTile, s.n - tile * kTile);
  const float* bias = static_cast<const float*>(weight(s.bias));
  alignas(64) float y[kRowGroup][kTile];
  for (int group = first; group < last; ++group) {
    const int n = rows_in_group(rows, group);
    float* first_row = floats(s.out) + size_t(group) * kRowGroup * s.n + tile * kTile;
    for (int i = 0; i < n; ++i) __builtin_prefetch(first_row + size_t(i) * s.n, 1, 2);  // far from each other
    k_.linear[s.kind](tiles(s, s.w, s.low, tile, s.k), s.k, group_acts(s.act, s.kind, s.k, group), n, y[0], kTile,
                      kTile);
    if (!adapted_.empty()) add_low(0, s.w, tile, group, y[0], kTile);
    for (int i = 0; i < n; ++i) {
      float* out = first_row + size_t(i) * s.n;
      if (bias) k_.add(y[i], bias + tile * kTile, columns);
      if (s.add)
        k_.add(out, y[i], columns);
      else
        std::memcpy(out, y[i], size_t(columns) * 4);
    }
  }
}

void Pass::glu(const Step& s, int chunk) {
  const int groups = (in_.rows + kRowGroup - 1) / kRowGroup, together = groups_together(s);
  for (int group = 0; group < groups; group += together)
    for (int unit = bounds_[chunk]; unit < bounds_[chunk + 1]; ++unit)
      glu_unit(s, unit, group, std::min(groups, group + together));
}

// Columns of one unit, for these row groups.
void Pass::glu_unit(const Step& s, int unit, int first, int last) {
  constexpr int width = kBlock;
  const int units = (s.n + width - 1) / width, rows = in_.rows;
  const float *bias = static_cast<const float*>(weight(s.bias)), *up_bias = static_cast<const float*>(weight(s.upbias));
  alignas(64) float g[kRowGroup * kBlock], u[kRowGroup * kBlock], y[kRowGroup * kBlock];  // [rows, width]
  const bool blocks = !takes_floats(s.kind) && s.kind != kC8;
  const int columns = std::min(width, s.n - unit * width), wide = tiles_of(columns);
  for (int group = first; group < last; ++group) {
    const int n = rows_in_group(rows, group);
    const void* act = group_acts(s.act, s.kind, s.k, group);
    for (int t = 0; t < wide; ++t) {
      const size_t at = size_t(unit) * (width / kTile) + t;
      k_.linear[s.kind](tiles(s, s.gate, s.gatelow, at, s.k), s.k, act, n, g + t * kTile, width, kTile);
      if (s.up >= 0) k_.linear[s.kind](tiles(s, s.up, s.uplow, at, s.k), s.k, act, n, u + t * kTile, width, kTile);
      if (adapted_.empty()) continue;
      add_low(0, s.gate, static_cast<int>(at), group, g + t * kTile, width);
      if (s.up >= 0) add_low(1, s.up, static_cast<int>(at), group, u + t * kTile, width);
    }
    for (int i = 0; i < n && (bias || up_bias); ++i) {
      if (bias) k_.add(g + i * width, bias + size_t(unit) * width, columns);
      if (up_bias) k_.add(u + i * width, up_bias + size_t(unit) * width, columns);
    }
    if (wide * kTile < width)  // a part of a block: what is not computed must be zero
      for (int i = 0; i < n; ++i)
        for (int c = wide * kTile; c < width; ++c) g[i * width + c] = u[i * width + c] = 0;
    if (s.up < 0) std::fill_n(u, n * width, 1.f);
    k_.glu[s.fn](g, u, n * width, y);
    for (int i = 0; i < n && columns < width; ++i) std::memset(y + i * width + columns, 0, size_t(width - columns) * 4);
    if (blocks) {
      Act* out = static_cast<Act*>(act_[s.out]) + size_t(group) * kRowGroup * blocks_of(s.n) + size_t(unit) * n;
      k_.quantize_blocks(y, n, out);
      // k comes in pairs of blocks: the last one may have no columns
      if (unit == units - 1 && units < blocks_of(s.n)) std::fill_n(out + n, n, Act{});
    } else {
      float* out = s.kind == kC8 ? floats(s.out) : static_cast<float*>(act_[s.out]);
      for (int i = 0; i < n; ++i)
        std::memcpy(out + size_t(group * kRowGroup + i) * s.n + unit * width, y + i * width, size_t(columns) * 4);
    }
  }
}

}  // namespace edgespec
