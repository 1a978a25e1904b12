#include "drawing.h"

#include <algorithm>
#include <cmath>

namespace edgespec {
namespace {

constexpr int64_t kFeed = 4;      // tokens that a draft reads in one pass with the pending one
constexpr int64_t kLongest = 12;  // guesses of a self-draft, for any budget
// A short head is used while at most one in kCommon of the text's last kTail tokens is beyond it.
constexpr int64_t kTail = 128, kCommon = 8;

// The noise that guesses are sampled with: a draft that is verified by rejection has its own in each round, because
// earlier rounds may depend on theirs.
uint64_t stream_of(const Request& request) {
  return request.sampling.rejects() ? kDraftNoise + uint64_t(request.tokens.size()) : kTargetNoise;
}

// Children of each expanded node, by depth.
std::vector<int64_t> widths_of(const std::vector<int64_t>& branch, int64_t length) {
  if (branch.size() == 1) return std::vector<int64_t>(size_t(std::min(length, kMostNodes / branch[0])), branch[0]);
  return {branch.begin(), branch.begin() + std::min<int64_t>(length, int64_t(branch.size()))};
}

}  // namespace

Proposal DrawingDrafter::draw_chain(const Request& request, int64_t length, const std::function<bool(double)>& weak) {
  const Sampling& sampling = request.sampling;
  const bool plain = sampling.plain_greedy() && !weak;
  Adjusted adjusted(sampling);
  Pushed pushed(request.prefix);
  Proposal chain;
  bool ended = false;
  for (int64_t last = -1; chain.size() < length && !ended; last = chain.tokens.back()) {
    const Row row = step(request, last, plain);
    if (row.best >= 0) {
      if (!std::isfinite(row.value)) refuse_logits();
      chain.tokens.push_back(row.best);
      continue;
    }
    if (sampling.greedy()) {
      chain.tokens.push_back(adjusted.likeliest(row.logits, row.columns, request.prefix));
    } else {
      const Support found = adjusted.support(row.logits, row.columns, request.prefix);
      const int64_t position = int64_t(request.tokens.size()) + chain.size();
      chain.tokens.push_back(found.draw(request.noise, position, stream_of(request)));
      if (sampling.rejects()) chain.probs.push_back(found.chances());
    }
    pushed.push(chain.tokens.back());
    if (weak && chain.size() < length)
      ended = weak(std::exp(log_softmax_at(row.logits, row.columns, chain.tokens.back())));
  }
  return chain;
}

// ---- a draft model -------------------------------------------------------------------------------------------------

DraftModel::DraftModel(Target& model, int64_t vocab, int64_t own_vocab, const std::vector<int64_t>& head,
                       std::vector<int64_t> branch, int64_t head_rows)
    : model_(model),
      vocab_(vocab),
      own_vocab_(own_vocab),
      head_(head),
      branch_(std::move(branch)),
      short_(head.empty() && head_rows < own_vocab ? static_cast<int>(head_rows) : 0),
      columns_(short_) {
  if (branch_.empty()) branch_ = {1};
}

void DraftModel::begin(const Request&) { common_ = 0; }

// Whether there is a padding row of the target's vocabulary, which the draft lacks.
bool DraftModel::is_unknown(const std::vector<int64_t>& tokens, int64_t from) const {
  return std::any_of(tokens.begin() + from, tokens.end(), [&](int64_t token) { return token >= own_vocab_; });
}

// Whether a text consists of tokens of the short head.
bool DraftModel::is_usual(const std::vector<int64_t>& tokens) const {
  const int64_t tail = std::min<int64_t>(kTail, int64_t(tokens.size()));
  const int64_t rare = std::count_if(tokens.end() - tail, tokens.end(), [&](int64_t token) { return token >= short_; });
  return rare * kCommon <= tail;
}

std::vector<int64_t> DraftModel::rows(int64_t budget) const {
  std::vector<int64_t> found{1};
  int64_t level = 1;
  for (int64_t width : widths_of(branch_, budget)) {
    level = branch_.size() == 1 ? width : level * width;
    found.push_back(found.back() + level);
  }
  found.resize(size_t(budget + 1), found.back());
  return found;
}

bool DraftModel::benchmark_step() {
  const int64_t token = 0;
  TextRows rows{&token, 1};
  rows.columns = columns_;
  model_.run(rows);
  return true;
}

Proposal DraftModel::propose(const Request& request, int64_t budget, const LeastGain&) {
  const std::vector<int64_t>& tokens = request.tokens;
  const int64_t size = int64_t(tokens.size()), length = std::min(budget, model_.context() - size);
  if (length < 1) return {};
  common_ = model_.follow(tokens, size - 1, common_);
  if (is_unknown(tokens, common_)) return {};
  caught_up_ = size - common_ <= kFeed;
  if (!caught_up_) {
    model_.prefill(tokens, common_, size - 1, request.reading);
    common_ = size - 1;
  }
  columns_ = short_ && is_usual(tokens) ? short_ : 0;
  return branch_.size() == 1 && branch_[0] == 1 ? draw_chain(request, length) : draw_tree(request, length);
}

// Runs the tokens that the slot has not, or a guess, and keeps them, or all except the last.
edgespec_result DraftModel::feed(const Request& request, int64_t guess, bool keeps_last, bool best) {
  TextRows rows{request.tokens.data() + common_, static_cast<int32_t>(int64_t(request.tokens.size()) - common_)};
  if (guess >= 0) rows.tokens = &guess, rows.count = 1;
  rows.last = 1;
  rows.top = best;
  rows.columns = columns_;
  const edgespec_result found = model_.run(rows);
  std::vector<int32_t> kept(size_t(rows.count - !keeps_last));
  for (size_t i = 0; i < kept.size(); ++i) kept[i] = static_cast<int32_t>(i);
  model_.keep(kept.data(), static_cast<int32_t>(kept.size()));
  return found;
}

DrawingDrafter::Row DraftModel::row(const edgespec_result& found, int32_t at, std::vector<float>& spread) const {
  Row made;
  made.logits = found.logits + size_t(at) * found.columns;
  made.columns = std::min<int64_t>(found.columns, vocab_);
  if (head_.empty()) return made;
  spread.assign(size_t(std::min(own_vocab_, vocab_)), -HUGE_VALF);
  for (size_t i = 0; i < head_.size(); ++i)
    if (head_[i] < int64_t(spread.size())) spread[size_t(head_[i])] = made.logits[i];
  made.logits = spread.data();
  made.columns = int64_t(spread.size());
  return made;
}

DrawingDrafter::Row DraftModel::step(const Request& request, int64_t guess, bool best) {
  // its likeliest token may not be one of its padding, which the target does not know
  best = best && own_vocab_ <= vocab_;
  const edgespec_result found = feed(request, guess, true, best);
  spread_.resize(1);
  if (!best) return row(found, 0, spread_[0]);
  Row made;
  made.best = head_.empty() ? found.ids[0] : head_[size_t(found.ids[0])];
  made.value = found.values[0];
  return made;
}

// Runs the draft after nodes of one depth: of a comb only the first choice, of a full tree all nodes again.
std::vector<DrawingDrafter::Row> DraftModel::level(const Request& request, const std::vector<int32_t>& nodes,
                                                   const Proposal& tree, size_t levels) {
  const bool comb = branch_.size() == 1;
  spread_.resize(nodes.size());
  if (nodes[0] < 0 || comb) {
    // the rows of a full tree need a common root: the pending token, which therefore stays out of the slot
    const bool root = !comb && levels > 1;
    return {row(feed(request, nodes[0] < 0 ? -1 : tree.tokens[size_t(nodes[0])], !root, false), 0, spread_[0])};
  }
  std::vector<int64_t> tokens{request.tokens.back()};
  std::vector<int32_t> parents{-1};
  for (int32_t node = 0; node < tree.size(); ++node) {
    tokens.push_back(tree.tokens[size_t(node)]);
    parents.push_back(tree.parents[size_t(node)] + 1);
  }
  TextRows rows{tokens.data(), static_cast<int32_t>(tokens.size()), parents.data()};
  rows.columns = columns_;
  const edgespec_result found = model_.run(rows);
  std::vector<Row> made;
  for (size_t i = 0; i < nodes.size(); ++i) made.push_back(row(found, nodes[i] + 1, spread_[i]));
  std::vector<int32_t> path{0};
  for (int32_t node = nodes[0]; node >= 0; node = tree.parents[size_t(node)]) path.insert(path.begin() + 1, node + 1);
  // the deepest that is run: what the first choices were stays for the next round
  if (path.size() == levels) model_.keep(path.data(), static_cast<int32_t>(path.size()));
  return made;
}

Proposal DraftModel::draw_tree(const Request& request, int64_t length) {
  const Sampling& sampling = request.sampling;
  const std::vector<int64_t> widths = widths_of(branch_, length);
  Adjusted adjusted(sampling);
  Proposal tree;
  tree.replacement = false;
  std::vector<int32_t> expanded{-1};
  for (size_t depth = 0; depth < widths.size(); ++depth) {
    const std::vector<Row> rows = level(request, expanded, tree, widths.size());
    std::vector<int32_t> below;
    for (size_t at = 0; at < expanded.size(); ++at) {
      const int32_t node = expanded[at];
      Pushed pushed(request.prefix);
      std::vector<int64_t> chosen;
      tree.push_path(node, pushed);
      const Row& row = rows[at];
      if (sampling.greedy()) {
        adjusted.likeliest(row.logits, row.columns, request.prefix);  // refuses a damaged row
        const float* scores = adjusted.row(row.logits, row.columns, request.prefix);
        const std::vector<double> wide(scores, scores + row.columns);
        chosen = best_of(wide.data(), row.columns, widths[depth]);
      } else {
        const Support found = adjusted.support(row.logits, row.columns, request.prefix);
        const uint64_t state = request.noise.state(int64_t(request.tokens.size() + depth), stream_of(request));
        std::vector<double> noisy(found.ids.size());
        for (size_t i = 0; i < noisy.size(); ++i)
          noisy[i] = found.logits[i] + gumbel_of(Noise::bits(state, found.ids[i]));
        for (int64_t i : best_of(noisy.data(), int64_t(noisy.size()), widths[depth]))
          chosen.push_back(found.ids[size_t(i)]);
        if (sampling.rejects()) tree.probs.insert(tree.probs.end(), chosen.size(), found.chances());
      }
      for (int64_t token : chosen) {
        below.push_back(tree.size());
        tree.tokens.push_back(token);
        tree.parents.push_back(node);
      }
    }
    if (branch_.size() == 1) below.resize(1);
    expanded = below;
  }
  return tree;
}

// ---- the target itself ---------------------------------------------------------------------------------------------

SelfDraft::SelfDraft(NativeTarget& target, const SkipSet& skip, Confidence& confidence)
    : target_(target), learned_(confidence), first_(confidence), own_(confidence), confidence_(&confidence) {
  const Gates& at = target.gates();
  gates_ = at.whole();
  const auto close = [&](const std::vector<int64_t>& layers, int first, int limit) {
    for (int64_t layer : layers)
      if (layer < at.layers && first + 2 * layer < limit) gates_[first + 2 * layer] = false;
  };
  close(skip.attention, 0, at.count);
  close(skip.mlp, 1, at.count);
  close(skip.high_attention, at.plane, at.count);
  close(skip.high_mlp, at.plane + 1, at.count);
  if (skip.high_head && at.plane + 2 * at.layers < at.count) gates_[at.plane + 2 * at.layers] = false;
  columns_ = skip.head_rows < target.vocab() ? static_cast<int>(skip.head_rows) : 0;
}

bool SelfDraft::benchmark_step() {
  run(0, 0, false);
  return true;
}

// With rejection sampling the length of a draft decides which random numbers are used: a seeded text begins with the
// values that are given.
void SelfDraft::begin(const Request& request) {
  own_ = first_;
  confidence_ = request.reproducible ? &own_ : &learned_;
  sure_.clear();
}

Proposal SelfDraft::propose(const Request& request, int64_t budget, const LeastGain& least_gain) {
  offset_ = 0;
  sure_.clear();
  if (!least_gain) return draw_chain(request, std::min(budget, kLongest));
  double reach = 1;
  return draw_chain(request, std::min(budget, kLongest), [&](double probability) {
    sure_.push_back(probability);
    reach *= confidence_->chance(probability);
    return reach * confidence_->mean() < least_gain(int64_t(sure_.size()));
  });
}

void SelfDraft::observe(const Proposal& proposal, const Verdict& verdict, const Seen&) {
  const size_t tested = size_t(proposal.tested(verdict.path));
  for (size_t depth = 0; depth < std::min(tested, sure_.size()); ++depth)
    confidence_->learn(sure_[depth], depth < verdict.path.size());
}

DrawingDrafter::Row SelfDraft::step(const Request& request, int64_t guess, bool best) {
  return run(guess < 0 ? request.tokens.back() : guess, offset_++, best);
}

// Runs a draft step, `offset` rows after the text.
DrawingDrafter::Row SelfDraft::run(int64_t token, int64_t offset, bool best) {
  TextRows rows{&token, 1};
  rows.offset = offset;
  rows.draft = true;
  rows.gates = gates_.get();
  rows.columns = columns_;
  rows.top = best;
  const edgespec_result found = target_.run(rows);
  Row made;
  if (best) {
    made.best = found.ids[0];
    made.value = found.values[0];
  } else {
    made.logits = found.logits;
    made.columns = found.columns;
  }
  return made;
}

}  // namespace edgespec
