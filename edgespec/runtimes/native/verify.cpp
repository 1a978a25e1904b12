#include "verify.h"

#include <algorithm>
#include <cmath>

namespace edgespec {

// ---- proposals -----------------------------------------------------------------------------------------------------

int32_t Proposal::depth(int32_t node) const {
  int32_t count = 0;
  for (; node >= 0; node = parent(node)) ++count;
  return count;
}

int32_t Proposal::deepest() const {
  int32_t found = chain() ? size() : 0;
  for (int32_t node = 0; node < size() && !chain(); ++node) found = std::max(found, depth(node));
  return found;
}

int32_t Proposal::tested(const std::vector<int32_t>& path) const {
  return int32_t(path.size()) + !children(path.empty() ? -1 : path.back()).empty();
}

std::vector<int32_t> Proposal::children(int32_t node) const {
  std::vector<int32_t> found;
  if (chain()) {
    if (node + 1 < size()) found.push_back(node + 1);
    return found;
  }
  for (int32_t i = node + 1; i < size(); ++i)
    if (parents[size_t(i)] == node) found.push_back(i);
  return found;
}

void Proposal::push_path(int32_t node, Pushed& pushed) const {
  if (node < 0) return;
  push_path(parent(node), pushed);
  pushed.push(tokens[size_t(node)]);
}

std::vector<int64_t> Proposal::rejected(const std::vector<int32_t>& path) const {
  std::vector<int64_t> found;
  for (auto below = children(path.empty() ? -1 : path.back()); !below.empty(); below = children(below.front()))
    found.push_back(tokens[size_t(below.front())]);
  return found;
}

void Proposal::cut(int64_t budget, const std::vector<int64_t>& stops) {
  const auto ends = [&](int32_t node) {
    return std::find(stops.begin(), stops.end(), tokens[size_t(node)]) != stops.end();
  };
  std::vector<int32_t> place(size_t(size()), -1);  // -1: it is cut
  int32_t kept = 0;
  bool all = true;
  for (int32_t node = 0; node < size(); ++node) {
    const int32_t above = parent(node);
    const bool stays = depth(node) <= budget && (above < 0 || (place[size_t(above)] >= 0 && !ends(above)));
    if (stays) place[size_t(node)] = kept++;
    all = all && stays;
  }
  if (all) return;
  for (int32_t node = 0; node < size(); ++node) {
    const int32_t to = place[size_t(node)];
    if (to < 0) continue;
    if (!chain()) parents[size_t(to)] = parents[size_t(node)] < 0 ? -1 : place[size_t(parents[size_t(node)])];
    tokens[size_t(to)] = tokens[size_t(node)];
    if (!probs.empty() && to != node) probs[size_t(to)] = std::move(probs[size_t(node)]);
  }
  tokens.resize(size_t(kept));
  if (!chain()) parents.resize(size_t(kept));
  if (!probs.empty()) probs.resize(size_t(kept));
}

// ---- rows ----------------------------------------------------------------------------------------------------------

namespace {

class RowSampler {
 public:
  RowSampler(const Proposal& proposal, const edgespec_result& rows, const Sampling& sampling, const Noise& noise,
             Prefix& prefix)
      : proposal(proposal), sampling(sampling), noise(noise), rows_(rows), prefix_(prefix), adjusted_(sampling) {}

  const Proposal& proposal;
  const Sampling& sampling;
  const Noise& noise;

  // The index, in the sequence, of the token that a row predicts.
  int64_t position(int32_t row) const {
    return int64_t(prefix_.text().size()) + (proposal.chain() ? row : proposal.depth(row - 1));
  }

  // The token that plain decoding emits at a row.
  int64_t choose(int32_t row) {
    if (rows_.ids) {
      if (!std::isfinite(rows_.values[size_t(row) * rows_.top])) refuse_logits();
      return rows_.ids[size_t(row) * rows_.top];
    }
    Pushed pushed(prefix_);
    if (sampling.reads_text()) proposal.push_path(row - 1, pushed);
    if (sampling.greedy()) return adjusted_.likeliest(logits(row), rows_.columns, prefix_);
    return adjusted_.support(logits(row), rows_.columns, prefix_).draw(noise, position(row), kTargetNoise);
  }

  // p at a row, after temperature and truncation.
  Chances chances(int32_t row) {
    Pushed pushed(prefix_);
    if (sampling.reads_text()) proposal.push_path(row - 1, pushed);
    return adjusted_.support(logits(row), rows_.columns, prefix_).chances();
  }

 private:
  const float* logits(int32_t row) const { return rows_.logits + size_t(row) * rows_.columns; }

  const edgespec_result& rows_;
  Prefix& prefix_;
  Adjusted adjusted_;
};

// Descends while plain decoding would have emitted the guess.  For a q of one token this equals rejection sampling;
// with q sampled with the target's own noise it is drafter-invariant speculative sampling (arXiv 2408.07978).
Verdict match(RowSampler& rows) {
  Verdict found;
  for (int32_t node = -1;;) {
    found.next = rows.choose(node + 1);
    const std::vector<int32_t> below = rows.proposal.children(node);
    const auto same = std::find_if(below.begin(), below.end(),
                                   [&](int32_t i) { return rows.proposal.tokens[size_t(i)] == found.next; });
    if (same == below.end()) return found;
    found.path.push_back(node = *same);
  }
}

double sum(const std::vector<double>& all) {
  double total = 0;
  for (double one : all) total += one;
  return total;
}

// max(scale p - q, 0), not normalized.
Chances residual(const Chances& p, double scale, const Chances& q) {
  Chances left = p;
  for (size_t i = 0, j = 0; i < p.ids.size(); ++i) {
    while (j < q.ids.size() && q.ids[j] < p.ids[i]) ++j;
    const double other = j < q.ids.size() && q.ids[j] == p.ids[i] ? q.probs[j] : 0;
    left.probs[i] = std::max(scale * p.probs[i] - other, 0.0);
  }
  return left;
}

// q without the siblings that were tried before.
Chances without(const Chances& q, const std::vector<int64_t>& tried) {
  Chances left = q;
  for (int64_t token : tried) {
    const auto at = std::lower_bound(q.ids.begin(), q.ids.end(), token);
    if (at != q.ids.end() && *at == token) left.probs[size_t(at - q.ids.begin())] = 0;
  }
  const double total = sum(left.probs);
  if (total > 0)
    for (double& one : left.probs) one /= total;
  return left;
}

// Speculative sampling (arXiv 2211.17192, 2302.01318); several children of a node are tried in turn against what is
// left of p (arXiv 2305.09781 with replacement, 2402.12374 without).
Verdict reject(RowSampler& rows) {
  const Proposal& proposal = rows.proposal;
  Verdict found;
  for (int32_t node = -1;;) {
    const int32_t row = node + 1;
    const std::vector<int32_t> below = proposal.children(node);
    if (below.empty()) {
      found.next = rows.choose(row);
      return found;
    }
    const int64_t position = rows.position(row);
    Chances p = rows.chances(row);
    std::vector<int64_t> tried;
    node = -1;
    for (size_t sibling = 0; sibling < below.size() && node < 0; ++sibling) {
      const int32_t child = below[sibling];
      const int64_t token = proposal.tokens[size_t(child)];
      const bool shrinks = !tried.empty() && !proposal.replacement;
      const Chances q = shrinks ? without(proposal.probs[size_t(child)], tried) : proposal.probs[size_t(child)];
      const double drafted = q.of(token);
      if (drafted <= 0) continue;  // it cannot have been sampled from q: no evidence either way
      // u q < p instead of u < p / q: q may be tiny; strict, because u may be 0 and p = 0 must never pass
      if (rows.noise.uniform(position, kAcceptNoise + sibling) * drafted < p.of(token)) {
        node = child;
        break;
      }
      tried.push_back(token);
      Chances left = residual(p, 1, q);
      const double mass = sum(left.probs);
      if (mass <= 0) continue;  // p and q are equal up to rounding: p is the right fallback
      for (double& one : left.probs) one /= mass;
      p = std::move(left);
    }
    if (node < 0) {
      found.next = draw(p, rows.noise.uniform(position, kResidualNoise));
      return found;
    }
    found.path.push_back(node);
  }
}

// Block verification of a chain (arXiv 2403.10444, Algorithm 2): its guesses are judged together, and the longest
// beginning that passes is accepted.
Verdict judge_block(RowSampler& rows) {
  const Proposal& proposal = rows.proposal;
  const int64_t start = rows.position(0);
  const int32_t length = proposal.size();
  int32_t accepted = 0;
  double chance = 1;  // p_i of the paper: that at least the first i guesses are accepted
  bool drawn = false;
  Chances left;  // not normalized: what follows exactly `accepted` guesses, if `drawn`
  for (int32_t i = 0; i <= length; ++i) {
    const size_t at = size_t(i);
    const double drafted = i < length ? proposal.probs[at].of(proposal.tokens[at]) : 0;
    const bool ends = drafted <= 0;  // q cannot have sampled this token: the chain ends before it
    double passes = chance, mine = 0;
    Chances after;
    if (!ends) {
      Chances p = rows.chances(i);
      after = residual(p, chance, proposal.probs[at]);
      const double mass = sum(after.probs);
      passes = mass > 0 || chance < 1 ? mass / (mass + 1 - chance) : 1;
      mine = chance * p.of(proposal.tokens[at]);
      if (mass <= 0) after = std::move(p);  // equal up to rounding
    }
    if (!i || rows.noise.uniform(rows.position(i - 1), kBlockNoise + uint64_t(start)) < passes) {
      accepted = i;
      drawn = !ends;
      left = std::move(after);
    }
    if (ends) break;
    chance = mine >= drafted ? 1 : mine / drafted;
    if (chance <= 0) break;  // nothing longer can be accepted
  }
  Verdict found;
  for (int32_t i = 0; i < accepted; ++i) found.path.push_back(i);
  found.next = drawn ? draw(left, rows.noise.uniform(rows.position(accepted), kResidualNoise)) : rows.choose(accepted);
  return found;
}

}  // namespace

Verdict verify(const Proposal& proposal, const edgespec_result& rows, const Sampling& sampling, const Noise& noise,
               Prefix& prefix) {
  RowSampler sampler(proposal, rows, sampling, noise, prefix);
  if (proposal.probs.empty() || !sampling.rejects()) return match(sampler);
  return sampling.block && proposal.chain() ? judge_block(sampler) : reject(sampler);
}

}  // namespace edgespec
