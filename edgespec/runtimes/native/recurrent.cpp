// Layers with other states than keys and values: short convolutions, gated delta rules (arXiv 2412.06464) and state
// spaces (Mamba-2, arXiv 2405.21060), whose heads have a state S [dim, n] that each token changes:
//   S = decay S + k (beta (v - decay S^T k))^T, with output S^T q; or S = decay S + k (beta v)^T, with output S^T q +
//   skip v.
//
// A layer's inputs from tokens are stored in a ring of rows (layout.h): a pass writes its rows after the text, and the
// next pass overwrites those of rejected draft tokens.  A state cannot be rolled back, so it only ever holds committed
// tokens.  A pass first advances it over the tokens that were committed since (recall).  Its own rows continue from a
// copy (mix, delta), tile by tile, so that a state is read once and written once.  A token changes a state by the same
// operations in the same order, whether it is committed or drafted.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "pass.h"

namespace edgespec {
namespace {

constexpr float kSquares = 1e-6f;  // added to the squares of what becomes a unit vector

[[noreturn]] void fail(const std::string& what) { throw std::invalid_argument("edgespec: " + what); }

}  // namespace

// The row and the length - 1 tokens before it, the oldest first.
void Pass::before(int row, int length, Before* seen) const {
  const int64_t *parents = plan(4), *visible = plan(3);
  seen[length - 1] = {row, 0};
  for (int j = length - 2; j >= 0; --j) {
    const Before& later = seen[j + 1];
    const bool root = later.row >= 0 && parents[later.row] < 0;
    seen[j] = root            ? Before{-1, visible[later.row] - 1}
              : later.row < 0 ? Before{-1, later.place - 1}
                              : Before{parents[later.row], 0};
  }
}

// One row, and what it leaves to tokens after it.  No row reads a state that another row of the pass writes (check).
void Pass::convolve(const Step& s, int row) {
  const Cache kv = cache(static_cast<int>(slots()[row]));
  const size_t k = s.k;
  const float* x = floats(s.x);
  float *out = floats(s.out) + row * k, *own = kv.state(s.layer, plan(5)[row]);
  for (size_t i = 0; i < k; ++i) own[i] = x[row * 3 * k + i] * x[row * 3 * k + 2 * k + i];
  if (s.bias >= 0)
    std::memcpy(out, vector(s.bias), k * 4);
  else
    std::fill_n(out, k, 0.f);
  Before seen[kMaxTaps];
  before(row, s.length, seen);
  for (int j = 0; j < s.length; ++j) {  // the oldest first, in every pass
    const float* w = vector(s.w) + j * k;
    if (seen[j].row >= 0) {
      const float *b = x + seen[j].row * 3 * k, *v = b + 2 * k;
      for (size_t i = 0; i < k; ++i) out[i] += w[i] * (b[i] * v[i]);
    } else if (seen[j].place >= 0) {
      const float* kept = kv.state(s.layer, seen[j].place);
      for (size_t i = 0; i < k; ++i) out[i] += w[i] * kept[i];
    }
  }
  for (size_t i = 0; i < k; ++i) out[i] *= x[row * 3 * k + k + i];
}

// The oldest row first, as a convolution of taps is written down.
void Pass::depthwise(const Step& s, int row) {
  const int64_t* slots = this->slots();
  const size_t k = s.k, groups = s.n ? s.n : 1, size = k / groups;
  const float* own = s.b >= 0 ? floats(s.b) + row * 2 * s.length * groups + s.at : nullptr;
  const float *x = floats(s.x), *w = vector(s.w);
  float* out = floats(s.out) + row * k;
  if (s.bias >= 0)
    std::memcpy(out, vector(s.bias), k * 4);
  else
    std::fill_n(out, k, 0.f);
  for (int j = 0; j < s.length; ++j, w += k) {
    const int from = row - (s.length - 1 - j);
    if (from < 0 || slots[from] != slots[row]) continue;
    const float* seen = x + from * k;
    for (size_t g = 0; g < groups; ++g) {
      const float more = own ? own[(s.length - 1 - j) * groups + g] : 0.f;
      for (size_t i = g * size; i < (g + 1) * size; ++i) out[i] += (w[i] + more) * seen[i];
    }
  }
}

// ---- gated delta rules
// -----------------------------------------------------------------------------------------------

// How far the state of a layer must come for the rows of a slot.  Without word of what is committed it stays.
Pass::Sequence Pass::sequence(int layer, int first) const {
  const int64_t* slots = this->slots();
  Sequence q{static_cast<int>(slots[first]), first, 0, 0, 0, plan(3)[first], 0};
  while (first + q.count < in_.rows && slots[first + q.count] == slots[first]) ++q.count;
  q.applied = q.kept = *cache(q.slot).applied(layer);
  for (int m = 0; m < in_.move_count; ++m)
    if (in_.moves[m * 3] == q.slot && in_.moves[m * 3 + 1] == kCommitted) q.kept = in_.moves[m * 3 + 2];
  return q;
}

// Whether the rows of a slot follow each other, so that the state may hold them all afterwards.
bool Pass::chain(const Sequence& q) const {
  for (int r = q.first; r < q.first + q.count; ++r)
    if (plan(4)[r] != (r == q.first ? -1 : r - 1) || plan(5)[r] != q.visible + r - q.first) return false;
  return true;
}

void Pass::check_states() const {
  program_.each(in_.gates, [&](const Step& s) {
    if (s.op != Op::kDelta) return;
    for (int first = 0; first < in_.rows;) {
      const Sequence q = sequence(s.layer, first);
      int64_t last = 0;
      for (int r = first; r < first + q.count; ++r) {
        last = std::max(last, plan(5)[r]);
        if (plan(4)[r] < 0 && plan(3)[r] != q.visible) fail("rows of one slot go on from different states");
      }
      const bool whole = q.kept == q.visible + q.count && chain(q);
      if (q.applied < 0 || q.applied > q.kept || q.applied > q.visible || (q.kept > q.visible && !whole))
        fail("a state of " + std::to_string(q.applied) + " tokens cannot be that of " + std::to_string(q.kept) +
             " for rows that see " + std::to_string(q.visible));
      if (std::max(q.visible - q.applied - 1, last - q.kept) + s.length > kStateRows)
        fail("rows lie further apart than states of tokens are kept");
      first += q.count;
    }
  });
}

// Orders the rows so that a state is no longer needed once its last row has continued from it.  A row takes over its
// parent's state if it is the child with the largest subtree, and otherwise a copy one level up.  So the number of
// levels is at most the logarithm of the rows.
void Pass::order_rows() {
  const int64_t* parents = plan(4);
  std::vector<int> size(in_.rows, 1);
  for (int r = in_.rows - 1; r >= 0; --r)
    if (parents[r] >= 0) size[parents[r]] += size[r];
  std::vector<std::vector<int>> children(in_.rows);
  std::vector<Turn> open;
  const auto push = [&](std::vector<int>& rows, int level) {  // the largest is to be taken last
    std::stable_sort(rows.begin(), rows.end(), [&](int a, int b) { return size[a] > size[b]; });
    for (size_t i = 0; i < rows.size(); ++i) open.push_back({rows[i], level, i ? level + 1 : level});
  };
  for (int r = 0; r < in_.rows; ++r)
    if (parents[r] >= 0) children[parents[r]].push_back(r);
  turns_.clear();
  levels_ = 1;
  for (const Sequence& q : sequences_) {
    std::vector<int> roots;
    for (int r = q.first; r < q.first + q.count; ++r)
      if (parents[r] < 0) roots.push_back(r);
    push(roots, 0);
    while (!open.empty()) {
      const Turn turn = open.back();
      open.pop_back();
      turns_.push_back(turn);
      levels_ = std::max(levels_, turn.to + 1);
      push(children[turn.row], turn.to);
    }
  }
}

void Pass::plan_states(const Step& s) {
  sequences_.clear();
  recalled_ = 0;
  for (int first = 0; first < in_.rows; first += sequences_.back().count) {
    sequences_.push_back(sequence(s.layer, first));
    sequences_.back().recalled = recalled_;
    recalled_ += static_cast<int>(sequences_.back().visible - sequences_.back().applied);
  }
  if (turns_.empty()) order_rows();
  mixed_ = static_cast<float*>(scratch_.mixed.get(size_t(recalled_ + in_.rows) * program_.state_width * 4 + 64));
}

// The phases of a delta rule, one after the other; 0: it is done.
int Pass::open_delta(const Step& s) {
  for (;;) {
    int chunks = 0;
    switch (stage_++) {
      case 0:
        plan_states(s);
        chunks = recalled_;
        break;
      case 1: chunks = in_.rows; break;
      case 2: return static_cast<int>(sequences_.size()) * s.heads;
      default:
        for (const Sequence& q : sequences_) *cache(q.slot).applied(s.layer) = q.kept;
        stage_ = 0;
        return 0;
    }
    if (chunks > 1 && int64_t(chunks) * s.k > kSerial) return chunks;
    for (int i = 0; i < chunks; ++i) delta(s, i);
  }
}

void Pass::delta(const Step& s, int chunk) {
  stage_ == 1 ? recall(s, chunk) : stage_ == 2 ? mix(s, chunk) : advance(s, chunk);
}

// Unit vectors q and k, and v, after the convolution of rows [length]; decays and betas come from the last row.
void Pass::mix_one(const Step& s, const float* const* rows, const float* own, float* y) const {
  k_.convolve(rows, vector(s.w), vector(s.upbias), s.length, s.k, y);
  const bool unit = !s.spaces();
  for (int head = 0; head < 2 * s.kv; ++head, y += s.dim) {
    if (!unit) continue;
    k_.norm(y, s.dim, nullptr, kSquares / static_cast<float>(s.dim), y);
    const float root = std::sqrt(static_cast<float>(s.dim));
    k_.scale(y, s.dim, 1.f / (head < s.kv ? static_cast<float>(s.dim) : root));  // queries: once more, for the scores
  }
  std::memcpy(y + size_t(s.heads) * s.n, own + s.k, (size_t(program_.state_width) - s.k) * 4);
}

// A token from before the pass that the state does not hold yet.
void Pass::recall(const Step& s, int chunk) {
  size_t at = sequences_.size() - 1;
  while (sequences_[at].recalled > chunk) --at;
  const Sequence& q = sequences_[at];
  const Cache kv = cache(q.slot);
  const int64_t token = q.applied + chunk - q.recalled;
  const float* rows[kMaxTaps];
  for (int j = 0; j < s.length; ++j) {
    const int64_t seen = token - (s.length - 1 - j);
    rows[j] = seen < 0 ? nullptr : kv.state(s.layer, seen);
  }
  mix_one(s, rows, rows[s.length - 1], mixed(chunk));
}

// A row of the pass, and what it leaves to tokens after it.
void Pass::mix(const Step& s, int row) {
  const Cache kv = cache(static_cast<int>(slots()[row]));
  const float* x = floats(s.x);
  float *own = kv.state(s.layer, plan(5)[row]), *decays = own + s.k;
  std::memcpy(own, x + size_t(row) * s.k, size_t(s.k) * 4);
  const float* b = s.spaces() ? nullptr : floats(s.b) + size_t(row) * s.heads;
  k_.decays(floats(s.a) + size_t(row) * s.heads, b, vector(s.bias), vector(s.rate), s.heads, decays,
            decays + round_up(s.heads, kTile));
  if (s.scale != 1) k_.scale(decays + round_up(s.heads, kTile), s.heads, s.scale);
  Before seen[kMaxTaps];
  before(row, s.length, seen);
  const float* rows[kMaxTaps];
  for (int j = 0; j < s.length; ++j)
    rows[j] = seen[j].row >= 0     ? x + size_t(seen[j].row) * s.k
              : seen[j].place >= 0 ? kv.state(s.layer, seen[j].place)
                                   : nullptr;
  mix_one(s, rows, own, mixed(recalled_ + row));
}

// One head of one sequence: its state up to what is committed, then the rows of the pass, normed and gated.
void Pass::advance(const Step& s, int chunk) {
  const Sequence& q = sequences_[chunk / s.heads];
  const int head = chunk % s.heads, key_head = head / (s.heads / s.kv);
  const size_t tile = size_t(s.dim) * kTile, width = size_t(s.heads) * s.n;
  const size_t query_at = size_t(key_head) * s.dim, key_at = query_at + size_t(s.kv) * s.dim;
  thread_local std::vector<float> levels;
  levels.resize(levels_ * tile);
  for (int part = 0; part < s.n / kTile; ++part) {
    float* state = cache(q.slot).matrix(s.layer) + (size_t(head) * (s.n / kTile) + part) * tile;
    const size_t value_at = size_t(2) * s.kv * s.dim + size_t(head) * s.n + size_t(part) * kTile;
    const auto step = [&](const float* mixed, const float* from, float* to, float* out) {
      const float *q = mixed + query_at, *k = mixed + key_at, *v = mixed + value_at, *decays = mixed + s.k;
      const float decay = decays[head], beta = decays[round_up(s.heads, kTile) + head];
      if (s.spaces())
        k_.space(from, to, s.dim, q, k, v, decay, beta, vector(s.up)[head], out);
      else
        k_.delta(from, to, s.dim, q, k, v, decay, beta, out);
    };
    if (q.applied)
      std::memcpy(levels.data(), state, tile * 4);
    else
      std::fill_n(levels.data(), tile, 0.f);
    for (int64_t token = q.applied; token < q.visible; ++token) {
      step(mixed(q.recalled + static_cast<int>(token - q.applied)), levels.data(), levels.data(), nullptr);
      if (token + 1 == q.kept) std::memcpy(state, levels.data(), tile * 4);
    }
    for (int i = q.first; i < q.first + q.count; ++i) {
      const Turn& turn = turns_[i];
      step(mixed(recalled_ + turn.row), levels.data() + turn.from * tile, levels.data() + turn.to * tile,
           floats(s.out) + turn.row * width + size_t(head) * s.n + size_t(part) * kTile);
    }
    if (q.kept > q.visible) std::memcpy(state, levels.data(), tile * 4);  // a chain has one level
  }
  for (int r = q.first; r < q.first + q.count; ++r) {
    float* out = floats(s.out) + r * width + size_t(head) * s.n;
    if (!s.spaces()) k_.norm(out, s.n, vector(s.norm), s.eps, out);
    k_.glu[kSilu](floats(s.z) + r * width + size_t(head) * s.n, out, s.n, out);
  }
}

}  // namespace edgespec
