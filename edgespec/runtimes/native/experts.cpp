// Mixtures of experts: each row is sent to a few experts, and experts without rows are not read.
//
// Rows are gathered by expert; an expert's matrices are read once for all its rows.  An expert's output for a row does
// not depend on other rows, and a row's experts are added up in the order in which the row ranks them.  So experts may
// be computed in any order: where they come from a store (expert_store.h), first those that are in memory.
#include <algorithm>
#include <cstring>

#include "expert_store.h"
#include "pass.h"

namespace edgespec {

// The best of a row's scores as probabilities, the first of equals first, then those that every row is sent to: k
// weights, then k numbers of experts.
void Pass::route(const Step& s, int row) {
  thread_local std::vector<float> kept, order, open;
  const int n = s.n - s.first, k = s.k - s.first, padded = round_up(s.n, kTile);
  const float* x = floats(s.x) + size_t(row) * s.n;
  open.assign(size_t(padded) + kTile, 0.f);  // sigmoids
  std::memcpy(open.data(), x, size_t(s.n) * 4);
  kept.assign(size_t(padded) + kTile, 1.f);
  k_.glu[kSigmoid](open.data(), kept.data(), padded, open.data());
  float *p = kept.data(), *out = floats(s.out) + size_t(row) * 2 * s.k, sum = 1, chosen = 0;
  if (s.fn == kSigmoid) {
    std::memcpy(p, open.data(), size_t(n) * 4);
    for (int i = 0; i < n; ++i) sum = p[i] == p[i] ? sum : p[i];  // NaNs stay, as those of a softmax do
  } else {
    std::fill_n(p, padded, -3e38f);
    std::memcpy(p, x, size_t(n) * 4);
    float largest = 0;
    k_.largest(p, 0, padded, 1, &largest);
    k_.exponentials(p, 0, padded, 1, &largest, &sum);
  }
  order.assign(p, p + n);
  for (int i = 0; s.bias >= 0 && i < n; ++i) order[i] += vector(s.bias)[i];
  for (int j = 0; j < k; ++j) {
    const int best = static_cast<int>(std::max_element(order.begin(), order.end()) - order.begin());
    out[j] = p[best];
    out[s.k + j] = static_cast<float>(best);
    chosen += p[best];
    order[best] = -3e38f;
  }
  if (s.add && sum == sum) sum = chosen;  // a NaN that was not chosen stays
  for (int j = 0; j < k; ++j) {
    out[j] = out[j] / sum * s.scale;
    if (s.w >= 0) out[j] *= vector(s.w)[static_cast<int>(out[s.k + j])];
  }
  for (int j = 0; j < s.first; ++j) {
    out[k + j] = open[n + j];
    out[s.k + k + j] = static_cast<float>(n + j);
  }
}

// Sorts rows by expert, and copies the rows' activations in that order.
void Pass::gather(const Step& s) {
  const int rows = in_.rows, each = s.heads, blocks = blocks_of(s.k);
  const float* routed = floats(s.x);
  std::vector<int> sent(s.times);
  const auto expert = [&](int row, int j) { return static_cast<int>(routed[(size_t(row) * 2 + 1) * each + j]); };
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < each; ++j) ++sent[expert(r, j)];
  experts_.clear();
  pieces_.clear();
  for (int id = 0; id < s.times; ++id)
    if (sent[id]) experts_.push_back({id, 0, sent[id], 0});
  if (in_.experts) {
    in_.experts->count(rows, rows * each, static_cast<int>(experts_.size()));
    std::stable_partition(experts_.begin(), experts_.end(),
                          [&](const Expert& e) { return in_.experts->holds(s.layer, e.id); });
  }
  std::vector<int> next(s.times);
  int at = 0;
  for (Expert& e : experts_) {
    e.piece = static_cast<int>(pieces_.size());
    for (int g = 0; g * kRowGroup < e.count; ++g) pieces_.push_back({at + g * kRowGroup, rows_in_group(e.count, g)});
    next[e.id] = e.first = at;
    at += e.count;
  }
  const size_t slots = size_t(rows) * each;
  slots_.resize(slots);
  const bool exact = takes_floats(s.kind);
  void* gathered = scratch_.expert_in.get(slots * (exact ? size_t(s.k) * 4 : size_t(blocks) * sizeof(Act)) + 64);
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < each; ++j) {
      const int id = expert(r, j), slot = next[id]++, group = r / kRowGroup;
      slots_[size_t(r) * each + j] = slot;
      if (exact) {
        std::memcpy(static_cast<float*>(gathered) + size_t(slot) * s.k,
                    static_cast<const float*>(act_[s.act]) + size_t(r) * s.k, size_t(s.k) * 4);
        continue;
      }
      const auto& own = *std::find_if(experts_.begin(), experts_.end(), [&](const Expert& e) { return e.id == id; });
      const int in = slot - own.first, part = in / kRowGroup, n = rows_in_group(own.count, part);
      Act* to = static_cast<Act*>(gathered) + size_t(own.first + part * kRowGroup) * blocks + in % kRowGroup;
      const Act* from = static_cast<const Act*>(group_acts(s.act, s.kind, s.k, group)) + r % kRowGroup;
      const int stride = rows_in_group(rows, group);
      for (int b = 0; b < blocks; ++b) to[size_t(b) * n] = from[size_t(b) * stride];
    }
  scratch_.expert_mid.get(slots * s.n * 4 + 64);
  scratch_.expert_acts.get(slots * blocks_of(s.n) * sizeof(Act) + 64);
  scratch_.expert_out.get(slots * s.k * 4 + 64);
}

// Chooses the experts that are computed next: all of them, or as many as their store holds twice.  Those after them are
// read in the meantime.
void Pass::next_experts(const Step& s) {
  const int all = static_cast<int>(experts_.size());
  ExpertStore* store = in_.experts;
  const auto ids = [&](int from, int to) {
    std::vector<int> found;
    for (int i = from; i < to; ++i) found.push_back(experts_[i].id);
    return found;
  };
  const int together = store ? store->together() : all, before = mixed_first_;
  mixed_first_ = mixed_end_;
  mixed_end_ = std::min(all, mixed_first_ + together);
  if (!store) return;
  if (mixed_first_)
    store->end(s.layer, ids(before, mixed_first_));
  else
    store->begin(s.layer, ids(0, mixed_end_));
  store->begin(s.layer, ids(mixed_end_, std::min(all, mixed_end_ + together)));
}

// Gate and up, what they become for the next matrix, and down, for some experts after the others; then the sum over a
// row's experts: a phase each.
int Pass::open_experts(const Step& s, int members) {
  switch (++mixing_) {
    case 1:
      if (!mixed_end_) gather(s);
      next_experts(s);
      return cut_experts(s.n / kBlock, members);
    case 2:
      if (!takes_floats(s.kind))
        return (mixed_end_ < static_cast<int>(experts_.size()) ? experts_[mixed_end_].piece
                                                               : static_cast<int>(pieces_.size())) -
               experts_[mixed_first_].piece;
      ++mixing_;
      [[fallthrough]];
    case 3: return cut_experts(tiles_of(s.k), members);
    case 4:
      if (mixed_end_ < static_cast<int>(experts_.size())) {
        mixing_ = 0;
        return open_experts(s, members);
      }
      if (in_.experts) in_.experts->end_all();
      return in_.rows;
    default: mixing_ = mixed_first_ = mixed_end_ = 0; return 0;
  }
}

// Cuts `units` of each of the present experts into chunks; those that may have to be waited for one after the other.
int Pass::cut_experts(int units, int members) {
  const int all = (mixed_end_ - mixed_first_) * units;
  if (!in_.experts) return cut(all, members);
  const int step = std::max(1, (units + members - 1) / members);
  bounds_.assign(1, 0);
  for (int expert = 0; expert < all; expert += units)
    for (int unit = 0; unit < units; unit += step) bounds_.push_back(expert + std::min(units, unit + step));
  return static_cast<int>(bounds_.size()) - 1;
}

void Pass::experts(const Step& s, int chunk) {
  float* mid = static_cast<float*>(scratch_.expert_mid.get(0));
  float* results = static_cast<float*>(scratch_.expert_out.get(0));
  Act* acts = static_cast<Act*>(scratch_.expert_acts.get(0));
  if (mixing_ == 2) {
    const Piece& piece = pieces_[experts_[mixed_first_].piece + chunk];
    Act* own = acts + size_t(piece.first) * blocks_of(s.n);
    for (int i = 0; i < piece.count; ++i)
      k_.quantize(mid + size_t(piece.first + i) * s.n, s.n, s.downkind, own + i, piece.count);
    for (int i = 0; i < piece.count * blocks_of(s.n) && s.high_alone(in_.gates, s.downkind); ++i)
      own[i].offset = offset_of_high(own[i].offset);
    return;
  }
  if (mixing_ == 4) {
    thread_local std::vector<float> kept;
    kept.assign(s.k, 0.f);
    const float* weights = floats(s.x) + size_t(chunk) * 2 * s.heads;
    for (int j = 0; j < s.heads; ++j)
      k_.accumulate(kept.data(), results + size_t(slots_[size_t(chunk) * s.heads + j]) * s.k, s.k, weights[j]);
    float* out = floats(s.out) + size_t(chunk) * s.k;
    if (s.add)
      k_.add(out, kept.data(), s.k);
    else
      std::memcpy(out, kept.data(), size_t(s.k) * 4);
    return;
  }
  const bool first = mixing_ == 1;
  const Kind kind = first ? s.kind : s.downkind;  // which take floats both, or neither
  const int units = first ? s.n / kBlock : tiles_of(s.k), k = first ? s.k : s.n;
  const auto rows_at = [&](int slot) -> const void* {
    const void* base = first ? scratch_.expert_in.get(0) : takes_floats(kind) ? static_cast<void*>(mid) : acts;
    if (takes_floats(kind)) return static_cast<const float*>(base) + size_t(slot) * k;
    return static_cast<const Act*>(base) + size_t(slot) * blocks_of(k);
  };
  alignas(64) float g[kRowGroup][kBlock], u[kRowGroup][kBlock], y[kRowGroup][kBlock];
  for (int unit = bounds_[chunk]; unit < bounds_[chunk + 1]; ++unit) {
    const Expert& expert = experts_[mixed_first_ + unit / units];
    const int at = unit % units;
    // tiles of matrix `part` (expert_store.h) of the expert, of which it has `count`
    const auto tiles_at = [&](int part, int id, int low, size_t count, size_t tile) -> Weights {
      if (!in_.experts) return tiles(s, kind, id, low, expert.id * count + tile, k);
      const uint8_t* high = in_.experts->part(s.layer, expert.id, part) + tile * tile_bytes(kind, k);
      if (kind != kP8 || s.high_alone(in_.gates, kind)) return high;
      return {high, in_.experts->part(s.layer, expert.id, part + 3) + tile * low_bytes(k)};
    };
    // adds the unit's part of the expert's bias to rows [n][ld] of `width` columns
    const auto add_bias = [&](int bias, float* to, int n, int ld, int width) {
      if (bias < 0) return;
      const float* own = vector(bias) + (size_t(expert.id) * units + at) * width;
      for (int i = 0; i < n; ++i) k_.add(to + size_t(i) * ld, own, width);
    };
    for (int part = 0; part * kRowGroup < expert.count; ++part) {
      const int n = rows_in_group(expert.count, part), slot = expert.first + part * kRowGroup;
      const void* act = rows_at(slot);
      if (!first) {
        float* to = results + size_t(slot) * s.k + at * kTile;
        k_.linear[kind](tiles_at(2, s.w, s.low, size_t(units), size_t(at)), k, act, n, to, s.k, kTile);
        add_bias(s.bias, to, n, s.k, kTile);
        continue;
      }
      for (int t = 0; t < 2; ++t) {
        const size_t count = size_t(units) * 2, tile = size_t(at) * 2 + t;
        k_.linear[kind](tiles_at(0, s.gate, s.gatelow, count, tile), k, act, n, &g[0][t * kTile], kBlock, kTile);
        k_.linear[kind](tiles_at(1, s.up, s.uplow, count, tile), k, act, n, &u[0][t * kTile], kBlock, kTile);
      }
      add_bias(s.gatebias, g[0], n, kBlock, kBlock);
      add_bias(s.upbias, u[0], n, kBlock, kBlock);
      k_.glu[s.fn](g[0], u[0], n * kBlock, y[0]);
      for (int i = 0; i < n; ++i) std::memcpy(mid + size_t(slot + i) * s.n + at * kBlock, y[i], kBlock * 4);
    }
  }
}

}  // namespace edgespec
