#include "heads.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>

namespace edgespec {
namespace {

constexpr size_t kMostTreeNodes = 16;  // beyond it rows cost more on a CPU than they bring

}  // namespace

std::vector<std::pair<HeadPath, double>> grow_tree(const HeadRanks& ranks, size_t most) {
  using Entry = std::pair<double, HeadPath>;  // the chance, negative, and places in the orders of the heads
  std::vector<std::vector<int32_t>> orders;
  for (const auto& head : ranks) {
    orders.emplace_back(head.size());
    std::iota(orders.back().begin(), orders.back().end(), 0);
    std::stable_sort(orders.back().begin(), orders.back().end(),
                     [&](int32_t a, int32_t b) { return head[size_t(a)] > head[size_t(b)]; });
  }
  const auto share = [&](size_t head, int32_t place) { return ranks[head][size_t(orders[head][size_t(place)])]; };
  std::vector<std::pair<HeadPath, double>> found;
  if (ranks.empty() || ranks[0].empty()) return found;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> best;
  best.push({-share(0, 0), {0}});
  while (!best.empty() && found.size() < most) {
    const auto [negative, places] = best.top();
    best.pop();
    if (negative >= 0) break;  // never right: no more of these
    const size_t depth = places.size();
    HeadPath path;
    for (size_t head = 0; head < depth; ++head) path.push_back(orders[head][size_t(places[head])]);
    found.emplace_back(path, -negative);
    const double above = -negative / share(depth - 1, places.back());
    if (size_t(places.back()) + 1 < ranks[depth - 1].size()) {  // the next guess of the same head
      HeadPath next = places;
      ++next.back();
      best.push({-above * share(depth - 1, next.back()), next});
    }
    if (depth < ranks.size() && !ranks[depth].empty()) {  // the first guess of the next head
      HeadPath next = places;
      next.push_back(0);
      best.push({negative * share(depth, 0), next});
    }
  }
  return found;
}

std::vector<HeadPath> best_tree(const HeadRanks& ranks, const std::function<double(int64_t)>& v, double heads) {
  const auto nodes = grow_tree(ranks, kMostTreeNodes);
  double tokens = 1, gain = 1;
  size_t size = 0;
  for (size_t count = 1; count <= nodes.size(); ++count) {
    tokens += nodes[count - 1].second;
    const double speed = tokens / (v(int64_t(1 + count)) + heads);
    if (speed > gain) size = count, gain = speed;
  }
  std::vector<HeadPath> found;
  for (size_t i = 0; i < size; ++i) found.push_back(nodes[i].first);
  return found;
}

std::vector<HeadPath> head_chain(size_t length) {
  std::vector<HeadPath> found;
  for (size_t depth = 1; depth <= length; ++depth) found.emplace_back(depth, 0);
  return found;
}

Medusa::Medusa(NativeTarget& target, const HeadGroup& group, const char* name, std::vector<HeadPath> paths,
               int64_t cycles)
    : target_(target), group_(group), name_(name), paths_(std::move(paths)), cycles_(cycles) {
  std::sort(paths_.begin(), paths_.end(),
            [](const HeadPath& a, const HeadPath& b) { return a.size() != b.size() ? a.size() < b.size() : a < b; });
  for (size_t node = 0; node < paths_.size(); ++node) {
    const HeadPath& path = paths_[node];
    if (path.size() > size_t(group_.count)) refuse("a tree of more heads than there are");
    const HeadPath above(path.begin(), path.end() - 1);
    const auto parent = std::find(paths_.begin(), paths_.end(), above);
    parents_.push_back(above.empty() ? -1 : static_cast<int32_t>(parent - paths_.begin()));
    chain_ = chain_ && parents_.back() == static_cast<int32_t>(node) - 1;
    top_ = std::max(top_, 1 + path.back());
  }
}

DrafterFacts Medusa::facts() const {
  DrafterFacts found;
  found.at_once = !cycles_;
  return found;
}

std::vector<int64_t> Medusa::rows(int64_t budget) const {
  if (cycles_) return Drafter::rows(budget);
  std::vector<int64_t> found;
  for (int64_t depth = 0; depth <= budget; ++depth)
    found.push_back(1 + std::count_if(paths_.begin(), paths_.end(),
                                      [&](const HeadPath& path) { return int64_t(path.size()) <= depth; }));
  return found;
}

bool Medusa::benchmark_step() {
  const std::vector<float> zeros(size_t(target_.hidden()), 0);
  target_.run_heads(group_.number, zeros.data(), top_);
  return true;
}

// Asks each head for its best tokens.
Medusa::Best Medusa::best(int32_t top) const {
  const edgespec_result found = target_.run_heads(group_.number, hidden_.data(), top);
  if (found.rows != group_.count) refuse("heads that the manifest does not describe");
  const size_t size = size_t(found.rows) * size_t(top);
  Best made{{found.ids, found.ids + size}, {found.values, found.values + size}};
  for (size_t i = 0; i < size; i += size_t(top))
    if (!std::isfinite(made.values[i])) throw Failure(EDGESPEC_BROKEN, "heads that give NaN or infinity");
  for (int64_t& id : made.ids) {
    if (id < 0 || (!group_.tokens.empty() && id >= int64_t(group_.tokens.size())))
      refuse("heads with fewer tokens than are asked for");
    if (!group_.tokens.empty()) id = group_.tokens[size_t(id)];
  }
  return made;
}

Proposal Medusa::propose(const Request& request, int64_t budget, const LeastGain&) {
  if (hidden_.empty()) return {};
  if (cycles_) return block(request.tokens.back(), budget);
  if (paths_.empty()) return {};
  const Best found = best(top_);
  Proposal made;
  for (const HeadPath& path : paths_)
    made.tokens.push_back(found.ids[(path.size() - 1) * size_t(top_) + size_t(path.back())]);
  if (!chain_) made.parents = parents_;
  return made;
}

// Makes a chain, and replaces its least certain guesses by the model's own in each of the cycles, fewer each time.
Proposal Medusa::block(int64_t pending, int64_t budget) const {
  const Best found = best(2);
  const size_t size = size_t(budget), count = std::min(size_t(group_.count), size);
  std::vector<int64_t> tokens(size + 1, found.ids[2 * (count - 1)]);  // beyond the heads: the last guess again
  std::vector<double> margin(size, 0);                                // how sure each guess is
  tokens[0] = pending;
  for (size_t i = 0; i < count; ++i) {
    tokens[i + 1] = found.ids[2 * i];
    margin[i] = found.values[2 * i] - found.values[2 * i + 1];
  }
  for (int64_t cycle = 0; cycle < cycles_; ++cycle) {
    const size_t renewed = size_t((budget * (cycles_ - cycle) + cycles_ - 1) / cycles_);
    const edgespec_result rows = target_.run({tokens.data(), static_cast<int32_t>(tokens.size())});
    std::vector<size_t> order(size);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return margin[a] < margin[b]; });
    order.resize(renewed);
    for (size_t at : order) {
      const float* row = rows.logits + at * size_t(rows.columns);
      const int64_t first = std::max_element(row, row + rows.columns) - row;
      float second = -HUGE_VALF;
      for (int64_t i = 0; i < rows.columns; ++i)
        if (i != first) second = std::max(second, row[i]);
      tokens[at + 1] = first;
      margin[at] = row[first] - second;
    }
  }
  Proposal made;
  made.tokens.assign(tokens.begin() + 1, tokens.end());
  return made;
}

void Medusa::observe(const Proposal&, const Verdict&, const Seen& seen) {
  if (!seen.hidden) refuse("the target gave no hidden states");
  const float* row = seen.hidden + size_t(seen.rows - 1) * size_t(seen.columns);
  hidden_.assign(row, row + target_.hidden());
}

}  // namespace edgespec
